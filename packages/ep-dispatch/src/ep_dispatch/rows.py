"""Row work: gathers, sums and permutations of rows, each with its exact transpose as backward.

T = tokens, K = slots per token, N = rows, H = width of a row. What is saved for backward is integer
indices only. Sums over a token's slots are accumulated in float32 or wider and in slot order, so that
they do not depend on the number of ranks (index_add would accumulate in the rows' own dtype and, on
CUDA, in an order that changes from run to run).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["gather_rows", "permute_rows", "sum_rows"]


def gather_rows(x: Tensor, token_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
    """Copy tokens into rows: row n is `x[token_of_row[n]]`.

    Args:
        x: [T, H].
        token_of_row: [N] int64.
        row_of_slot: [T, K] int64, the rows of each token (the transpose of `token_of_row`); a value
            of N or more is a slot without a row.

    Returns:
        [N, H]. Its backward is `sum_rows`.
    """
    return _GatherRows.apply(x, token_of_row, row_of_slot)  # type: ignore[no-any-return]


def sum_rows(rows: Tensor, token_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
    """Sum the rows of each token: the transpose of `gather_rows`, and its backward.

    Args:
        rows: [N, H].
        token_of_row: [N] int64.
        row_of_slot: [T, K] int64; a value of N or more is a slot without a row, which adds zero.

    Returns:
        [T, H] of the rows' dtype, accumulated in float32 or wider.
    """
    return _SumRows.apply(rows, token_of_row, row_of_slot)  # type: ignore[no-any-return]


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Row i of the result is `x[order[i]]`; `inverse` undoes `order` and is used in backward.

    A gather in both directions: the general backward of indexing would be a scatter-add.
    """
    return _PermuteRows.apply(x, order, inverse)  # type: ignore[no-any-return]


def _sum(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    (tokens, slots), width = row_of_slot.shape, rows.shape[1:]
    if rows.shape[0] == 0:
        return rows.new_zeros((tokens, *width))
    flat = row_of_slot.reshape(-1)
    complete = rows.shape[0] == flat.numel()
    gathered = rows.index_select(0, flat if complete else flat.clamp(max=rows.shape[0] - 1))
    if not complete:
        # Filled, not multiplied by zero: the row read in place of a missing one may hold anything.
        missing = (flat >= rows.shape[0]).view(-1, *[1] * len(width))
        gathered = gathered.masked_fill_(missing, 0)
    if slots == 1:
        return gathered
    wide = torch.promote_types(rows.dtype, torch.float32)
    return gathered.view(tokens, slots, *width).sum(dim=1, dtype=wide).to(rows.dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row, row_of_slot)
        return x.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_rows(grad, *ctx.saved_tensors), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row, row_of_slot)
        return _sum(rows, row_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_rows(grad, *ctx.saved_tensors), None, None


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return permute_rows(grad, inverse, order), None, None
