"""What rows are on the wire: of a narrower dtype than where they are computed with, if the user wants it.

N = rows, H = width.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["WIRE_DTYPES", "decode", "encode", "gradient_dtype", "sums_dtype"]

WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""What rows may be cast to on their way."""

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SCALE_BYTES = 4


def sums_dtype(wire: torch.dtype | None) -> torch.dtype | None:
    """What partial sums travel in: not in float8, whose range they may leave."""
    return torch.bfloat16 if wire is torch.float8_e4m3fn else wire


def gradient_dtype(wire: torch.dtype | None) -> torch.dtype | None:
    """What gradients travel in: not in float16 either, which ends at 6e-8."""
    return None if wire is None else torch.bfloat16


def encode(x: Tensor, wire: torch.dtype | None) -> Tensor:
    """Rows [N, H] as they travel: cast, if that makes them smaller.

    float8 rows are bytes [N, H + 4]: behind each row's values its scale, a float32, by which the largest
    of them becomes the largest float8.
    """
    if wire is None or wire.itemsize >= x.element_size():
        return x
    if wire is not torch.float8_e4m3fn:
        return x.to(wire)
    limits = torch.finfo(torch.float32)
    if x.dtype is torch.float64:
        # What is finite there and not in float32 becomes the largest; what is not finite stays so.
        x = torch.where(x.isfinite(), x.clamp(limits.min, limits.max), x)
    rows = x.float()
    if x.shape[1]:
        scales = (rows.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=limits.tiny)
    else:
        scales = rows.new_ones((len(x), 1))
    values = (rows / scales).clamp_(-_LARGEST, _LARGEST).to(wire)
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=1)


def decode(received: Tensor, wire: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode`, for rows of `dtype`."""
    if received.dtype is not torch.uint8:
        return received.to(dtype)
    width = received.shape[1] - _SCALE_BYTES
    values = received[:, :width].contiguous().view(torch.float8_e4m3fn)
    scales = received[:, width:].reshape(-1).clone().view(torch.float32)
    return (values.float() * scales[:, None]).to(dtype)
