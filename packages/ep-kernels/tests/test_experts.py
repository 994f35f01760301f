"""Laws of the experts' MLP: it equals the plain per-token way, whatever the kind, dtype, routing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ep_kernels
from ep_kernels import ExpertsSpec, ExpertsWeights, experts_forward, module_experts_forward
from ep_kernels.mlp import experts_mlp

sys.path.insert(0, str(Path(__file__).parent))
from kernels_reference import (
    BOUNDS,
    KINDS,
    Experts,
    as_float64,
    as_on_a_gpu,
    error,
    gradients,
    plain_gradients,
    reference,
)


def routed(
    num_experts: int, num_rows: int, slots: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids (skipped and repeated ones among them) and weights."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, 16, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, num_experts + 1, (num_rows, slots), generator=generator)
    weights = torch.rand(num_rows, slots, generator=generator, dtype=torch.float64)
    return rows, ids, weights.to(torch.promote_types(dtype, torch.float32))


def check(experts: Experts, rows: Tensor, ids: Tensor, weights: Tensor, bound: float) -> None:
    out, grads = gradients(module_experts_forward(experts), experts, rows, ids, weights)
    expected, expected_grads = plain_gradients(reference, as_float64(experts), rows, ids, weights)
    assert out.dtype == rows.dtype
    assert error(out, expected) <= bound
    for name, grad in grads.items():
        assert error(grad, expected_grads[name]) <= 3 * bound, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_equals_reference_in_every_kind_and_dtype(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts = Experts(dtype=dtype, **KINDS[kind])
    check(experts, *routed(4, 13, 3, dtype), BOUNDS[dtype])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_equals_reference_for_any_routing(
    num_rows: int, slots: int, num_experts: int, seed: int
) -> None:
    """No rows, one row, every slot skipped, one expert, ids repeated within a row.

    In float64: a routing weight's gradient is a scalar product, which may cancel, so that the
    relative error of some draw in float32 has no bound.
    """
    torch.manual_seed(seed)
    dtype = torch.float64
    experts = Experts(num_experts, dtype=dtype, has_bias=True)
    check(experts, *routed(num_experts, num_rows, slots, dtype, seed), BOUNDS[dtype])


@pytest.mark.parametrize("hidden", [16, 15], ids=["grouped_mm", "loop"])
@pytest.mark.parametrize("ids", [[0] * 6, [3] * 6, [0, 0, 1, 1, 4, 4], [4] * 6], ids=str)
def test_one_expert_gets_all_or_none(hidden: int, ids: list[int]) -> None:
    experts = Experts(hidden=hidden, dtype=torch.float32)
    rows = torch.randn(3, hidden)
    check(experts, rows, torch.tensor(ids).view(3, 2), torch.rand(3, 2), 2e-6)


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_no_row_is_left_unwritten(
    kind: str, static: bool, dtype: torch.dtype, fill: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory is full of NaN, skipped rows and weights too, yet nothing of it comes out."""
    torch.manual_seed(0)
    if static:  # as on a GPU, where the host does not know how many rows are used
        as_on_a_gpu(monkeypatch)
    experts = Experts(dtype=dtype, **KINDS[kind])
    rows, ids, weights = routed(4, 12, 2, dtype)
    ids[3:6] = 4
    poisoned = rows.clone()
    poisoned[3:6] = fill
    poisoned_weights = weights.masked_fill(ids == 4, fill)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        out, grads = gradients(
            module_experts_forward(experts), experts, poisoned, ids, poisoned_weights
        )
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert out[3:6].abs().sum() == 0
    assert grads["rows"][3:6].abs().sum() == 0
    assert grads["weights"][ids == 4].abs().sum() == 0
    expected, expected_grads = gradients(
        module_experts_forward(experts), experts, rows, ids, weights
    )
    torch.testing.assert_close(out, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name])


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("kind", ["gated", "post norm", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_past_the_last_offset_are_zero(
    dtype: torch.dtype, kind: str, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if static:
        as_on_a_gpu(monkeypatch)
    experts = Experts(dtype=dtype, **KINDS[kind])
    spec = ExpertsSpec.from_module(experts)
    assert spec is not None
    rows = torch.randn(8, 16, dtype=dtype)
    rows[5:] = float("nan")
    rows.requires_grad_()
    out = experts_forward(spec, spec.read_weights(experts), rows, torch.tensor([1, 1, 4, 5]))
    out.sum().backward()
    assert out[5:].abs().sum() == 0
    assert rows.grad is not None
    assert rows.grad[5:].abs().sum() == 0
    expected = torch.cat(
        [experts.expert(e, rows[i : i + 1]) for i, e in enumerate([0, 2, 2, 2, 3])]
    )
    assert error(out[:5], expected) < BOUNDS[dtype]


def test_an_expanded_gradient() -> None:
    """As that of a plain sum, which has no memory of its own."""
    experts = Experts(dtype=torch.float32)
    spec = ExpertsSpec.from_module(experts)
    assert spec is not None
    rows = torch.randn(4, 16, requires_grad=True)
    out = experts_forward(spec, spec.read_weights(experts), rows, torch.tensor([1, 2, 3, 4]))
    (found,) = torch.autograd.grad(out.sum(), rows, retain_graph=True)
    (expected,) = torch.autograd.grad(out, rows, torch.ones_like(out))
    torch.testing.assert_close(found, expected)


def test_sums_over_slots_keep_float32() -> None:
    """512 equal slots: summed in bfloat16, forward or backward, they stop growing at 256."""
    experts = Experts(2, dtype=torch.bfloat16)
    rows = torch.randn(1, 16, dtype=torch.bfloat16)
    ids, weights = torch.zeros(1, 512, dtype=torch.long), torch.ones(1, 512)
    check(experts, rows, ids, weights, 2e-2)


def test_bias_gradient_keeps_float32() -> None:
    experts = Experts(1, dtype=torch.bfloat16, has_bias=True)
    rows = torch.randn(2000, 16, dtype=torch.bfloat16)
    ids, weights = torch.zeros(2000, 1, dtype=torch.long), torch.ones(2000, 1)
    out = module_experts_forward(experts)(rows, ids, weights)
    out.backward(torch.ones_like(out))
    assert error(experts.down_proj_bias.grad, torch.full((1, 16), 2000.0)) < 4e-3


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_computes_in_its_dtype(kind: str) -> None:
    torch.manual_seed(0)
    experts = Experts(dtype=torch.float32, **KINDS[kind])
    rows, ids, weights = routed(4, 13, 3, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, grads = gradients(module_experts_forward(experts), experts, rows, ids, weights)
    expected, expected_grads = gradients(
        module_experts_forward(experts), experts, rows, ids, weights
    )
    assert out.dtype == torch.float32
    assert 1e-6 < error(out, expected) < 2e-2
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert error(grad, expected_grads[name]) < 4e-2, name


def test_rows_wider_than_the_weights_are_cast() -> None:
    experts = Experts(dtype=torch.bfloat16)
    rows, ids, weights = routed(4, 9, 2, torch.bfloat16)
    forward = module_experts_forward(experts)
    wide = forward(rows.float(), ids, weights)
    assert wide.dtype == torch.float32
    assert error(wide, forward(rows, ids, weights)) < 5e-3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: type) -> None:
    experts = Experts(dtype=torch.float32)
    rows, ids, weights = routed(4, 9, 2, torch.float32)
    with mode():
        out = module_experts_forward(experts)(rows, ids, weights)
    assert error(out, reference(experts, rows, ids, weights)) < 2e-6


def test_frozen_experts_pass_gradients_to_rows() -> None:
    experts = Experts(dtype=torch.float32).requires_grad_(False)
    rows, ids, weights = routed(4, 9, 2, torch.float32)
    for some in (ids, torch.full_like(ids, 4)):
        leaf = rows.clone().requires_grad_()
        module_experts_forward(experts)(leaf, some, weights).sum().backward()
        assert leaf.grad is not None
        assert experts.down_proj.grad is None


def test_parameters_are_read_at_each_call() -> None:
    experts = Experts(dtype=torch.float32)
    forward = module_experts_forward(experts)
    rows, ids, weights = routed(4, 9, 2, torch.float32)
    before = forward(rows, ids, weights)
    experts._parameters["down_proj"] = torch.nn.Parameter(2 * experts.down_proj.detach())
    torch.testing.assert_close(forward(rows, ids, weights), 2 * before)


def test_checkpointing_gives_the_same_gradients() -> None:
    experts = Experts(dtype=torch.float32)
    rows, ids, weights = routed(4, 9, 2, torch.float32)
    forward = module_experts_forward(experts)
    _, expected = gradients(forward, experts, rows, ids, weights)
    for reentrant in (True, False):

        def checkpointed(*args: Tensor, reentrant: bool = reentrant) -> Tensor:
            return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=reentrant)

        _, grads = gradients(checkpointed, experts, rows, ids, weights)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name])


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_slot_every_parameter_gets_zeros(kind: str) -> None:
    experts = Experts(dtype=torch.float64, **KINDS[kind])
    rows, ids, weights = routed(4, 5, 2, torch.float64)
    out = module_experts_forward(experts)(rows, torch.full_like(ids, 4), weights)
    out.sum().backward()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_skipped_slots_take_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host may know how many there are, only the valid slots are computed."""
    seen = []

    def spy(spec: Any, parameters: Any, rows: Tensor, row_of_slot: Tensor, *rest: Any) -> Tensor:
        seen.append(row_of_slot.shape[0])
        return experts_mlp(spec, parameters, rows, row_of_slot, *rest)

    monkeypatch.setattr(ep_kernels.module, "experts_mlp", spy)
    rows, ids, weights = routed(4, 50, 3, torch.float32)
    module_experts_forward(Experts(dtype=torch.float32))(rows, ids, weights)
    assert seen == [int((ids < 4).sum())]
    assert seen[0] < ids.numel()


def test_non_contiguous_inputs() -> None:
    experts = Experts(dtype=torch.float32)
    rows, ids, weights = routed(4, 9, 2, torch.float32)
    forward = module_experts_forward(experts)
    strided = torch.empty(16, 9).T.copy_(rows)
    torch.testing.assert_close(
        forward(strided, ids.T.contiguous().T, weights.T.contiguous().T),
        forward(rows, ids, weights),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(5, 9)}, r"rows .5, 9. must be"),
        ({"offsets": torch.tensor([5])}, r"offsets .1,. must be"),
        ({"offsets": torch.tensor([6, 6])}, "5 rows"),
        ({"offsets": torch.tensor([3, 2])}, "must not fall"),
        ({"row_weights": torch.zeros(5, 1)}, r"row_weights .5, 1. must be"),
        ({"up": torch.zeros(2, 5, 8, dtype=torch.float64)}, "transposed"),
        ({"up": torch.zeros(16, 8, dtype=torch.float64)}, "3-d"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    given = {
        "rows": torch.zeros(5, 8),
        "offsets": torch.tensor([2, 5]),
        "row_weights": torch.zeros(5),
        "up": torch.zeros(2, 12, 8, dtype=torch.float64),
    } | change
    weights = ExpertsWeights(given["up"], torch.zeros(2, 8, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match=message):
        experts_forward(
            ExpertsSpec(), weights, given["rows"], given["offsets"], given["row_weights"]
        )


@pytest.mark.parametrize("bad", [-1, 5])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    forward = module_experts_forward(Experts(dtype=torch.float32))
    ids = torch.tensor([[0], [bad]])
    with pytest.raises(ValueError, match="made local"):
        forward(torch.zeros(2, 16), ids, torch.ones(2, 1))
