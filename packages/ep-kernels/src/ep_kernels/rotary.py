"""Rotary position embeddings of queries and keys, one kernel each on CUDA.

Shape letters: B batch, N heads, S positions, D width of a head, R width that is rotated, even.
Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import triton_kernels


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R values of each head: `x * cos + cat(-x2, x1) * sin`, x1 and x2 being their halves.

    On CUDA computed in float32 or wider and rounded once. Saves `cos` and `sin` for backward, which
    get no gradient. It can be differentiated once.

    Args:
        x: [B, N, S, D], float, of any strides. The rest of a head is copied.
        cos: [B or 1, S, R], of the dtype and on the device of `x`.
        sin: as `cos`.

    Returns:
        [B, N, S, D], in memory as `x` is.

    Raises:
        ValueError: the shapes, dtypes or devices don't fit, or R is odd.
    """
    batch, _, length, width = x.shape if x.ndim == 4 else (0, 0, 0, 0)
    rotated = cos.shape[-1] if cos.ndim else 0
    fits = x.ndim == 4 and cos.ndim == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == length
    if not fits or cos.shape != sin.shape or rotated > width or rotated % 2:
        raise ValueError(
            "expected x [B, N, S, D], and cos and sin [B or 1, S, R] with an even R of at most D; got "
            f"{tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}."
        )
    for one in (cos, sin):
        if one.dtype is not x.dtype or one.device != x.device:
            raise ValueError(
                f"cos and sin must be {x.dtype} on {x.device} as x is, got {one.dtype} on {one.device}. "
                "Cast them."
            )
    out: Tensor = _Rotary.apply(x, cos, sin)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return rotate(grad, *ctx.saved_tensors, back=True), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """`apply_rotary`, or the gradient of its input of that of its output."""
    if triton_kernels.takes(x, cos, sin):
        from .triton_kernels import rotary as kernels

        return kernels.rotate(x, cos, sin, back=back)
    out = torch.empty_like(x)
    rotated = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    part, to = x[..., :rotated], out[..., :rotated]
    torch.mul(part, cos, out=to)
    (low, high), (to_low, to_high) = part.chunk(2, -1), to.chunk(2, -1)
    first, second = sin.chunk(2, -1)
    to_low.addcmul_(high, second if back else first, value=1 if back else -1)
    to_high.addcmul_(low, first if back else second, value=-1 if back else 1)
    if rotated < x.shape[-1]:
        out[..., rotated:] = x[..., rotated:]
    return out
