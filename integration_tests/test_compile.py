"""Compiled layers: loss and gradients of the layers as written, few graphs, no break, nothing renamed."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatching import dispatching, name_of
from test_selective import CHECKPOINTING, communication
from test_trainer import GLOBAL_BATCH, arguments, check_same, curve, data, on_rank, one_process
from test_trainer import build as build_float32
from tiny_models import FAMILIES, build
from torch import Tensor

from ep_dispatch import keep_communicated
from ep_mesh import DistributedConfig
from ep_plans import compile_layers
from ep_testing import RankPool
from ep_trainer import EPTrainer
from expert_parallel import add_lora, parallelize

LENGTHS = (7, 7, 5, 6)  # of the steps; odd ones make uneven slices


class Counting:
    """A backend that counts the graphs; `aot_eager` runs them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


def steps(
    model: Any, shard: int, backend: Counting | None = None, *, count_sent: bool = True
) -> tuple[list[Tensor], list[int], int]:
    """Losses and gradients of steps of several lengths, the graphs after each, and collectives."""
    found, graphs = [], []
    # The compiler looks into the reduction of adapters' gradients, where a counter can't be.
    with communication() if count_sent else contextlib.nullcontext(Counter[str]()) as count:
        for number, length in enumerate(LENGTHS):
            ids = (torch.arange(2 * length).reshape(2, length) * (3 + shard + number)) % 90 + 3
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            found.append(loss.detach())
            for p in model.parameters():
                if p.grad is not None:
                    grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                    found.append(grad.clone())
            graphs.append(0 if backend is None else backend.graphs)
    return found, graphs, count.total()


def compare(rank: int, family: str, sizes: dict[str, Any], way: str) -> tuple[list[int], list[str]]:
    """The graphs after each step, and why one was broken."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    config = DistributedConfig(**(sizes if family == "llama4" else dispatching(**sizes)))
    backend = Counting()
    layers = {} if family == "gpt_oss" else {"num_hidden_layers": 3}
    model: Any = parallelize(build(FAMILIES[family](**layers)), config)
    if way == "lora":
        import peft

        add_lora(model, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    if way in ("plain", "selective"):
        more = {"context_fn": keep_communicated} if way == "selective" else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **more})
    shard = config.layout.batch_of(rank)
    count = way != "lora"
    expected, _, sent = steps(model, shard, count_sent=count)
    names = set(model.state_dict())
    compiled = compile_layers(model, backend=backend)
    assert compiled
    assert not any("experts" in name and "shared" not in name for name in compiled)
    found, graphs, sent_compiled = steps(model, shard, backend, count_sent=count)
    assert set(model.state_dict()) == names
    # Plain checkpointing runs a piece again to its end, that of an all-reduce, where it stopped before.
    assert sent_compiled == sent or (way == "plain" and sent_compiled > sent)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm() + 1e-15
    return graphs, list(counters["graph_break"])


SAMPLE: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {"tp_size": 2, "ep_size": 2}, ""),
    ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, ""),
    (
        "qwen3_moe",
        {"tp_size": 2, "fsdp_size": 2, "ep_size": 4, "enable_sequence_parallel": True},
        "selective",
    ),
]
REST: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, "plain"),
    ("qwen3_moe", {"tp_size": 2, "ep_size": 2}, "lora"),
    ("qwen2_moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}, "selective"),
    ("llama4", {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}, "plain"),
    ("gpt_oss", {"tp_size": 2, "dp_replicate_size": 2, "ep_size": 2}, "plain"),
    ("mixtral", {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, ""),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A sample of layouts; with `--all-layouts` all."""
    if "family" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--all-layouts")
        metafunc.parametrize(
            ("family", "sizes", "way"),
            [*SAMPLE, *(REST if whole else [])],
            ids=lambda value: value if isinstance(value, str) else name_of(value),
        )


def test_steps_are_those_of_the_layers_as_written(
    ranks: RankPool, family: str, sizes: dict[str, Any], way: str
) -> None:
    """One graph for each kind of piece and input, whatever the number of layers; and no break."""
    world = DistributedConfig(**sizes).layout.world_size
    for graphs, breaks in ranks.run(compare, family, sizes, way, world=world, timeout=240):
        assert not breaks
        assert 0 < graphs[0] <= 6  # of 12 or more pieces
        assert graphs[0] == graphs[1]
        assert graphs[1] < graphs[2] == graphs[3]  # other sizes are compiled once


FOUR = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}
FEW = {"max_steps": 4, CHECKPOINTING: True}


def train(rank: int, folder: str, resume: bool) -> Any:
    torch.compiler.reset()
    config = DistributedConfig(**dispatching(**FOUR))
    model = parallelize(build_float32(), config)
    names = set(model.state_dict())
    changes = {**FEW, "save_strategy": "steps", "save_steps": 2, "torch_compile_backend": "eager"}
    trainer = EPTrainer(model, arguments(folder, GLOBAL_BATCH // 2, **changes), **data())
    assert set(model.state_dict()) == names
    if not resume:
        return curve(trainer)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_learns_the_same_and_resumes(ranks: RankPool, tmp_path: Path) -> None:
    """Accumulation, checkpointing, evaluation and prediction too, and the fillers of a last batch."""
    expected = one_process(**FEW)
    for found in ranks.run(train, str(tmp_path), False, world=4, timeout=240):
        check_same(found, expected)
    for losses in ranks.run(train, str(tmp_path), True, world=4, timeout=240):
        assert losses == pytest.approx(expected.loss, rel=1e-5)


def test_with_inductor_and_over_stages(all_layouts: bool) -> None:
    if not all_layouts:
        pytest.skip("a C++ compiler runs for a minute")
    ranks = RankPool()  # new ones: what other tests imported inside `all_float64` knows no float32
    model = {"num_hidden_layers": 4}
    for sizes, backend in (
        ({"tp_size": 2, "ep_size": 2}, "inductor"),
        ({"pp_size": 2, "fsdp_size": 2, "ep_size": 2}, "aot_eager"),
        ({"pp_size": 2, "fsdp_size": 2, "ep_size": 2, "pp_schedule": "interleaved_1f1b"}, "eager"),
    ):
        few = {"max_steps": 4, "torch_compile_backend": backend}
        expected = one_process(model, max_steps=4)
        world = DistributedConfig(**sizes).layout.world_size
        for found in ranks.run(on_rank, sizes, model, few, world=world, timeout=400):
            check_same(found, expected)
    ranks.close()


def refuse(rank: int) -> None:
    config = DistributedConfig(pp_size=2, pp_schedule="zero_bubble")
    model = parallelize(build_float32(num_hidden_layers=4), config)
    with pytest.raises(ValueError, match="'1f1b', 'interleaved_1f1b' or 'gpipe'"):
        compile_layers(model)


def test_what_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="parallelize"):
        compile_layers(build_float32())
    ranks.run(refuse, world=2)
