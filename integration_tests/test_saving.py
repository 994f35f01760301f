"""A sharded model that is saved is an ordinary checkpoint, and it is there whole or not at all."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from dispatching import dispatching, name_of
from safetensors import safe_open

from ep_testing import RankPool
from expert_parallel import AutoModelForCausalLM, parallelize, save_pretrained

FAMILIES = ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "qwen2_moe"]
LAYOUTS = [
    dispatching(tp_size=2, fsdp_size=4, ep_size=4),
    dispatching(tp_size=8, ep_size=8),
    dispatching(tp_size=2, fsdp_size=2, dp_replicate_size=2, ep_size=4),
]
MIXED = LAYOUTS[0]
IDS = torch.tensor([[5, 9, 17, 33, 65, 2, 11]])


def build(family: str, **changes: Any) -> transformers.PreTrainedModel:
    model = tiny_models.build(tiny_models.FAMILIES[family](**changes), torch.float32)
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    return model


def resave(rank: int, source: str, target: str, config: Any, options: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=config)
    with torch.no_grad():
        model(IDS)  # FSDP has gathered and freed parameters
    model.save_pretrained(target, **options)


def contents(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                assert name not in found, f"{name} is in two files"
                found[name] = opened.get_tensor(name)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_what_transformers_saves(
    ranks: RankPool, family: str, layout: dict[str, int], tmp_path: Path
) -> None:
    plain = build(family)
    plain.save_pretrained(tmp_path / "plain")
    options = {"max_shard_size": "50KB"}
    ranks.run(resave, str(tmp_path / "plain"), str(tmp_path / "ours"), layout, options)
    expected, found = contents(tmp_path / "plain"), contents(tmp_path / "ours")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((tmp_path / s / name).read_text()) for s in ("ours", "plain"))
        assert ours == theirs
    check_index(tmp_path / "ours", found, limit=50_000)

    # Equal parameters; how they lie in the files moves the last bit.
    torch.testing.assert_close(logits(tmp_path / "ours"), logits(tmp_path / "plain"))


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    return transformers.AutoModelForCausalLM.from_pretrained(path)(IDS).logits


def check_index(path: Path, tensors: dict[str, torch.Tensor], limit: int) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert {*index["weight_map"].values()} == {file.name for file in path.glob("*.safetensors")}
    for file in path.glob("*.safetensors"):
        held = [name for name, where in index["weight_map"].items() if where == file.name]
        assert len(held) == 1 or sum(tensors[name].nbytes for name in held) <= limit


def test_tied_weights_and_copied_heads_are_written_once(ranks: RankPool, tmp_path: Path) -> None:
    plain = build("qwen3_moe", tie_word_embeddings=True)  # 4 key-value heads for 8 ranks
    plain.save_pretrained(tmp_path / "plain")
    layout = dispatching(tp_size=8, ep_size=8)
    ranks.run(resave, str(tmp_path / "plain"), str(tmp_path / "ours"), layout, {})
    found = contents(tmp_path / "ours")
    assert "lm_head.weight" not in found
    assert found["model.layers.0.self_attn.k_proj.weight"].shape == (32, 32)
    assert found.keys() == contents(tmp_path / "plain").keys()
    # Equal parameters; how they lie in the files moves the last bit.
    torch.testing.assert_close(logits(tmp_path / "ours"), logits(tmp_path / "plain"))


def test_the_form_of_the_model_can_be_kept(ranks: RankPool, tmp_path: Path) -> None:
    plain = build("qwen3_moe")
    plain.save_pretrained(tmp_path / "plain", save_original_format=False, variant="a")
    options = {"save_original_format": False, "variant": "a", "max_shard_size": 60_000}

    def save(rank: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "plain", variant="a", distributed_config=MIXED
        )
        save_pretrained(model, tmp_path / "ours", **options)

    ranks.run(save)
    found = contents(tmp_path / "ours")
    assert found.keys() == contents(tmp_path / "plain").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in found
    assert all(
        re.match(r"model\.a-\d{5}-of", f.name) for f in (tmp_path / "ours").glob("*.safetensors")
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", variant="a")
    assert torch.equal(again.lm_head.weight, plain.lm_head.weight)


def built_and_trained(rank: int, path: str, config: Any) -> None:
    model = parallelize(build("qwen3_moe"), config)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    model(IDS, labels=IDS).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.save_pretrained(path)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_a_built_model_that_was_trained_is_saved(
    ranks: RankPool, layout: dict[str, int], tmp_path: Path
) -> None:
    plain = build("qwen3_moe")
    plain(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    ranks.run(built_and_trained, str(tmp_path / "model"), layout)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in plain.state_dict().items():
        found = again.state_dict()[name]
        assert (found - tensor).norm() <= 1e-5 * tensor.norm(), name


def failing_save(rank: int, source: str, target: str, budget: int) -> str:
    """Save with a disk that is full after some bytes; only the first rank writes."""
    from ep_plans.safetensors_file import FileWriter

    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=MIXED)
    left = budget
    plain_write = FileWriter.write

    def write(self: FileWriter, tensor: torch.Tensor) -> None:
        nonlocal left
        left -= tensor.nbytes
        if left < 0:
            raise OSError(28, "No space left on device")
        plain_write(self, tensor)

    FileWriter.write = write  # type: ignore[method-assign]
    try:
        model.save_pretrained(target, max_shard_size="50KB")
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        FileWriter.write = plain_write  # type: ignore[method-assign]
    return "saved"


@pytest.mark.parametrize("budget", [0, 70_000])
def test_a_full_disk_is_everyones_error_and_loses_nothing(
    ranks: RankPool, budget: int, tmp_path: Path
) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    path = str(tmp_path / "model")
    told = ranks.run(failing_save, path, path, budget, timeout=60)
    assert told[0] == "OSError: [Errno 28] No space left on device"
    assert all("OtherRankError" in each and "No space left" in each for each in told[1:])
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_checkpoint_is_saved_over_the_one_it_was_loaded_from(
    ranks: RankPool, tmp_path: Path
) -> None:
    plain = build("qwen3_moe")
    path = tmp_path / "model"
    plain.save_pretrained(path, max_shard_size="30KB")
    (path / "tokenizer.json").write_text("{}")
    names = {name: tensor.clone() for name, tensor in contents(path).items()}
    ranks.run(resave, str(path), str(path), MIXED, {})
    assert {entry.name for entry in path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    found = contents(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in names.items())


def resave_here(rank: int, path: str) -> list[str]:
    """Save to the working directory; what is in it afterwards."""
    started = Path.cwd()
    os.chdir(path)
    try:
        resave(rank, path, ".", MIXED, {})
        assert Path.cwd() == Path(path)
        return sorted(entry.name for entry in Path().iterdir())
    finally:
        os.chdir(started)


def test_the_working_directory_is_saved_to_and_stays(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "model"
    build("qwen3_moe").save_pretrained(path, max_shard_size="30KB")
    names = {name: tensor.clone() for name, tensor in contents(path).items()}
    told = ranks.run(resave_here, str(path))
    assert told == [["config.json", "generation_config.json", "model.safetensors"]] * 8
    found = contents(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in names.items())


def largest_piece(rank: int, source: str, target: str) -> int:
    """The largest piece that the first rank held while it saved."""
    from expert_parallel import lazy

    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=MIXED)
    sizes = [0]
    read = lazy.LazyTensor.read

    def watched(self: Any, box: Any, out: torch.Tensor) -> None:
        sizes.append(0 if out.is_meta else out.nbytes)
        read(self, box, out)

    lazy.LazyTensor.read = watched  # type: ignore[method-assign]
    try:
        save_pretrained(model, target, max_shard_size="4KB", save_original_format=False)
    finally:
        lazy.LazyTensor.read = read  # type: ignore[method-assign]
    return max(sizes)


def test_pieces_are_no_larger_than_a_file(ranks: RankPool, tmp_path: Path) -> None:
    plain = build("qwen3_moe")
    plain.save_pretrained(tmp_path / "plain")
    sizes = ranks.run(largest_piece, str(tmp_path / "plain"), str(tmp_path / "ours"))
    expert = 2 * 24 * 32 * 4  # one row of the largest tensor
    assert sizes == [expert] + [0] * 7
    found = contents(tmp_path / "ours")
    state = plain.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def refused(rank: int, source: str, **options: Any) -> str:
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=MIXED)
    try:
        model.save_pretrained("never", **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return "saved"


def test_arguments_that_a_sharded_save_lacks_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    source = str(tmp_path)
    assert "push_to_hub" in ranks.run(lambda rank: refused(rank, source, push_to_hub=True))[0]
    assert "nonsense" in ranks.run(lambda rank: refused(rank, source, nonsense=1))[0]
