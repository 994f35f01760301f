"""Moving rows by index: gathers and the sums that undo them.

Shape letters: H width of a row, R rows, S slots (entries of the index).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import triton_kernels

_KEPT = "_ep_slots_by_row"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of `dtype` values are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def slots_by_row(row_of_slot: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The transpose of a gather: which slots `segment_sums` adds to each row.

    Args:
        row_of_slot: [S] int64.
        num_rows: R.

    Returns:
        `order` [S], the slots in the order of their rows, and `starts` [R], where each row's slots
        begin in it. A row's slots keep their order, so that sums don't change from run to run.
    """
    ordered, order = row_of_slot.sort(stable=True)
    every = torch.arange(num_rows, device=row_of_slot.device)
    return order, torch.searchsorted(ordered, every)


def kept_slots_by_row(row_of_slot: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """As `slots_by_row`, once for a tensor: a layer that is computed again has the routing that it had.

    The result lives as long as `row_of_slot` does.
    """
    if row_of_slot.is_inference():  # which doesn't tell whether it was changed
        return slots_by_row(row_of_slot, num_rows)
    now = num_rows, row_of_slot._version
    known = getattr(row_of_slot, _KEPT, None)
    if known is None or known[0] != now:
        known = now, slots_by_row(row_of_slot, num_rows)
        setattr(row_of_slot, _KEPT, known)
    by_row: tuple[Tensor, Tensor] = known[1]
    return by_row


def segment_sums(
    values: Tensor, order: Tensor, starts: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Sums of the rows of `values` [S, H] that `order` names from one of `starts` to the next.

    An embedding bag is just that, in one pass, accumulated in float32 or wider on every device. The
    result is [len(starts), H], of the dtype of the values; an empty segment is zero. `weights` [S]
    scale what `order` names.
    """
    if triton_kernels.takes(values):
        from .triton_kernels import rows as kernels

        return kernels.segment_sums(values, order, starts, weights)
    return torch.nn.functional.embedding_bag(
        order, values, starts, mode="sum", per_sample_weights=weights
    )


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """Row `index[s]` of `rows` [R, H] at s: [S, H]. Unknown to autograd."""
    if triton_kernels.takes(rows):
        from .triton_kernels import rows as kernels

        return kernels.gather(rows, index)
    return rows.index_select(0, index)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows, ctx.dtype = rows.shape[0], rows.dtype
        return gather(rows, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (index,) = ctx.saved_tensors
        return sum_rows(grads[0], index, ctx.num_rows, ctx.dtype), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, index: Tensor, num_rows: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dtype = values.dtype
        if triton_kernels.takes(values):  # where index_add_ adds in any order
            wide = values.to(torch.promote_types(values.dtype, dtype))
            return segment_sums(wide, *slots_by_row(index, num_rows)).to(dtype)
        accumulated = accumulation_dtype(values.dtype)
        out = torch.zeros((num_rows, *values.shape[1:]), dtype=accumulated, device=values.device)
        return out.index_add_(0, index, values.to(accumulated)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (index,) = ctx.saved_tensors
        return take_rows(grads[0], index).to(ctx.dtype), None, None, None


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Row `index[s]` of `rows` [R, H] at s: [S, H]. Saves the index alone.

    Unlike plain indexing, its backward sums the copies of a row in float32 or wider.
    """
    taken: Tensor = _Take.apply(rows, index)
    return taken


def sum_rows(values: Tensor, index: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """The sum of `values` [S, H] by `index`: [num_rows, H] of `dtype`. Saves the index alone.

    Summed in float32 or wider; a row that no index names is zero.
    """
    out: Tensor = _Sum.apply(values, index, num_rows, dtype)
    return out
