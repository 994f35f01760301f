"""RMS normalization in one operator. Shape letters: H width of a row, R rows.

On CUDA it is torch's own fused one. Elsewhere torch composes it of several passes over memory, as
models do; here a few passes are made over a block of rows that stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .rows import accumulation_dtype

_BLOCK = 1 << 17  # elements: half a MiB in float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x ** 2) + eps)` over the last dimension.

    Computed in float32 or wider and rounded once. Saves `x`, `weight` and one number a row for
    backward. It can be differentiated once. autocast changes nothing.

    Args:
        x: [..., H], float.
        weight: [H], of the dtype and on the device of `x`.
        eps: added to the mean.

    Raises:
        ValueError: `weight` is of another width, dtype or device than `x`.
    """
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(
            f"weight must be a vector of {x.shape[-1]} {x.dtype} on {x.device}, as the rows of x are; "
            f"got {tuple(weight.shape)} {weight.dtype} on {weight.device}. Cast it, or call the module's "
            "own forward."
        )
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type == "cuda":
        with torch.autocast("cuda", enabled=False):
            out = torch.nn.functional.rms_norm(rows, weight.shape, weight, eps)
    else:
        out = _RMSNorm.apply(rows, weight, eps)
    return out.view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = normalize(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return *normalize_backward(grad, x, weight, scale, wanted[0], wanted[1]), None


def normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What `rms_norm` gives of rows [R, H], and what each row was multiplied by, [R, 1]."""
    wide = accumulation_dtype(x.dtype)
    out = x.new_empty(x.shape)
    scale = x.new_empty(x.shape[0], 1, dtype=wide)
    for part, to, factor in _blocks(x, out, scale):
        values = part.to(wide)
        torch.linalg.vector_norm(values, dim=1, keepdim=True, out=factor)
        factor.square_().div_(x.shape[1]).add_(eps).rsqrt_()
        if wide is x.dtype:
            torch.mul(values, factor, out=to).mul_(weight)
        else:
            torch.mul(values * factor, weight, out=to)
    return out, scale


def normalize_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `normalize` that are wanted, of x [R, H] and of the weight [H]."""
    wide = scale.dtype
    x_grad = x.new_empty(x.shape) if wants_x else None
    weight_grad = x.new_zeros(x.shape[1], dtype=wide) if wants_weight else None
    tensors = (grad, x, scale, x if x_grad is None else x_grad)
    for given, part, factor, to in _blocks(*tensors):
        received, normal = given.to(wide), part.to(wide) * factor
        if weight_grad is not None:
            weight_grad += (received * normal).sum(0)
        if x_grad is not None:
            received = received * weight
            along = (received * normal).mean(1, keepdim=True)
            torch.mul(received.addcmul_(normal, along, value=-1), factor, out=to)
    return x_grad, None if weight_grad is None else weight_grad.to(weight.dtype)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of tensors of R rows, a block of rows at a time."""
    rows = max(1, _BLOCK // max(1, tensors[0].shape[1]))
    if tensors[0].shape[0] <= rows:
        return iter((tensors,))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
