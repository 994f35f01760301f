"""Which box of a parameter each rank holds, from its DTensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ep_plans.boxes import Box, Part, lengths, local_box, whole_box
from ep_plans.sharding import DATA_AXES, dim_and_packs


def box_of(tensor: torch.Tensor) -> Box:
    """The box that this rank holds; all of a tensor that is no DTensor.

    Raises:
        ValueError: the rank holds another shape than the placements say.
    """
    if not isinstance(tensor, DTensor):
        return whole_box(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a parameter lies on a mesh without this rank"
    box = box_at(tensor, coordinate)
    if lengths(box) != tuple(tensor.to_local().shape):
        raise ValueError(
            f"A parameter of shape {tuple(tensor.shape)} placed {tensor.placements} on the mesh "
            f"{tensor.device_mesh} should hold {lengths(box)} on this rank, but holds "
            f"{tuple(tensor.to_local().shape)}. Load and save only what `parallelize` sharded."
        )
    return box


def home_of(tensor: torch.Tensor, device: torch.device, *, offload: bool) -> torch.device:
    """Where a parameter lives: on `device`, or in host memory if FSDP manages and offloads it."""
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    managed = mesh is not None and not DATA_AXES.isdisjoint(mesh.mesh_dim_names or ())
    return torch.device("cpu") if offload and managed else device


def holders(tensor: DTensor) -> dict[int, Box]:
    """The box of every rank of the mesh that the parameter lies on."""
    ranks = tensor.device_mesh.mesh
    places = torch.cartesian_prod(*(torch.arange(size) for size in ranks.shape))
    return {
        int(ranks[tuple(place)]): box_at(tensor, place)
        for place in places.view(-1, ranks.ndim).tolist()
    }


def box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """The box of the rank at `coordinate` of the tensor's mesh.

    Model axes cut first, then data axes (FSDP) what is left, whatever their order in the mesh.
    """
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    model: list[Part] = []
    data: list[Part] = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        by_fsdp = names[axis] in DATA_AXES
        dim, packs = dim_and_packs(placement, tensor.ndim)
        # FSDP2 notes the order of its cut in the same kind of placement; it packs nothing.
        part = Part(dim, mesh.size(axis), coordinate[axis], 1 if by_fsdp else packs)
        (data if by_fsdp else model).append(part)
    return local_box(tensor.shape, [*model, *data])


def placed_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """What this rank holds as a DTensor with the shape and placement of another one."""
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def replacement(old: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A parameter, or buffer, like `old` with other local values; hooks and marks are kept."""
    new: torch.Tensor = local
    if isinstance(old, DTensor):
        new = placed_like(old, local)
    if isinstance(old, nn.Parameter):
        trains = old.requires_grad and new.is_floating_point()
        new = nn.Parameter(new, requires_grad=trains)
    vars(new).update(vars(old))
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    return new
