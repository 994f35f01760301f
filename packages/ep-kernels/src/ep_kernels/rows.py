"""Moving rows by index: two functions, each the other's transpose.

Shape letters: H hidden size, R rows, N entries of the index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of `dtype` values are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows, ctx.dtype = rows.shape[0], rows.dtype
        return rows.index_select(0, index)

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
        accumulated = accumulation_dtype(values.dtype)
        out = torch.zeros((num_rows, *values.shape[1:]), dtype=accumulated, device=values.device)
        return out.index_add_(0, index, values.to(accumulated)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (index,) = ctx.saved_tensors
        return take_rows(grads[0], index).to(ctx.dtype), None, None, None


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Row `index[n]` of `rows` [R, H] at n: [N, H]. Saves the index alone.

    Unlike plain indexing, its backward sums the copies of a row in float32 or wider.
    """
    taken: Tensor = _Take.apply(rows, index)
    return taken


def sum_rows(values: Tensor, index: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """The sum of `values` [N, H] by `index`: [num_rows, H] of `dtype`. Saves the index alone.

    Summed in float32 or wider; a row that no index names is zero.
    """
    out: Tensor = _Sum.apply(values, index, num_rows, dtype)
    return out
