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


_INDEX = "Tensor index, Tensor order, Tensor ends"
# Not `custom_op`, whose first call imports the compiler: half a second and 300 modules.
torch.library.define("ep::gather_rows", f"(Tensor x, {_INDEX}) -> Tensor")
torch.library.define("ep::sum_rows", f"(Tensor rows, {_INDEX}) -> Tensor")


@torch.library.impl("ep::gather_rows", "default")
def _gather(x: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return x.index_select(0, index)


@torch.library.impl("ep::sum_rows", "default")
def _sum(rows: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    tokens = ends.shape[0] - 1
    if rows.numel() == 0 or (rows.dtype is torch.float64 and rows.device.type == "cpu"):
        out = rows.new_zeros((tokens, *rows.shape[1:]))
        return out.index_add_(0, index, rows)
    # Sums in float32 or wider, without a wide copy of the rows. (In float64, slow on a CPU.)
    return torch.nn.functional.embedding_bag(
        order, rows.contiguous(), ends, mode="sum", include_last_offset=True
    )


@torch.library.register_fake("ep::gather_rows")  # type: ignore[untyped-decorator]
def _(x: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((index.shape[0], *x.shape[1:]))


@torch.library.register_fake("ep::sum_rows")  # type: ignore[untyped-decorator]
def _(rows: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0] - 1, *rows.shape[1:]))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return sum_rows(grad, *ctx.saved_tensors), None, None, None


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return gather_rows(grad, *ctx.saved_tensors), None, None, None


torch.library.register_autograd("ep::gather_rows", _gather_backward, setup_context=_save)
torch.library.register_autograd("ep::sum_rows", _sum_backward, setup_context=_save)


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
    out: Tensor = torch.ops.ep.gather_rows(x, index, order, ends)
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
    out: Tensor = torch.ops.ep.sum_rows(rows, index, order, ends)
    return out
