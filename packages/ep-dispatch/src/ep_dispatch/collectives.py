"""Collectives that autograd differentiates, each with its exact transpose as backward.

| function | forward | backward |
| --- | --- | --- |
| `copy_to_group` | identity | all-reduce (sum) |
| `reduce_over_group` | all-reduce (sum) | identity |
| `split_over_group` | this rank's chunk | all-gather |
| `gather_over_group` | all-gather | this rank's chunk, or reduce-scatter (`partial_grad=True`) |
| `reduce_scatter_over_group` | reduce-scatter (sum) | all-gather |
| `exchange_rows` | all-to-all of rows | all-to-all of rows, the other way |

A dimension of size n is cut as `torch.chunk` and DTensor's `Shard` cut it: chunks of `ceil(n / P)`,
the last ones shorter or empty. `group=None` means one rank, and every function is then the identity.
Every rank of a group must call with the same sizes (and the same `requires_grad`), in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .compiling import as_operator
from .keeping import kept

__all__ = [
    "chunk_bounds",
    "copy_to_group",
    "exchange_rows",
    "gather_over_group",
    "group_rank",
    "group_size",
    "reduce_over_group",
    "reduce_scatter_over_group",
    "split_over_group",
]

# Renamed in torch 2.13, where the old names warn on every call.
_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def group_size(group: ProcessGroup | None) -> int:
    """The number of ranks of `group`; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This process' rank in `group`; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and end of chunk `index` of a dimension of `size` cut into `parts`, as `torch.chunk` does.

    Chunks are `ceil(size / parts)` long; the last ones are shorter or empty, so that all `parts`
    chunks exist.
    """
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size)


def copy_to_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Give back `x`, whose gradient is summed over `group`.

    For a tensor that every rank holds whole and each uses for a part of the work.
    Cost: one all-reduce of `x` in backward.
    """
    return x if group_size(group) == 1 else _call(_Copy, x, group)


def reduce_over_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of `x` over `group`, the same on every rank; the gradient passes as it is.

    Cost: one all-reduce of `x` in forward.
    """
    return x if group_size(group) == 1 else _call(_Reduce, x, group)


def split_over_group(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """This rank's chunk of `x` along `dim`. Cost: one all-gather in backward."""
    return x if group_size(group) == 1 else _call(_Split, x, group, dim % x.ndim)


def gather_over_group(
    x: Tensor,
    group: ProcessGroup | None,
    dim: int = 0,
    *,
    size: int,
    partial_grad: bool = False,
) -> Tensor:
    """The chunks of all ranks put together along `dim`, of `size` in all.

    Args:
        x: this rank's chunk, as `chunk_bounds(size, P, rank)` cuts it.
        group: the ranks that hold the chunks.
        dim: the dimension that is cut.
        size: the whole dimension's size.
        partial_grad: what the ranks do with the result. False: all do the same, so that each has
            the whole gradient and keeps its chunk. True: each does a part of the work, so that the
            gradients are summed (one reduce-scatter in backward).

    Cost: one all-gather in forward, of `P * ceil(size / P)` slices.
    """
    if group_size(group) == 1:
        return x
    return _call(_Gather, x, group, dim % x.ndim, size, partial_grad)


def reduce_scatter_over_group(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """This rank's chunk, along `dim`, of the sum of `x` over `group`.

    Cost: one reduce-scatter in forward, one all-gather in backward.
    """
    return x if group_size(group) == 1 else _call(_ReduceScatter, x, group, dim % x.ndim)


def exchange_rows(
    x: Tensor, group: ProcessGroup | None, *, send: Sequence[int], receive: Sequence[int]
) -> Tensor:
    """All-to-all along dimension 0: `send[p]` rows go to rank p, `receive[p]` rows come from it.

    Returns the received rows in rank order, `[sum(receive), ...]`. Cost: one all-to-all in forward,
    one in backward.
    """
    return x if group_size(group) == 1 else _call(_Exchange, x, group, list(send), list(receive))


def _call(function: type[torch.autograd.Function], x: Tensor, *args: Any) -> Tensor:
    out: Tensor = function.apply(x, *args)
    return out


def _same(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.new_empty(x.shape)


@as_operator("all_reduce", like=_same)
def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _chunk(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    start, end = chunk_bounds(x.shape[dim], group_size(group), group_rank(group))
    return x.narrow(dim, start, end - start)


def _pad_first(x: Tensor, size: int) -> Tensor:
    """`x` with zeros after its first dimension up to `size`: collectives want equal chunks."""
    if x.shape[0] == size:
        return x.contiguous()
    out = x.new_zeros((size, *x.shape[1:]))
    out[: x.shape[0]] = x
    return out


def _gathered(x: Tensor, group: ProcessGroup, dim: int, size: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))


@as_operator("all_gather", "int dim", "SymInt size", like=_gathered)
def _all_gather(x: Tensor, group: ProcessGroup, dim: int, size: int) -> Tensor:
    parts = group_size(group)
    step = -(-size // parts)
    start, end = chunk_bounds(size, parts, group_rank(group))
    if x.shape[dim] != end - start:
        raise ValueError(
            f"gather of a dimension of size {size} over {parts} ranks: rank {group_rank(group)} "
            f"must hold {end - start} of it, got {tuple(x.shape)} with {x.shape[dim]} at dim {dim}."
        )
    local = _pad_first(x.movedim(dim, 0), step)
    out = local.new_empty((parts * step, *local.shape[1:]))
    _gather_single(out, local, group=group)
    return _in_place(out, size, dim)


def _scattered(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    start, end = chunk_bounds(x.shape[dim], group_size(group), group_rank(group))
    return x.new_empty((*x.shape[:dim], end - start, *x.shape[dim + 1 :]))


@as_operator("reduce_scatter", "int dim", like=_scattered)
def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    parts, size = group_size(group), x.shape[dim]
    step = -(-size // parts)
    whole = _pad_first(x.movedim(dim, 0), parts * step)
    out = whole.new_empty((step, *whole.shape[1:]))
    _reduce_scatter_single(out, whole, group=group)
    start, end = chunk_bounds(size, parts, group_rank(group))
    return _in_place(out, end - start, dim)


def _in_place(out: Tensor, size: int, dim: int) -> Tensor:
    """The first `size` slices of a new buffer, their dimension moved to `dim`; never a view of it.

    A view as the output of an FSDP2 unit would lose its backward hook to an in-place operation.
    """
    out.resize_((size, *out.shape[1:]))
    return out if dim == 0 else out.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _all_to_all(x: Tensor, group: ProcessGroup, send: list[int], receive: list[int]) -> Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


def _start_all_to_all(
    x: Tensor, group: ProcessGroup, send: list[int], receive: list[int]
) -> tuple[dist.Work, Tensor]:
    """What to wait for, and where the rows will be then. `x`, contiguous, stays as it is until then."""
    out = x.new_empty((sum(receive), *x.shape[1:]))
    work = dist.all_to_all_single(out, x, receive, send, group=group, async_op=True)
    return work, out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return kept(lambda: _all_reduce(x, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, x.shape[dim]
        return _chunk(x, group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.group, ctx.dim, ctx.size), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, dim: int, size: int, partial_grad: bool
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.partial_grad = group, dim, partial_grad
        return kept(lambda: _all_gather(x, group, dim, size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = _reduce_scatter if ctx.partial_grad else _chunk
        return back(grad, ctx.group, ctx.dim), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, x.shape[dim]
        return kept(lambda: _reduce_scatter(x, group, dim))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.group, ctx.dim, ctx.size), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, send: list[int], receive: list[int]
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return kept(lambda: _all_to_all(x, group, send, receive))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.group, ctx.receive, ctx.send), None, None, None
