"""Layouts found from a few layers: what is extrapolated equals what is simulated whole."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from ep_mesh import DistributedConfig, Layout, legal_ep_sizes
from expert_parallel.cli.layouts import bytes_of, grouped
from expert_parallel.estimate import DEVICES, Found, estimate, search
from expert_parallel.estimate.layers import keep_layers, kinds_of_layers
from expert_parallel.estimate.sampling import sampled_layers
from expert_parallel.estimate.search import Task, exactly, layout_text, layouts_of
from expert_parallel.meta import build_on_meta

GIB = 1 << 30


def tiny(**changes: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **{
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
            "tie_word_embeddings": False,
        }
        | changes
    )


def test_kinds_of_layers() -> None:
    model = build_on_meta(tiny(mlp_only_layers=[0, 3]))
    kinds = kinds_of_layers(model)
    assert kinds == [[0, 3], [1, 2, 4, 5, 6, 7]]
    base, longer = sampled_layers(kinds)
    assert base == [0, 1, 3, 7]
    assert longer == [([0, 1, 3, 5, 7], 4)]
    whole = [type(layer.mlp) for layer in model.model.layers]
    keep_layers(model, base)
    assert [type(layer.mlp) for layer in model.model.layers] == [whole[i] for i in base]
    assert model.config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("sizes", "checkpointing"),
    [
        ({"tp_size": 2, "fsdp_size": 2, "ep_size": 4, "enable_sequence_parallel": True}, True),
        ({"fsdp_size": 4, "ep_size": 2}, False),
        ({"pp_size": 2, "fsdp_size": 2, "ep_size": 2, "pp_stages": [5, 3]}, True),
    ],
)
def test_a_few_layers_tell_all(sizes: dict[str, Any], checkpointing: bool) -> None:
    """What lives between steps, kernels and FLOPs are equal; peaks within 0.5 %, the time within 2 %:

    draws of experts differ from layer to layer, and so do the rows that arrive.
    """
    config = DistributedConfig(**sizes)
    some, whole = (
        estimate(
            tiny(),
            config,
            sequence_length=128,
            gradient_checkpointing=checkpointing,
            sampled=sampled,
        )
        for sampled in (True, False)
    )
    assert some.memory == whole.memory
    assert some.parameters == whole.parameters
    assert some.parameters_per_rank == whole.parameters_per_rank
    assert sum(some.kernels.values()) == pytest.approx(sum(whole.kernels.values()), rel=0.01)
    assert some.flops == pytest.approx(whole.flops, rel=0.02)
    assert some.time.seconds == pytest.approx(whole.time.seconds, rel=0.02)
    for phase, peak in whole.phases.items():
        assert some.phases[phase].bytes == pytest.approx(peak.bytes, rel=0.005), phase
        assert sum(some.phases[phase].by_kind.values()) == some.phases[phase].bytes
    assert some.peak.phase == whole.peak.phase
    for a, b in zip(some.traffic, whole.traffic, strict=True):
        assert (a.axis, a.kind, a.calls) == (b.axis, b.kind, b.calls)
        assert a.sent_bytes == pytest.approx(b.sent_bytes, rel=0.05)


def test_a_pipeline_is_as_slow_as_its_slowest_place() -> None:
    model = tiny(num_hidden_layers=4)
    found, more = (
        estimate(
            model,
            DistributedConfig(pp_size=2, pp_micro_batches=count),
            sequence_length=64,
        )
        for count in (4, 8)
    )
    assert found.tokens_per_batch == 4 * 64
    assert found.settings["pp_micro_batches"] == 4
    rate = found.tokens_per_batch / found.time.seconds / 2
    assert found.unique_tokens_per_second_per_device == pytest.approx(rate)
    assert more.unique_tokens_per_second_per_device > found.unique_tokens_per_second_per_device
    # One wait for the other place: a quarter of what it computes for 4, an eighth for 8.
    for one, count in ((found, 4), (more, 8)):
        assert 0.9 < one.time.bubble * count / (one.time.seconds - one.time.bubble) <= 1
    # The first place holds two micro-batches at a time, however many there are.
    assert more.phases["forward"].bytes - found.phases["forward"].bytes < 4 * 4 * 64 * 64
    sent = {(t.axis, t.kind): t.calls for t in found.traffic}
    assert sent["pp", "send"] in (4, 5)


def test_layouts_are_those_of_the_rules() -> None:
    found = [Layout(**{k.removesuffix("_size"): v for k, v in s.items()}) for s in layouts_of(8)]
    assert len(set(found)) == len(found)
    assert all(layout.world_size == 8 for layout in found)
    assert {layout.ep for layout in found if (layout.tp, layout.fsdp) == (2, 4)} == set(
        legal_ep_sizes(2, 4)
    )


def run(devices: int = 2, config: Any = None, **changes: Any) -> Found:
    settings = {"sequence_length": 32, "memory_bytes": 80 * GIB, "processes": 1} | changes
    return search(tiny(num_hidden_layers=2) if config is None else config, devices, **settings)


def test_search() -> None:
    found = run()
    rates = [choice.estimate.unique_tokens_per_second_per_device for choice in found.choices]
    assert rates == sorted(rates, reverse=True)
    told = {layout_text(choice.config) for choice in found.choices}
    assert {"tp=2", "fsdp=2", "dp_replicate=2", "tp=2 ep=2", "fsdp=2 ep=2"} <= told
    assert "tp=2 ep=2 all_reduce" in told
    assert [one.layout for one in found.not_estimated] == ["pp=2"]
    for choice in found.choices:
        made = eval(choice.code, {"DistributedConfig": DistributedConfig})
        assert made == choice.config
        assert choice.static_bytes <= choice.estimate.peak.bytes
    replicated = next(c for c in found.choices if layout_text(c.config) == "dp_replicate=2")
    shapes = [p.shape for p in build_on_meta(tiny(num_hidden_layers=2)).parameters()]
    assert replicated.static_bytes == 4 * 2 * sum(map(math.prod, shapes))
    again = exactly(replicated, tiny(num_hidden_layers=2))
    assert again.estimate.peak == replicated.estimate.peak


def test_two_hops_where_a_group_spans_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[Task] = []

    def run_tasks(tasks: list[Task], processes: int | None) -> list[Any]:
        simulated.extend(tasks)
        return []

    monkeypatch.setattr(import_module(search.__module__), "run_tasks", run_tasks)
    run(4, device=replace(DEVICES["h100"], devices_per_node=2))
    hops = {
        layout_text(task.setting.config)
        for task in simulated
        if task.setting.config.ep_implementation == "all_to_all_hierarchical"
    }
    over_nodes = {"tp=4 ep=4", "tp=2 fsdp=2 ep=4", "fsdp=4 ep=4"}
    assert hops == {f"{layout} all_to_all_hierarchical" for layout in over_nodes}


def test_pipelines_if_asked_for_or_if_nothing_else_fits() -> None:
    asked = run(pipelines=True)
    assert not asked.not_estimated
    least = {layout_text(c.config): c.estimate.peak.bytes for c in reversed(asked.choices)}
    assert "pp=2" in least


def test_what_does_not_fit_is_told_by_reason() -> None:
    parameters = sum(p.numel() for p in build_on_meta(tiny(num_hidden_layers=2)).parameters())
    found = run(memory_bytes=2 * GIB + 4 * parameters)
    assert not found.choices
    reasons = dict(grouped(found.refused))
    assert any("alone exceed" in reason for reason in reasons)
    assert any("peak exceeds" in reason for reason in reasons)
    few = run(devices=3, config=tiny(num_hidden_layers=2))
    assert any("tp=3" in one.layout and "3" in one.detail for one in few.refused)


def test_a_dense_model() -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    found = run(config=config)
    assert {choice.config.ep_size for choice in found.choices} == {1}
    assert any("ep=2" in one.layout for one in found.refused)


def test_wrong_input() -> None:
    for changes, said in (
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"sequence_length": 1}, "sequence_length must be at least 2"),
        ({"micro_batch": 0}, "micro_batch at least 1, got"),
        ({"memory_bytes": GIB}, "give the memory of a device"),
        ({"processes": 0}, "processes must be at least 1"),
        ({"device": "h1000"}, "is no preset"),
        ({"dtype": torch.int8}, "floating point"),
    ):
        with pytest.raises(ValueError, match=said):
            run(**changes)


def test_memory_has_a_unit() -> None:
    assert bytes_of("80GiB") == 80 * GIB
    assert bytes_of(" 141 gb ") == 141 * 10**9
    assert bytes_of("0.5TiB") == 512 * GIB
    for wrong in ("80", "GiB", "80 apples", "-1GiB", "0GiB", ""):
        with pytest.raises(ValueError, match="a number and a unit"):
            bytes_of(wrong)
