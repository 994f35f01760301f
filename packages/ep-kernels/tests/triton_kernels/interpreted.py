"""Each kernel in Triton's interpreter on a CPU, beside float64: run by `test_triton.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import ep_kernels
from ep_kernels import (
    ExpertsSpec,
    ExpertsWeights,
    apply_rotary,
    experts_forward,
    module_experts_forward,
    operators,
    triton_kernels,
)
from ep_kernels.activation import scaled_activation, scaled_activation_backward
from ep_kernels.products import Taken
from ep_kernels.rows import gather, segment_sums, slots_by_row, sum_rows, take_rows
from ep_kernels.triton_kernels import activation, products
from ep_kernels.triton_kernels import rotary as rotary_kernels
from ep_kernels.triton_kernels import rows as row_kernels
from ep_kernels.triton_kernels.products import TritonProducts, tiles_of

sys.path.insert(0, str(Path(__file__).parents[1]))
import kernels_reference as plain

# float32: sums of up to 40 terms; bfloat16: the result has 8 bits, and the interpreter cuts off.
BOUNDS = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
COUNTS = pytest.mark.parametrize(
    "counts", [[7, 0, 20, 0], [0, 40, 1], [16, 2, 17], [0, 0], [21]], ids=str
)


def take_any_device(*tensors: Tensor) -> bool:
    return all(tensor.is_floating_point() for tensor in tensors)


def widened(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@pytest.fixture(autouse=True)
def on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take CPU tensors too, in blocks that few rows fill; new memory holds NaN."""
    assert isinstance(row_kernels._sum_kernel, interpreter.InterpretedFunction)
    monkeypatch.setattr(triton_kernels, "takes", take_any_device)
    monkeypatch.setattr(triton_kernels, "refusal", lambda _: None)
    monkeypatch.setattr(ep_kernels.module, "_compacts", lambda *_: False)
    monkeypatch.setattr(row_kernels, "_BLOCK", 32)
    monkeypatch.setattr(activation, "_BLOCK", 32)
    monkeypatch.setattr(products, "_MOST_SLOTS", 16)
    monkeypatch.setattr(products, "_block", lambda size, dtype: 32)
    new_empty, create_dot = Tensor.new_empty, interpreter.InterpreterBuilder.create_dot

    def filled(self: Tensor, *size: Any, **options: Any) -> Tensor:
        out = new_empty(self, *size, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter keeps bfloat16 as its bits, and would multiply those."""
        return create_dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(Tensor, "new_empty", filled)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def indices(size: int, below: int) -> Tensor:
    return torch.randint(below, (size,), generator=torch.Generator().manual_seed(1))


def check(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert out.shape == expected.shape
    assert plain.error(out, expected) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "slots", "width"), [(9, 20, 33), (1, 3, 1), (4, 0, 8), (5, 6, 64)]
)
def test_gather(dtype: torch.dtype, num_rows: int, slots: int, width: int) -> None:
    index = indices(slots, num_rows)
    for rows in (
        randn(num_rows, width, dtype=dtype),
        randn(width, num_rows, dtype=dtype).t(),
        randn(num_rows, width + 3, dtype=dtype)[:, 2 : width + 2],
        randn(1, width, dtype=dtype).expand(num_rows, width),
    ):
        assert torch.equal(gather(rows, index), rows[index])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@COUNTS
def test_segment_sums(counts: list[int], dtype: torch.dtype) -> None:
    starts = torch.tensor([0, *counts[:-1]]).cumsum(0)
    order = indices(sum(counts), 11)
    for width, weights in ((1, None), (45, randn(sum(counts), seed=2))):
        values = randn(11, width, dtype=dtype)
        terms = values[order].double() * (1 if weights is None else weights.double()[:, None])
        expected = torch.stack([part.sum(0) for part in terms.split(counts)])
        check(segment_sums(values, order, starts, weights), expected, dtype)


@DTYPES
def test_sums_and_gathers_are_each_others_gradient(dtype: torch.dtype) -> None:
    index = indices(23, 6)
    rows = randn(6, 35, dtype=dtype).requires_grad_()
    values = randn(23, 35, dtype=dtype).requires_grad_()
    taken, summed = take_rows(rows, index), sum_rows(values, index, 6, torch.float32)
    (rows_grad,) = torch.autograd.grad(taken, rows, values.detach())
    (values_grad,) = torch.autograd.grad(summed, values, rows.detach().float())
    expected = torch.zeros(6, 35, dtype=torch.float64).index_add(0, index, values.double())
    check(summed, expected, torch.float32)
    check(rows_grad, expected, dtype)
    assert torch.equal(values_grad, rows[index])


@DTYPES
def test_operators_of_dispatch(dtype: torch.dtype) -> None:
    x, index = randn(6, 5, 7, dtype=dtype), indices(23, 6)
    order, starts = slots_by_row(index, 6)
    ends = torch.cat([starts, torch.tensor([23])])
    rows = operators.gather_rows(x, index, order, ends)
    assert torch.equal(rows, x[index])
    expected = torch.zeros(6, 5, 7, dtype=torch.float64).index_add(0, index, rows.double())
    check(operators.sum_rows(rows, index, order, ends), expected, dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("slots", "inner"), [(5, 33), (3, 64), (1, 1), (0, 8)])
def test_swiglu(slots: int, inner: int, dtype: torch.dtype) -> None:
    spec = ExpertsSpec(activation="silu")
    pre = 4 * randn(slots, 2 * inner, dtype=dtype)
    grad, weights = randn(slots, inner, dtype=dtype, seed=1), randn(slots, 2, dtype=dtype)[:, 0]
    wide_pre, wide_weights = (x.double().requires_grad_() for x in (pre, weights))
    gate, up = wide_pre.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up * wide_weights[:, None]
    pre_grad, weights_grad = torch.autograd.grad(
        expected, (wide_pre, wide_weights), grad.double(), retain_graph=True
    )
    out = scaled_activation(spec, pre, weights, inner, copies=False)
    check(out, expected, dtype)
    for place in ("new", "pre", None):
        hidden, given = grad.clone(), pre.clone()
        to = {"new": torch.full_like(pre, torch.nan), "pre": given, None: None}[place]
        dots = scaled_activation_backward(spec, given, weights, hidden, copies=False, out=to)
        check(dots, weights_grad, torch.float64 if dtype is torch.float64 else torch.float32)
        assert torch.equal(hidden, out)
        if to is not None:
            check(to, pre_grad, dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("shape", "rotated", "batches"),
    [((2, 3, 4, 8), 8, 2), ((2, 5, 3, 10), 6, 1), ((1, 1, 2, 2), 2, 1), ((2, 0, 3, 4), 4, 2)],
    ids=str,
)
def test_rotary(
    shape: tuple[int, ...],
    rotated: int,
    batches: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several programs a position, heads that don't fill one, input and gradient of other strides."""
    monkeypatch.setattr(rotary_kernels, "_BLOCK", 16)
    batch, heads, length, width = shape
    x = randn(batch, length, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()
    grad = randn(batch, heads, width, length, dtype=dtype, seed=1).transpose(2, 3)
    cos = randn(batches, length, rotated, dtype=dtype, seed=2)
    sin = randn(batches, length, rotated, dtype=dtype, seed=3)
    exact = x.detach().double().requires_grad_()
    expected = plain.rotary_formula(exact, cos.double(), sin.double())
    out = apply_rotary(x, cos, sin)
    check(out, expected, dtype)
    (exact_grad,) = torch.autograd.grad(expected, exact, grad.double())
    (found,) = torch.autograd.grad(out, x, grad)
    check(found, exact_grad, dtype)


@COUNTS
@pytest.mark.parametrize("past", [0, 16])
@pytest.mark.parametrize("size", [1, 16])
def test_tiles_cover_each_slot_once(counts: list[int], past: int, size: int) -> None:
    ends = torch.tensor(counts).cumsum(0)
    num_slots = sum(counts) + past
    tiles = tiles_of(ends.to(torch.int32), num_slots, size)
    expert_of_slot = torch.full((num_slots,), -1)
    for expert, slot in zip(tiles.expert.tolist(), tiles.slot.tolist(), strict=True):
        if expert <= len(counts):
            part = expert_of_slot[slot : min(slot + size, int(tiles.ends[expert]))]
            assert (part == -1).all()
            assert len(part) > 0
            part.fill_(expert)
    expected = torch.repeat_interleave(torch.tensor([*counts, past]))
    assert torch.equal(expert_of_slot, expected)


def test_wrong_offsets_stay_within_the_slots() -> None:
    for offsets in ([5, 2, 9], [99, 99, 99], [-3, 4, 2]):
        tiles = tiles_of(torch.tensor(offsets), 7, 16)
        assert tiles.ends.min() >= 0
        assert tiles.ends.max() <= 7
        used = tiles.expert <= len(offsets)
        assert ((tiles.slot[used] >= 0) & (tiles.slot[used] <= 7)).all()


@DTYPES
@pytest.mark.parametrize(
    ("counts", "past"), [([7, 0, 20], 3), ([0, 33, 1, 0], 0), ([16], 16), ([0, 0], 2), ([0], 0)]
)
def test_products(counts: list[int], past: int, dtype: torch.dtype) -> None:
    experts, slots, inner, outer = len(counts), sum(counts), 33, 41
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    by = TritonProducts(offsets, slots + past)
    index = indices(slots + past, 13)
    left = Taken(randn(13, inner, dtype=dtype), index)
    right = randn(slots + past, outer, dtype=dtype, seed=1)
    right[slots:] = torch.nan  # rows of no expert
    stored = randn(experts, outer, inner, dtype=dtype, seed=2)
    groups = left.copied()[:slots].double().split(counts)
    expected = torch.cat([x @ w.T for x, w in zip(groups, stored.double(), strict=True)])
    for x, weight in [(left, stored.mT), (left.copied(), stored.mT.contiguous())]:
        out = by.rows(x, weight)
        check(out[:slots], expected, dtype)
        assert out.dtype is dtype
        assert not out[slots:].any()
    other = right[:slots].double().split(counts)
    matrices = torch.stack([x.T @ y for x, y in zip(groups, other, strict=True)])
    check(by.matrices(left, right, torch.float32), matrices, torch.float32)
    check(by.matrices(right, left, dtype), matrices.mT, dtype)
    squares = torch.stack([x.T @ x for x in groups])
    check(by.matrices(left.copied(), left.copied(), dtype), squares, dtype)


@pytest.mark.parametrize(
    ("kind", "recompute", "grouped", "dtype"),
    [
        ("gated", "gate_up", True, torch.bfloat16),
        ("biased", "none", True, torch.float32),
        ("gpt-oss", "none", True, torch.float32),
        ("biased", "none", False, torch.float32),
    ],
)
def test_experts(kind: str, recompute: Any, grouped: bool, dtype: torch.dtype) -> None:
    """From rows to gradients; one expert without a slot, one with most."""
    torch.manual_seed(0)
    experts = plain.Experts(hidden=19, intermediate=21, dtype=dtype, **plain.KINDS[kind])
    forward = module_experts_forward(experts, recompute=recompute, backend="triton")
    rows, twin = randn(13, 19, dtype=dtype), plain.as_float64(experts)
    row_of_slot = torch.cat([torch.arange(13), torch.arange(5), torch.tensor([3])])
    offsets = torch.tensor([13, 13, 18, 19], dtype=torch.int32)
    form: Any = forward.grouped
    reference: Any = plain.grouped_reference
    given: Any = rows, row_of_slot, torch.rand(19), offsets
    if not grouped:
        ids = torch.stack([torch.full((13,), 2), indices(13, 5)], 1)  # some are skipped
        form, reference, given = forward, plain.reference, (rows, ids, torch.rand(13, 2))
    out, grads = plain.gradients(form, experts, *given)
    expected, expected_grads = plain.plain_gradients(reference, twin, *given)
    assert plain.error(out, expected) <= plain.BOUNDS[dtype]
    for name, grad in grads.items():
        assert plain.error(grad, expected_grads[name]) <= 3 * plain.BOUNDS[dtype], name


@DTYPES
def test_rows_of_no_expert_are_zero(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = ExpertsWeights(up=randn(3, 26, 9, dtype=dtype), down=randn(3, 9, 13, dtype=dtype))
    rows = randn(12, 9, dtype=dtype)
    rows[7:] = torch.nan
    rows.requires_grad_()
    weights.up.requires_grad_()
    spec, offsets = ExpertsSpec(activation="silu"), torch.tensor([4, 4, 7])
    out = experts_forward(spec, weights, rows, offsets, backend="triton")
    out.sum().backward()
    expected = experts_forward(spec, weights, rows[:7], offsets)
    assert plain.error(out[:7], expected) <= plain.BOUNDS[dtype]
    assert not out[7:].any()
    assert not rows.grad[7:].any()
    assert weights.up.grad.isfinite().all()
