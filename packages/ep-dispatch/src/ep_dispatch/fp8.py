"""FP8 rows with a power-of-two scale per 32 values, as Mega MoE takes its activations.

R = rows, H = width. A scale is stored as its exponent (UE8M0: one byte, the exponent plus 127); four of
them are packed into an int32, the first in the lowest byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["quantize_rows"]

_GROUP = 32
_LARGEST = 448.0  # the largest finite float8_e4m3fn


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast rows to FP8.

    Args:
        x: [R, H], H a multiple of 128.

    Returns:
        values [R, H] float8_e4m3fn, and packed scale exponents [R, H / 128] int32. The scale is the
        smallest power of two with which the largest of 32 values still fits, so that no value is
        clipped. No host synchronization.
    """
    rows, width = x.shape
    groups = x.float().view(rows, width // _GROUP, _GROUP)
    # m * 2^e with 0.5 <= m < 1: the next power of two is 2^e, or 2^(e - 1) if m is 0.5 exactly.
    mantissa, exponent = torch.frexp(groups.abs().amax(dim=-1) / _LARGEST)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-126, 127)
    values = torch.ldexp(groups, -exponent.unsqueeze(-1)).view(rows, width)
    scales = (exponent + 127).to(torch.uint8).view(torch.int32)
    return values.to(torch.float8_e4m3fn), scales
