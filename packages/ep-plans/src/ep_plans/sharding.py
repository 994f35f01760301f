"""Which part of a parameter a rank holds, as arithmetic, and how the parts make the whole again.

A parameter is cut first over model axes (TP, EP), then what is left over data axes (FSDP). Each cut is
`torch.chunk`'s: chunks of `ceil(n / P)`, the last ones shorter or empty. A packed weight (gate and up
in one tensor) is cut inside each of its `packs` equal blocks, so that a rank holds matching halves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ep_dispatch.collectives import chunk_bounds, gather_over_group, group_rank
from ep_mesh import Layout
from ep_plans._compat import StridedShard

# Mesh axes over which FSDP shards or replicates; every other axis is a model axis.
DATA_AXES = frozenset({"dp_replicate", "fsdp", "efsdp", "fsdp_tp"})


@dataclass(frozen=True)
class Cut:
    """A parameter dimension cut over one axis.

    Attributes:
        axis: the axis of `Layout` that the parts lie on ("tp" or "ep").
        dim: the dimension, not negative.
        packs: equal blocks in that dimension, each cut by itself; 1 for an ordinary weight.
        copies: consecutive ranks that hold the same part (key-value heads fewer than TP ranks).
    """

    axis: str
    dim: int
    packs: int = 1
    copies: int = 1

    @property
    def placement(self) -> Placement:
        """The cut as a DTensor placement."""
        if self.packs == 1:
            return Shard(self.dim)
        return StridedShard(self.dim, split_factor=self.packs)


@dataclass(frozen=True)
class ParameterSharding:
    """Where one parameter lies.

    Attributes:
        cut: how it is cut over a model axis; None: every rank of the TP group holds it whole.
        data_axis: the axis FSDP shards it on ("fsdp", "fsdp_tp" or "efsdp"); None: not by FSDP.
        partial_over: the axis over which each rank has only a part of its gradient, to be summed
            ("tp" or "ep"); None where each rank has the whole.
        mean_over: the axis over whose ranks autograd takes the gradient's mean ("dp"), where FSDP
            doesn't do it; None where it does or where there is one batch.
        float32: kept in float32 whatever the model's dtype.
    """

    cut: Cut | None = None
    data_axis: str | None = None
    partial_over: str | None = None
    mean_over: str | None = None
    float32: bool = False

    def local_shape(self, shape: Sequence[int], layout: Layout, rank: int) -> tuple[int, ...]:
        """The shape of what `rank` holds of a parameter of `shape`.

        Where that is nothing, because the cut leaves nothing, FSDP does not cut it further.
        """
        here = layout.coordinates(rank)
        sizes = {**{axis: len(layout.group(axis, rank)) for axis in here}}
        here["fsdp_tp"] = here["fsdp"] * layout.tp + here["tp"]
        sizes["fsdp_tp"] = layout.fsdp * layout.tp
        local = list(shape)
        if self.cut is not None:
            parts, index = sizes[self.cut.axis], here[self.cut.axis]
            local[self.cut.dim] = sum(
                end - start
                for start, end in cut_ranges(
                    local[self.cut.dim],
                    parts // self.cut.copies,
                    index // self.cut.copies,
                    self.cut.packs,
                )
            )
        if self.data_axis is not None and local and all(local):
            start, end = chunk_bounds(local[0], sizes[self.data_axis], here[self.data_axis])
            local[0] = end - start
        return tuple(local)

    def local_numel(self, shape: Sequence[int], layout: Layout, rank: int) -> int:
        """The number of elements that `rank` holds of a parameter of `shape`."""
        return math.prod(self.local_shape(shape, layout, rank))


def cut_ranges(size: int, parts: int, index: int, packs: int = 1) -> list[tuple[int, int]]:
    """The ranges of a dimension of `size` that part `index` of `parts` holds, one per pack.

    Raises:
        ValueError: `size` is not a multiple of `packs`.
    """
    if size % packs:
        raise ValueError(f"A packed dimension of {size} must be a multiple of its {packs} blocks.")
    block = size // packs
    start, end = chunk_bounds(block, parts, index)
    return [(pack * block + start, pack * block + end) for pack in range(packs)]


def cut_tensor(tensor: Tensor, dim: int, parts: int, index: int, packs: int = 1) -> Tensor:
    """Part `index` of `parts` of `tensor` along `dim`; a view when `packs` is 1."""
    pieces = [
        tensor.narrow(dim, start, end - start)
        for start, end in cut_ranges(tensor.shape[dim], parts, index, packs)
    ]
    return pieces[0] if packs == 1 else torch.cat(pieces, dim)


def shard_tensor(tensor: Tensor, cut: Cut, mesh: DeviceMesh) -> DTensor:
    """This rank's part of `tensor` as a DTensor on `mesh` and its device, in memory of its own.

    No communication. No more than the part is moved; a meta tensor stays one.

    Args:
        tensor: the whole tensor, the same on every rank of `mesh`, or on the meta device.
        cut: how to cut it.
        mesh: one axis, or two (parts, copies) where `cut.copies` is more than 1.
    """
    index = mesh.get_local_rank(0)
    local = cut_tensor(tensor, cut.dim, mesh.size(0), index, cut.packs).contiguous()
    if not local.is_meta:
        local = local.to(mesh.device_type)
    if local.untyped_storage().nbytes() > local.nbytes:
        local = local.clone()  # a view would keep the whole tensor alive
    placements = [cut.placement, *[Replicate()] * (mesh.ndim - 1)]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; a plain tensor is given back as it is.

    Knows packed weights, copied key-value heads, uneven and empty shards, and FSDP over any of them.
    Not differentiable. Cost: one all-gather per axis that cuts the tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    steps = [
        (names[i] if names else "", mesh.get_group(i), placement)
        for i, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate)
    ]
    data = [step for step in steps if step[0] in DATA_AXES]
    model = [step for step in steps if step[0] not in DATA_AXES]
    # Data axes cut what model axes left, so they are put together first: the last cut, undone first.
    shape = list(tensor.shape)
    for _, group, placement in model:
        dim, packs = dim_and_packs(placement, len(shape))
        shape[dim] = _part_size(shape[dim], group, packs)
    local: Tensor = tensor.to_local().detach()
    with torch.no_grad():
        for _, group, placement in reversed(data):
            dim, _ = dim_and_packs(placement, tensor.ndim)
            local = gather_over_group(local, group, dim, size=shape[dim])
        for _, group, placement in reversed(model):
            dim, packs = dim_and_packs(placement, tensor.ndim)
            local = _gather_packed(local, group, dim, tensor.shape[dim], packs)
    return local


def dim_and_packs(placement: Placement, ndim: int) -> tuple[int, int]:
    """The dimension that a placement cuts, not negative, and its packs: what `Cut.placement` says.

    Raises:
        ValueError: the placement is no cut.
    """
    if isinstance(placement, StridedShard):
        return int(placement.dim % ndim), int(placement.split_factor)
    if isinstance(placement, Shard):
        return placement.dim % ndim, 1
    raise ValueError(f"A parameter placed {placement} is neither sharded nor replicated.")


def _part_size(size: int, group: ProcessGroup, packs: int) -> int:
    parts = torch.distributed.get_world_size(group)
    return sum(end - start for start, end in cut_ranges(size, parts, group_rank(group), packs))


def _gather_packed(local: Tensor, group: ProcessGroup, dim: int, size: int, packs: int) -> Tensor:
    blocks = local.unflatten(dim, (packs, local.shape[dim] // packs))
    whole = gather_over_group(blocks, group, dim + 1, size=size // packs)
    joined: Tensor = whole.flatten(dim, dim + 1)
    return joined
