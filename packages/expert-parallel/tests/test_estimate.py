from __future__ import annotations

import json
import logging
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig

from ep_mesh import DistributedConfig
from expert_parallel.estimate import DEVICES, Device, Estimate, calibrate, estimate
from expert_parallel.estimate._compat import FakeTensorMode, unlogged_errors
from expert_parallel.estimate.memory import KINDS
from expert_parallel.estimate.operators import cost_of
from expert_parallel.estimate.routing import draw_experts
from expert_parallel.estimate.timeline import Timeline
from expert_parallel.meta import build_on_meta

H, LAYERS = 64, 2


def tiny(**changes: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **{
            "vocab_size": 256,
            "hidden_size": H,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        }
        | changes
    )


def run(config: dict[str, Any], **changes: Any) -> Estimate:
    return estimate(tiny(), DistributedConfig(**config), **{"sequence_length": 32} | changes)


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def test_what_lives_between_steps_is_a_closed_form() -> None:
    """Everything over 4 ranks: experts by ep, the rest by fsdp; in bf16, and two states of Adam."""
    found = run({"fsdp_size": 4, "ep_size": 4})
    shapes = [p.shape for p in build_on_meta(tiny()).parameters()]
    shards = [rounded(2 * math.prod(shape) // 4) for shape in shapes]
    buffers = 2 * rounded(4 * 16 // 2)  # of the rotary embedding
    counters = rounded(4) * len(shapes)
    assert found.memory["parameters"] == sum(shards) + buffers
    exact = sum(2 * math.prod(shape) // 4 for shape in shapes)
    assert exact <= found.memory["gradients"] <= sum(shards)  # those of a unit share one buffer
    assert found.memory["optimizer_states"] == 2 * sum(shards) + counters
    assert found.parameters == sum(math.prod(shape) for shape in shapes)
    assert found.parameters_per_rank == found.parameters // 4


def test_flops_are_those_of_the_formula() -> None:
    """6 per token and active parameter in products, and causal attention: 2 forward, 5 backward."""
    found = run({"fsdp_size": 2, "ep_size": 2}, gradient_checkpointing=False)
    attention = H * 16 * (4 + 2 * 2) + 4 * 16 * H
    experts = 2 * 3 * H * 32
    active = LAYERS * (attention + experts + H * 8) + H * 256
    scores = LAYERS * 4 * 16 * 32 * 32 // 2 * (4 + 10)
    assert found.flops == 6 * 32 * active + scores


def test_the_same_bytes_each_time_and_nothing_left_behind() -> None:
    settings = {"routing": "zipf", "ep_options": {"num_chunks": 2}}
    first, second = (
        json.dumps(run({"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, **settings).to_dict())
        for _ in range(2)
    )
    assert first == second
    assert not dist.is_initialized()
    assert torch.ones(2).sum().item() == 2


def test_tokens_are_counted_in_both_ways() -> None:
    found = run({"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"})
    own, unique = found.tokens_per_second_per_device, found.unique_tokens_per_second_per_device
    assert own == pytest.approx(32 / found.time.seconds)
    assert own == pytest.approx(2 * unique)


def test_the_peak_is_the_greatest_and_its_kinds_make_it_up() -> None:
    found = run({"fsdp_size": 2, "ep_size": 2})
    assert found.peak.bytes == max(phase.bytes for phase in found.phases.values())
    assert set(found.peak.by_kind) == set(KINDS)
    for phase in found.phases.values():
        assert sum(phase.by_kind.values()) == phase.bytes
        assert min(phase.by_kind.values()) >= 0


def test_without_groups_nothing_travels() -> None:
    found = run({})
    assert found.traffic == ()
    assert found.time.link == 0


def test_a_small_device_does_not_fit() -> None:
    small = replace(DEVICES["a100"], memory_bytes=1 << 30)
    assert not run({}, device=small).fits
    assert run({}, device="b200").fits


def test_stages_hand_on_what_they_compute_in() -> None:
    sizes = {"pp_size": 2, "fsdp_size": 2, "fsdp_mixed_precision": True}
    wide, narrow = (run(sizes, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    sent = [[t.sent_bytes for t in each.traffic if t.axis == "pp"] for each in (wide, narrow)]
    assert sent[0] == sent[1]
    assert sum(sent[0]) > 0


def test_an_operation_takes_the_slowest_of_its_parts() -> None:
    device = replace(DEVICES["h100"], matmul_share=0.5, memory_share=0.5)
    bf16 = torch.bfloat16
    assert device.kernel_time(989e12, 0, 1, bf16) == pytest.approx(2.0)
    assert device.kernel_time(0, 3.35e12, 1, bf16) == pytest.approx(2.0)
    assert device.kernel_time(1, 1, 3, bf16) == 3 * device.kernel_seconds


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"device": "h101"}, "h100"),
        ({"routing": "even"}, "balanced"),
        ({"sequence_length": 0}, "sequence_length"),
        ({"experts_recompute": "all"}, "gate_up"),
        ({"dtype": torch.int8}, "floating"),
        ({"config": {"pp_size": 2, "pp_schedule": "zero_bubble"}}, "zero_bubble.*gpipe"),
        (
            {"config": {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "symmetric_memory"}},
            "auto",
        ),
        ({"config": {"fsdp_size": 2, "fsdp_cpu_offload": True}}, "offload"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], told: str) -> None:
    config = settings.pop("config", {})
    with pytest.raises(ValueError, match=told):
        run(config, **settings)


def test_balanced_routing_uses_every_expert_alike() -> None:
    ids = draw_experts("balanced", 64, 4, 16, seed=0, layer="a", batch=0)
    assert (ids.flatten().bincount(minlength=16) == 16).all()


@pytest.mark.parametrize("routing", ["balanced", "multinomial", "zipf"])
def test_draws_differ_by_layer_and_batch_alone(routing: Any) -> None:
    def draw(**changes: Any) -> torch.Tensor:
        return draw_experts(routing, 50, 3, 10, **{"seed": 0, "layer": "a", "batch": 0} | changes)

    ids = draw()
    assert ids.shape == (50, 3)
    assert all(len(set(token)) == 3 for token in ids.tolist())
    assert torch.equal(ids, draw())
    for change in ({"seed": 1}, {"layer": "b"}, {"batch": 1}):
        assert not torch.equal(ids, draw(**change))


def test_zipf_is_skewed() -> None:
    ids = draw_experts("zipf", 500, 2, 32, seed=0, layer="a", batch=0)
    counts = ids.flatten().bincount(minlength=32)
    assert counts.max() > 5 * counts.float().mean()


DEVICE = Device(
    "test", 1e12, 1e12, 1 << 30, 1e9, 1e9, launch_seconds=1.0, kernel_seconds=0.0, sync_seconds=0.5
)


def test_a_slow_host_holds_the_device_up() -> None:
    line = Timeline(DEVICE)
    line.kernels(3, 0.25)
    assert (line.end(), line.waited_for_host) == (3.25, 3.0)


def test_a_gather_runs_beside_kernels_until_it_is_copied_out() -> None:
    line = Timeline(DEVICE)
    line.collective(10.0, "gather")
    line.kernels(1, 4.0)
    assert line.compute == 6.0
    line.gathered()
    assert (line.compute, line.waited_for_link) == (11.0, 5.0)


def test_an_exchange_is_waited_for_and_moves_a_gather_back() -> None:
    line = Timeline(DEVICE)
    line.collective(10.0, "gather")
    line.collective(2.0, "waited_for")
    assert line.compute == 4.0
    line.gathered()
    assert line.compute == 13.0


def test_an_exchange_that_is_sent_off_holds_up_what_waits_for_it_and_the_next_one() -> None:
    line = Timeline(DEVICE)
    first = line.collective(10.0, "sent_off")
    line.kernels(1, 4.0)
    second = line.collective(10.0, "sent_off")
    assert (first, second, line.compute) == (11.0, 21.0, 6.0)
    line.wait(first)
    assert (line.compute, line.waited_for_link) == (11.0, 5.0)
    assert line.end() == 21.0


def test_an_operator_that_refuses_its_inputs_raises_and_logs_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    for quiet, records in ((unlogged_errors(), 0), (nullcontext(), 1)):
        with quiet, FakeTensorMode(), pytest.raises(RuntimeError, match="expanded size"):
            torch.empty(2, 3).expand(2, 4)
        assert len(caplog.records) == records


def test_reading_a_number_lets_the_host_wait() -> None:
    line = Timeline(DEVICE)
    line.kernels(1, 5.0)
    line.read()
    assert line.host == 6.5


def test_views_cost_nothing_and_products_what_they_multiply() -> None:
    aten, x = torch.ops.aten, torch.ones(4, 8)
    assert cost_of(aten.t.default, (x,), {}, x.t()).kernels == 0
    y = torch.ones(8, 2)
    product = cost_of(aten.mm.default, (x, y), {}, x @ y)
    assert (product.flops, product.moved, product.kernels) == (2 * 4 * 8 * 2, 4 * (32 + 16 + 8), 1)


def test_a_loss_reads_the_log_probabilities_of_its_labels_alone() -> None:
    scores, labels = torch.zeros(16, 1000), torch.zeros(16, dtype=torch.int64)
    loss, total = forward_result = torch.ops.aten.nll_loss_forward(scores, labels, None, 1, -100)
    arguments = (scores, labels, None, 1, -100)
    cost = cost_of(torch.ops.aten.nll_loss_forward.default, arguments, {}, forward_result)
    assert cost.moved < 400
    arguments = (loss, scores, labels, None, 1, -100, total)
    grad = torch.ops.aten.nll_loss_backward(*arguments)
    cost = cost_of(torch.ops.aten.nll_loss_backward.default, arguments, {}, grad)
    assert grad.nbytes <= cost.moved < grad.nbytes + 400


def test_calibration_changes_what_it_measures() -> None:
    found = calibrate("a100", size=64, on="cpu")
    measured = found.matmul_share, found.memory_share, found.launch_seconds
    assert all(value > 0 for value in measured)
    restored = replace(
        found,
        matmul_share=DEVICES["a100"].matmul_share,
        memory_share=DEVICES["a100"].memory_share,
        launch_seconds=DEVICES["a100"].launch_seconds,
    )
    assert restored == DEVICES["a100"]
