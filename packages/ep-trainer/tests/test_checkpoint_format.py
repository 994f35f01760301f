"""What is written is whole and in the form that torch's own tools read; any box comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import full_tensor, parallelize
from ep_testing import RankPool
from ep_trainer.checkpoint import (
    BoxLoadPlanner,
    BoxSavePlanner,
    CheckpointError,
    SafetensorsReader,
    SafetensorsWriter,
)
from ep_trainer.checkpoint.state import model_tensors

# Experts' gate and up are packed in one tensor; with tp=4 two key-value heads are copied.
LAYOUTS = [
    {"tp_size": 4, "ep_size": 4},
    {"tp_size": 4},
    {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    {"tp_size": 2, "fsdp_size": 2},
    {"fsdp_size": 4, "ep_size": 2},
    {"tp_size": 2, "dp_replicate_size": 2, "ep_size": 2},
]


def build() -> nn.Module:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=66,  # not a multiple of 4: uneven shards
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
        )
    )


def save(rank: int, sizes: dict[str, int], folder: str) -> dict[str, Tensor]:
    config = DistributedConfig(**sizes)
    model = parallelize(build(), ParallelMesh(config.layout), config)
    state = model_tensors(model)
    dcp.save(dict(state), storage_writer=SafetensorsWriter(folder), planner=BoxSavePlanner())
    return {name: full_tensor(tensor).cpu() for name, tensor in state.items()}


def load(rank: int, sizes: dict[str, int], folder: str) -> dict[str, Tensor]:
    config = DistributedConfig(**sizes)
    model = parallelize(build(), ParallelMesh(config.layout), config)
    state = model_tensors(model)
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(float("nan"))
    dcp.load(dict(state), storage_reader=SafetensorsReader(folder), planner=BoxLoadPlanner())
    return {name: full_tensor(tensor).cpu() for name, tensor in state.items()}


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_layout_writes_the_whole_model_once(
    ranks: RankPool, tmp_path: Path, sizes: dict[str, int]
) -> None:
    expected = ranks.run(save, sizes, str(tmp_path), world=4)[0]
    # In one process, with our reader and with torch's.
    for reader in (SafetensorsReader(tmp_path), HuggingFaceStorageReader(str(tmp_path))):
        found = {name: torch.full_like(t, float("nan")) for name, t in expected.items()}
        planner = BoxLoadPlanner() if isinstance(reader, SafetensorsReader) else None
        dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    stored = SafetensorsReader(tmp_path)
    written = sum(chunk.nbytes for chunk in stored.chunks.values())
    assert written == sum(tensor.nbytes for tensor in expected.values()), "copies are written once"
    by_file = dict.fromkeys(stored.files, 0)
    for chunk in stored.chunks.values():
        by_file[chunk.file] += chunk.nbytes
    per_rank = [
        sum(n for f, n in by_file.items() if f.startswith(f"rank-{r:05d}")) for r in range(4)
    ]
    largest = max(tensor.nbytes for tensor in expected.values())
    assert max(per_rank) - min(per_rank) <= largest, "replicas share the work"


@pytest.mark.parametrize("target", LAYOUTS[:4:3], ids=str)
def test_any_layout_reads_any_other(
    ranks: RankPool, tmp_path: Path, target: dict[str, int]
) -> None:
    expected = ranks.run(save, LAYOUTS[2], str(tmp_path), world=4)[0]
    for found in ranks.run(load, target, str(tmp_path), world=4):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def item(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], size: tuple[int, ...]) -> Any:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(size))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def test_ranks_may_hold_different_names() -> None:
    plans = [
        SavePlan([item("first", (0,), (4,), (4,)), item("both", (0,), (4,), (4,))]),
        SavePlan([item("both", (0,), (4,), (4,)), item("last", (0,), (8,), (8,))]),
    ]
    kept, metadata = BoxSavePlanner().create_global_plan(plans)
    assert set(metadata.state_dict_metadata) == {"first", "both", "last"}
    assert [[each.index.fqn for each in plan.items] for plan in kept] == [
        ["both", "first"],
        ["last"],
    ]


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        # One rank's experts, or all but one's.
        ([[("w", (0, 0), (2, 3), (4, 3))]], "w: no rank holds the indices 2, 3 of dimension 0"),
        (
            [[("w", (0, 0), (2, 2), (4, 4))], [("w", (2, 2), (2, 2), (4, 4))]],
            "w: no rank holds 8 of its 16 elements",
        ),
        ([[("w", (0,), (3,), (4,))], [("w", (2,), (2,), (4,))]], "w: parts overlap"),
        # As many elements as there are, some twice.
        (
            [[("w", (0,), (2,), (4,))], [("w", (1,), (2,), (4,))]],
            "w: no rank holds the indices 3 of dimension 0",
        ),
        (
            [
                [("w", (0, 0), (2, 1), (2, 2))],
                [("w", (0, 1), (1, 1), (2, 2)), ("w", (1, 0), (1, 1), (2, 2))],
            ],
            "w: parts overlap, and no rank holds",
        ),
        ([[("w", (0,), (2,), (4,))], [("w", (2,), (2,), (5,))]], "w: ranks hold it as"),
    ],
)
def test_parts_that_are_not_the_whole_are_refused(plans: Any, words: str) -> None:
    made = [SavePlan([item(*each) for each in plan]) for plan in plans]
    with pytest.raises(CheckpointError, match=words):
        BoxSavePlanner().create_global_plan(made)


# -- damage, in one process


@pytest.fixture
def written(tmp_path: Path) -> Path:
    state = {"a.weight": torch.arange(12.0).view(3, 4), "b.experts": torch.randn(4, 2, 2)}
    dcp.save(
        state, storage_writer=SafetensorsWriter(tmp_path), planner=BoxSavePlanner(), no_dist=True
    )
    return tmp_path


def check(folder: Path) -> None:
    reader = SafetensorsReader(folder)
    reader.check_files()
    reader.check_values()
    reader.check_headers()


def changed_index(folder: Path) -> Iterator[Any]:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    yield index
    path.write_text(json.dumps(index))


FILE = "rank-00000.safetensors"


def test_a_truncated_file_is_named_with_its_key(written: Path) -> None:
    data = (written / FILE).read_bytes()
    (written / FILE).write_bytes(data[:-3])
    with pytest.raises(CheckpointError, match=rf"{FILE} has .* damaged from b.experts on"):
        check(written)
    (written / FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"{FILE} is missing; it holds a.weight"):
        check(written)


def test_a_flipped_bit_is_found_in_every_tensor(written: Path) -> None:
    check(written)
    data = (written / FILE).read_bytes()
    for index, chunk in SafetensorsReader(written).chunks.items():
        for at in (chunk.begin, chunk.begin + chunk.nbytes - 1):
            broken = bytearray(data)
            broken[at] ^= 4
            (written / FILE).write_bytes(broken)
            with pytest.raises(CheckpointError, match=rf"{FILE} is damaged: .* {index.fqn} "):
                check(written)


def test_a_changed_byte_is_found_everywhere_in_the_head_of_a_file(written: Path) -> None:
    data = (written / FILE).read_bytes()
    for at in range(min(chunk.begin for chunk in SafetensorsReader(written).chunks.values())):
        broken = bytearray(data)
        broken[at] ^= 1
        (written / FILE).write_bytes(broken)
        with pytest.raises(CheckpointError, match=rf"{FILE} is damaged: its head"):
            check(written)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"tensors": {"a": 1}, "files": {}}'])
def test_a_broken_index_is_named(written: Path, text: str) -> None:
    (written / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is (damaged|no index)"):
        check(written)


def targets() -> dict[str, Tensor]:
    return {"a.weight": torch.full((3, 4), -1.0), "b.experts": torch.full((4, 2, 2), -1.0)}


def refused(folder: Path, state: dict[str, Tensor], words: str) -> None:
    reader, planner = SafetensorsReader(folder), BoxLoadPlanner(str(folder))
    planner.set_up_planner(state, reader.read_metadata())
    with pytest.raises(CheckpointError, match=words) as caught:
        planner.create_local_plan()
    assert str(folder) in str(caught.value)
    assert all(bool((tensor == -1).all()) for tensor in state.values()), "nothing is changed"


def test_what_does_not_fit_is_told_before_anything_is_read(written: Path) -> None:
    more = targets() | {"c.bias": torch.full((2,), -1.0)}
    refused(written, more, "c.bias is not in it")
    wide = targets() | {"a.weight": torch.full((3, 5), -1.0)}
    refused(written, wide, r"a.weight has shape \(3, 4\) in it, \(3, 5\) here")
    half = targets() | {"a.weight": torch.full((3, 4), -1.0, dtype=torch.float16)}
    refused(written, half, r"a.weight is torch.float32 in it, torch.float16 here")


def test_a_missing_expert_is_an_error(written: Path) -> None:
    for index in changed_index(written):
        chunk = index["tensors"]["b.experts"]["chunks"][0]
        chunk[1] = [3, 2, 2]  # expert 3 was written by nobody
    refused(written, targets(), "b.experts: no file holds the indices 3 of dimension 0")
