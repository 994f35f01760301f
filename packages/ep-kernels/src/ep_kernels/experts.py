"""The experts' MLP over rows grouped by expert.

Shape letters: H hidden size, I intermediate size, U first projection's width, E experts, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grouped import choose_backend, counts_of, grouped_mm, loop_mm
from .local import touch
from .rows import accumulation_dtype
from .spec import ExpertsSpec, ExpertsWeights, compute_dtype


def experts_forward(
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    rows: Tensor,
    offsets: Tensor,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Run each expert on its rows and scale the results by their routing weights.

    Args:
        spec: how the experts are put together.
        weights: the weights of E experts.
        rows: [R, H], grouped by expert. Cast to the dtype of the weights, or to autocast's.
        offsets: [E], integer: the end of each expert's rows. Rows past the last end belong to no
            expert: they come out as zeros, and get zero gradients, whatever they hold.
        row_weights: [R], the routing weight of each row, or None for ones.

    Returns:
        [R, H], of the dtype of the products or, with `row_weights`, of the wider of the two.

    Raises:
        ValueError: if shapes don't fit together.

    Costs one host synchronization if the backend is the loop (`choose_backend`), else none. Plain
    autograd: the rows, the first projection and what the activation saves are kept for backward.
    """
    _check(spec, weights, rows, offsets, row_weights)
    num_rows, dtype = rows.shape[0], compute_dtype(weights.up)
    weights = ExpertsWeights(*(None if w is None else w.to(dtype) for w in weights))  # type: ignore[arg-type]
    inputs = [rows, *weights.tensors()] + ([] if row_weights is None else [row_weights])
    if num_rows == 0:
        wide = dtype if row_weights is None else torch.promote_types(dtype, row_weights.dtype)
        return touch(rows.new_zeros(rows.shape, dtype=wide), *inputs)
    rows = rows.to(dtype)
    choice = choose_backend(rows.device, dtype, *weights.up.shape[1:], *weights.down.shape[1:])
    if choice.backend == "grouped_mm":
        return _masked(spec, weights, rows, offsets.to(torch.int32), row_weights)
    counts = counts_of(offsets, num_rows)
    used = sum(counts)
    if row_weights is not None:
        row_weights = row_weights[:used]
    if used:
        out = _looped(spec, weights, rows[:used], counts, row_weights)
    else:
        wide = dtype if row_weights is None else torch.promote_types(dtype, row_weights.dtype)
        out = touch(rows.new_zeros((0, rows.shape[1]), dtype=wide), *inputs)
    return torch.nn.functional.pad(out, (0, 0, 0, num_rows - used)) if used < num_rows else out


def _masked(
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    rows: Tensor,
    offsets: Tensor,
    row_weights: Tensor | None,
) -> Tensor:
    """By grouped_mm, which leaves the rows past the last offset unwritten, both ways.

    So each product is masked before (which zeroes the gradient it leaves) and after. Masks are
    selections, not products with zero: what was in the memory may be NaN.
    """
    position = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
    past = position >= offsets[-1]
    past_rows = past[:, None]
    expert = None
    if weights.up_bias is not None or weights.down_bias is not None:
        last = weights.num_experts - 1
        expert = torch.searchsorted(offsets, position, right=True).clamp_(max=last)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = weight if spec.transposed else weight.mT
        out = grouped_mm(x.masked_fill(past_rows, 0), matrix, offsets)
        return _add_bias(out, bias, expert).masked_fill(past_rows, 0)

    out = linear(spec.activate(linear(rows, weights.up, weights.up_bias)), *weights[1::2])
    if spec.post_norm is not None:
        out = spec.post_norm(out).masked_fill(past_rows, 0)
    return out if row_weights is None else out * row_weights.masked_fill(past, 0)[:, None]


def _looped(
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    rows: Tensor,
    counts: list[int],
    row_weights: Tensor | None,
) -> Tensor:
    """By one product per expert. Every row belongs to one here, so there is nothing to mask."""
    expert = None
    if weights.up_bias is not None or weights.down_bias is not None:
        ids = torch.arange(len(counts), device=rows.device)
        repeats = torch.tensor(counts, device=rows.device)
        expert = torch.repeat_interleave(ids, repeats, output_size=rows.shape[0])

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = weight if spec.transposed else weight.mT
        return _add_bias(loop_mm(x, matrix, counts), bias, expert)

    out = linear(spec.activate(linear(rows, weights.up, weights.up_bias)), *weights[1::2])
    if spec.post_norm is not None:
        out = spec.post_norm(out)
    return out if row_weights is None else out * row_weights[:, None]


def _add_bias(out: Tensor, bias: Tensor | None, expert: Tensor | None) -> Tensor:
    """Add `bias[expert]`, by way of float32 so that the gradient sums many rows in float32."""
    if bias is None:
        return out
    wide = bias.to(accumulation_dtype(bias.dtype))
    return (out + wide[expert]).to(out.dtype)


def _check(
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    rows: Tensor,
    offsets: Tensor,
    row_weights: Tensor | None,
) -> None:
    up, down = weights.up, weights.down
    if up.dim() != 3 or down.dim() != 3 or up.shape[0] != down.shape[0]:
        raise ValueError(
            f"weights {tuple(up.shape)} and {tuple(down.shape)} must be 3-d, one matrix per expert."
        )
    (inner, wide), (narrow, outer) = up.shape[1:], down.shape[1:]
    if not spec.transposed:
        inner, wide, narrow, outer = wide, inner, outer, narrow
    if wide != narrow * (2 if spec.gated else 1):
        kind = "gated" if spec.gated else "ungated"
        raise ValueError(
            f"{kind} experts: a first projection of width {wide} doesn't fit a second one from "
            f"{narrow}. Is `transposed` ({spec.transposed}) right?"
        )
    if rows.dim() != 2 or rows.shape[1] != inner:
        raise ValueError(f"rows {tuple(rows.shape)} must be [R, {inner}], as the weights say.")
    if inner != outer:
        raise ValueError(f"experts map {inner} to {outer}; input and output must have one size.")
    if offsets.shape != (up.shape[0],):
        raise ValueError(
            f"offsets {tuple(offsets.shape)} must be [{up.shape[0]}]: one end per expert."
        )
    if row_weights is not None and row_weights.shape != rows.shape[:1]:
        raise ValueError(
            f"row_weights {tuple(row_weights.shape)} must be [{rows.shape[0]}]: one per row."
        )
