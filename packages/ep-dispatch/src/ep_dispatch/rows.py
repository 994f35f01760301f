"""Row work: copies of rows and sums of rows, each the other's transpose and backward.

T = tokens (or other targets), N = rows, H = width of a row. What is saved for backward is integer
indices only. Sums are accumulated in float32 or wider and in a fixed order (index_add would accumulate
in the rows' own dtype and, on CUDA, in an order that changes from run to run).

Both are PyTorch operators (`torch.ops.ep`), so that a compiler traces through them and that a package
of kernels can register faster ones for a device. The index comes in both directions: `index` names the
target of each row; `order` and `ends` the rows of each target (`ep_dispatch.routing.transpose_index`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["gather_rows", "sum_rows"]


@torch.library.custom_op("ep::gather_rows", mutates_args=())
def _gather(x: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return x.index_select(0, index)


@torch.library.custom_op("ep::sum_rows", mutates_args=())
def _sum(rows: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    tokens = ends.shape[0] - 1
    if rows.numel() == 0 or rows.dtype is torch.float64:
        out = rows.new_zeros((tokens, *rows.shape[1:]))
        return out.index_add_(0, index, rows)
    # Sums in float32 whatever the dtype, without a wide copy of the rows.
    return torch.nn.functional.embedding_bag(
        order, rows.contiguous(), ends, mode="sum", include_last_offset=True
    )


@_gather.register_fake
def _(x: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((index.shape[0], *x.shape[1:]))


@_sum.register_fake
def _(rows: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0] - 1, *rows.shape[1:]))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _sum(grad, *ctx.saved_tensors), None, None, None


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gather(grad, *ctx.saved_tensors), None, None, None


_gather.register_autograd(_gather_backward, setup_context=_save)
_sum.register_autograd(_sum_backward, setup_context=_save)


def gather_rows(x: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Copy tokens into rows: row n is `x[index[n]]`.

    Args:
        x: [T, H].
        index: [N] int64, below T.
        order: [N] int64, the rows of token 0 first, then those of token 1, and so on.
        ends: [T + 1] int64, where each token's part of `order` begins, and the end.

    Returns:
        [N, H]. Its backward is `sum_rows`.
    """
    out: Tensor = _gather(x, index, order, ends)
    return out


def sum_rows(rows: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Sum the rows of each token: the transpose of `gather_rows`, and its backward.

    Args:
        rows: [N, H].
        index: as in `gather_rows`.
        order: as in `gather_rows`.
        ends: as in `gather_rows`.

    Returns:
        [T, H] of the rows' dtype, accumulated in float32 or wider; zero for a token without a row.
    """
    out: Tensor = _sum(rows, index, order, ends)
    return out
