"""The norm of gradients that lie on several meshes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

_SHARE = "_ep_share_of_stages"


def grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector, the same on every rank.

    Args:
        parameters: of one model; plain tensors and DTensors on any meshes, mixed. Every rank calls
            with the same ones.
        norm_type: the p of the p-norm, or `inf`.

    Returns:
        A float32 (or wider) scalar on the gradients' device.

    Cost: one all-reduce of a scalar over the world.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    holders = [p for p in parameters if p.grad is not None]
    grads = [p.grad for p in holders if p.grad is not None]
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}.")
    world = dist.get_world_size() if dist.is_initialized() else 1
    first = _local(parameters[0]) if parameters else torch.zeros(())
    parts = [
        (_local_power(grad, norm_type, world, _share(p))).to(first.device)
        for p, grad in zip(holders, grads, strict=True)
    ]
    # In float64, so that squares of very large and very small norms stay in range.
    total = torch.stack([torch.zeros((), dtype=torch.float64, device=first.device), *parts])
    if math.isinf(norm_type):
        norm = _greatest(total.amax(), world)
    else:
        power = total.sum()
        if world > 1:
            dist.all_reduce(power)
        norm = power.pow(1.0 / norm_type)
    dtype = torch.float32
    for p in parameters:
        dtype = torch.promote_types(dtype, p.dtype)
    return norm.to(dtype)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their norm is at most `max_norm`; give back the norm.

    As `torch.nn.utils.clip_grad_norm_`, for a model whose parameters lie on several meshes (where
    that one raises, or reduces a number per parameter). All ranks see the same norm, so all take
    the same decision.

    Args:
        parameters: as in `grad_norm`.
        max_norm: the bound.
        norm_type: the p of the p-norm, or `inf`.
        error_if_nonfinite: raise, on every rank, if the norm is not finite.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; no gradient is changed.

    Cost: one all-reduce of a scalar; a host sync only with `error_if_nonfinite`.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = grad_norm(parameters, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The gradient norm of order {norm_type} is {norm.item()}, so it cannot be clipped. "
            "Look for a loss that is not finite, or pass error_if_nonfinite=False."
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    local_grads = [_local(p.grad) for p in parameters if p.grad is not None]
    for grad in local_grads:
        grad.mul_(factor.to(grad.device, grad.dtype))
    return norm


def set_holders(parameter: Tensor, count: int, *, of: int) -> None:
    """Say that `count` of the `of` stages of a pipeline hold this parameter; without it, all do."""
    setattr(parameter, _SHARE, count / of)


def _share(parameter: Tensor) -> float:
    return getattr(parameter, _SHARE, 1.0)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _copies(grad: Tensor, world: int) -> float:
    """How many ranks of the world hold each element of this rank's part of `grad`."""
    if not isinstance(grad, DTensor):
        return world
    parts = 1
    for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
        if isinstance(placement, Partial):
            raise ValueError(
                "A gradient is a partial sum over a mesh axis; reduce it before taking its norm."
            )
        if not isinstance(placement, Replicate):
            parts *= size
    return world / parts


def _local_power(grad: Tensor, norm_type: float, world: int, share: float) -> Tensor:
    """This rank's share of the sum of |g|^p (or its maximum), in float64."""
    values = _local(grad)
    if math.isinf(norm_type):
        most = values.abs().amax() if values.numel() else values.new_zeros(())
        return most.to(torch.float64)
    wide = torch.promote_types(values.dtype, torch.float32)
    norm = torch.linalg.vector_norm(values, norm_type, dtype=wide).to(torch.float64)
    power: Tensor = norm.pow(norm_type) / (_copies(grad, world) * share)
    return power


def _greatest(value: Tensor, world: int) -> Tensor:
    """The maximum over the world, NaN if one rank has NaN: backends differ in what they make of it."""
    if world == 1:
        return value
    is_nan = value.isnan()
    both = torch.stack([value.masked_fill(is_nan, 0.0), is_nan.to(value.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, math.nan)
