"""Where the factors of a low-rank term of a sharded weight lie, and how their gradients are reduced.

Shapes: a weight [..., A, B] gets `left @ right` added, left [..., A, N] and right [..., N, B].

[Note: the factors of a cut weight]
A weight that is cut over TP is used in parts: rank `i` computes `x @ W_i`. Cut along A, its part of
the term is `left_i @ right`: left is cut with the weight, and right is whole, of whose gradient each
rank has the part that came through its `left_i`, to be summed over TP. Cut along B it is the other
way round. No activation is exchanged for the term: what the style does for the weight's own part of
the output (a sum over TP, say) is linear, and does it for the term's part too.
Experts that are cut over EP have both factors cut with them.
The factors are left out of FSDP: they are small, train in a dtype of their own, and come and go
after FSDP has wrapped the model. Their gradients get the mean over batches here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ep_mesh import ParallelMesh
from ep_plans.sharding import Cut, ParameterSharding


def factor_shardings(
    weight: ParameterSharding, ndim: int
) -> tuple[ParameterSharding, ParameterSharding]:
    """How the left and the right factor of a term of a weight of `ndim` dimensions are sharded.

    Raises:
        ValueError: the weight has fewer than two dimensions.
    """
    if ndim < 2:
        raise ValueError(f"A low-rank term needs a weight of 2 or more dimensions, got {ndim}.")
    cut = weight.cut
    whole = ParameterSharding(partial_over=weight.partial_over, mean_over="dp")
    if cut is None:
        return whole, whole
    if cut.dim < ndim - 2:
        both = ParameterSharding(cut, mean_over="dp")
        return both, both
    along = ParameterSharding(cut, mean_over="dp")
    across = ParameterSharding(partial_over=cut.axis, mean_over="dp")
    return (along, across) if cut.dim == ndim - 2 else (across, along)


def transposed_sharding(sharding: ParameterSharding, ndim: int) -> ParameterSharding:
    """The sharding of a factor whose last two dimensions are stored the other way round."""
    cut = sharding.cut
    if cut is None or cut.dim < ndim - 2:
        return sharding
    return replace(sharding, cut=replace(cut, dim=2 * ndim - 3 - cut.dim))


@dataclass(frozen=True)
class GradientReduction:
    """What is done to a gradient: summed over groups, one after the other, and multiplied.

    Attributes:
        groups: the groups of more than one rank.
        factor: what it is multiplied with.
    """

    groups: tuple[ProcessGroup, ...] = ()
    factor: float = 1.0


def gradient_reduction(sharding: ParameterSharding, mesh: ParallelMesh) -> GradientReduction:
    """The reduction of the gradient of a parameter that FSDP does not know; see `parameters.py`.

    Every rank of the world must call, in the same order.
    """
    cut = sharding.cut
    axes = ["efsdp", "dp_replicate"] if cut is not None and cut.axis == "ep" else ["dp"]
    if sharding.partial_over is not None:
        axes.insert(0, sharding.partial_over)
    groups = [mesh.group(axis) for axis in axes if mesh.size(axis) > 1]
    if cut is not None and cut.copies > 1:
        groups.insert(0, cut_mesh(mesh, cut)["tp_copy"].get_group())
    return GradientReduction(tuple(groups), 1.0 / mesh.layout.data_parallel_size)


def cut_mesh(mesh: ParallelMesh, cut: Cut) -> DeviceMesh:
    """The mesh that the parts of a cut lie on: one axis, or two where parts have copies."""
    if cut.copies > 1:
        return mesh.split_tp(mesh.size("tp") // cut.copies)
    return mesh.mesh(cut.axis)


def reduce_gradients(
    tensors: Sequence[Tensor], reductions: Sequence[GradientReduction]
) -> tuple[Tensor, ...]:
    """The tensors, whose gradients are reduced together once all of them are there.

    One node of the graph: its collectives come in one order on every rank, also where a rank's graph
    behind it is another (experts that got no row). A tensor that nothing used has a gradient of zeros.
    Gradients are contiguous, as a fused optimizer needs them: autograd lays out those of plain tensors
    like the tensor, those of DTensors as they come.
    Cost in backward: one all-reduce per distinct group, of all the gradients that it sums, copied.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return tuple(tensors)
    reduced: tuple[Tensor, ...] = _ReduceGradients.apply(tuple(reductions), *tensors)
    return reduced


class _ReduceGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, reductions: tuple[GradientReduction, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.reductions = reductions
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        reductions: tuple[GradientReduction, ...] = ctx.reductions
        reduced = [
            grad.contiguous() * reduction.factor
            for grad, reduction in zip(grads, reductions, strict=True)
        ]
        for group in dict.fromkeys(group for each in reductions for group in each.groups):
            members = [at for at, each in enumerate(reductions) if group in each.groups]
            flat = torch.cat([reduced[at].reshape(-1) for at in members])
            dist.all_reduce(flat, group=group)
            sizes = [reduced[at].numel() for at in members]
            for at, part in zip(members, flat.split(sizes), strict=True):
                reduced[at] = part.view_as(reduced[at])
        return None, *reduced
