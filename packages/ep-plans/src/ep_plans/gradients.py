"""The norm of gradients that lie on several meshes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ep_plans._compat import norms_of_all, scale_all_
from ep_plans.nonfinite import Gradients, find_nonfinite, with_names
from ep_plans.styles.base import local

_SHARE = "_ep_share_of_stages"


class GradNorm:
    """The norm of gradients that come one at a time.

    `add` each gradient, also on ranks where it is empty, then call `total`.
    """

    def __init__(self, norm_type: float = 2.0) -> None:
        self.norm_type = float(norm_type)
        if not self.norm_type > 0:
            raise ValueError(f"norm_type must be positive, got {norm_type}.")
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        # Norms of one dtype that count alike: reduced by as many kernels as one would be.
        self._norms: dict[tuple[float, torch.dtype], list[Tensor]] = {}
        self._device: torch.device | None = None

    def add(self, grad: Tensor, *, of: Tensor) -> None:
        """Count the gradient of a parameter; nothing of it is kept."""
        self.add_all([(grad, of)])

    @torch.no_grad()
    def add_all(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """As `add`, for pairs of a gradient and its parameter: few kernels for all of them."""
        alike: dict[tuple[torch.device, torch.dtype, float], list[Tensor]] = {}
        for grad, of in gradients:
            if self._device is None:
                self._device = _reduction_device(grad)
            values, copies = local(grad), _copies(grad, self._world) * _share(of)
            alike.setdefault((values.device, values.dtype, copies), []).append(values)
        for (_, dtype, copies), tensors in alike.items():
            key = copies, torch.promote_types(dtype, torch.float32)
            norms = _norms(tensors, self.norm_type, key[1])
            self._norms.setdefault(key, []).extend(norm.to(self._device) for norm in norms)

    def total(self, witness: Tensor | None = None) -> Tensor:
        """The norm, float64 and the same on every rank; the next one starts anew.

        Args:
            witness: numbers of this rank, such as its loss, that are no part of the norm, but make
                it NaN on every rank if one of them is not finite.

        Cost: one all-reduce of a number over the world.
        """
        # A stage of a pipeline may have no gradient.
        device = self._device or (torch.device("cpu") if witness is None else witness.device)
        zero = torch.zeros(1, dtype=torch.float64, device=device)
        if witness is not None:
            zero = zero + (witness.detach().to(device).double() * 0.0).sum()
        norms, self._norms = self._norms, {}
        # In float64, so that squares of very large and very small norms stay in range.
        wide = [(copies, torch.stack(one).double()) for (copies, _), one in norms.items() if one]
        if math.isinf(self.norm_type):
            return _greatest(torch.cat([zero, *(one for _, one in wide)]).amax(), self._world)
        powers = [one.pow(self.norm_type) / copies for copies, one in wide]
        power = torch.cat([zero, *powers]).sum()
        if self._world > 1:
            dist.all_reduce(power)
        return power.pow(1.0 / self.norm_type)


def grad_norm(
    parameters: Gradients, norm_type: float = 2.0, *, witness: Tensor | None = None
) -> Tensor:
    """The norm of all gradients as one vector, the same on every rank.

    Args:
        parameters: of one model (the model itself, its `parameters()` or `named_parameters()`);
            plain tensors and DTensors on any meshes, mixed. Every rank calls with the same ones.
        norm_type: the p of the p-norm, or `inf`.
        witness: numbers of this rank, such as its loss: if one is not finite on any rank, the norm
            is NaN on all of them.

    Returns:
        A float32 (or wider) scalar on the device that the ranks communicate from.

    Cost: one all-reduce of a scalar over the world.
    """
    tensors = [tensor for _, tensor in with_names(parameters)]
    norm = GradNorm(norm_type)
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    norm.add_all((tensor.grad, tensor) for tensor in tensors if tensor.grad is not None)
    if tensors and norm._device is None:
        norm._device = _reduction_device(tensors[0])
    return norm.total(witness).to(dtype)


def clip_grad_norm_(
    parameters: Gradients,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their norm is at most `max_norm`; give back the norm.

    As `torch.nn.utils.clip_grad_norm_`, for a model whose parameters lie on several meshes (where
    that one raises, or reduces a number per parameter). All ranks see the same norm, so all take
    the same decision.

    Args:
        parameters: as in `grad_norm`; with names (a model, or `named_parameters()`) an error tells
            them.
        max_norm: the bound.
        norm_type: the p of the p-norm, or `inf`.
        error_if_nonfinite: raise, on every rank, if the norm is not finite.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; no gradient is changed.
            It names the layer and the ranks.

    Cost: one all-reduce of a scalar; a host sync only with `error_if_nonfinite`.
    """
    named = with_names(parameters)
    norm = grad_norm(named, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The gradient norm of order {norm_type} is {norm.item()}, so it cannot be clipped: "
            f"{find_nonfinite(named)}. "
            "Look for a loss that is not finite, or pass error_if_nonfinite=False."
        )
    clip_grads_with_norm_(named, max_norm, norm)
    return norm


def set_holders(parameter: Tensor, count: int, *, of: int) -> None:
    """Say that `count` of the `of` stages of a pipeline hold this parameter; without it, all do."""
    setattr(parameter, _SHARE, count / of)


def _share(parameter: Tensor) -> float:
    return getattr(parameter, _SHARE, 1.0)


@torch.no_grad()
def clip_grads_with_norm_(parameters: Gradients, max_norm: float, total_norm: Tensor) -> None:
    """Scale the gradients in place so that their norm, which is `total_norm`, is at most `max_norm`.

    As torch's function of this name. No communication.
    """
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for _, parameter in with_names(parameters):
        if parameter.grad is not None:
            grad = local(parameter.grad)
            alike.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), grads in alike.items():
        scale_all_(grads, factor.to(device, dtype))


def _reduction_device(tensor: Tensor) -> torch.device:
    """Where the ranks that hold parts of `tensor` communicate from; offloaded parts lie elsewhere."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.device_type != tensor.device.type:
        kind = tensor.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return local(tensor).device


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


def _norms(values: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each tensor, in `dtype`; empty ones have none."""
    values = [one for one in values if one.numel()]
    if math.isinf(norm_type):
        return [one.abs().amax().to(dtype) for one in values]
    return norms_of_all(values, norm_type, dtype) if values else []


def _greatest(value: Tensor, world: int) -> Tensor:
    """The maximum over the world, NaN if one rank has NaN: backends differ in what they make of it."""
    if world == 1:
        return value
    is_nan = value.isnan()
    both = torch.stack([value.masked_fill(is_nan, 0.0), is_nan.to(value.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, math.nan)
