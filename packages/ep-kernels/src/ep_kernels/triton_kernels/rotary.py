"""Rotary position embeddings. Shape letters: B batch, N heads, S positions, D width of a head.

One pass over memory: each program rotates some heads of one position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import wide

_BLOCK = 2048  # elements that one program handles


@triton.jit
def _rotary_kernel(
    x,
    cos,
    sin,
    out,
    heads,
    length,
    half,
    rest,
    x_batch,
    x_head,
    x_place,
    out_batch,
    out_head,
    out_place,
    cos_batch,
    tiles,
    BACK: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)  # products with a stride may pass 2^31
    batch, place = program // tiles // length, program // tiles % length
    head = ((program % tiles) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = column < half
    angle = batch * cos_batch + place * 2 * half + column
    cos_low = tl.load(cos + angle, mask=inside, other=0).to(WIDE)
    cos_high = tl.load(cos + angle + half, mask=inside, other=0).to(WIDE)
    sin_low = tl.load(sin + angle, mask=inside, other=0).to(WIDE)
    sin_high = tl.load(sin + angle + half, mask=inside, other=0).to(WIDE)
    start = x + batch * x_batch + head * x_head + place * x_place
    to = out + batch * out_batch + head * out_head + place * out_place
    mask = (head < heads) & inside
    low = tl.load(start + column, mask=mask, other=0).to(WIDE)
    high = tl.load(start + half + column, mask=mask, other=0).to(WIDE)
    if BACK:
        to_low = low * cos_low + high * sin_high
        to_high = high * cos_high - low * sin_low
    else:
        to_low = low * cos_low - high * sin_low
        to_high = high * cos_high + low * sin_high
    tl.store(to + column, to_low.to(out.dtype.element_ty), mask=mask)
    tl.store(to + half + column, to_high.to(out.dtype.element_ty), mask=mask)
    if REST > 0:
        further = tl.arange(0, REST)[None, :]
        mask = (head < heads) & (further < rest)
        value = tl.load(start + 2 * half + further, mask=mask)
        tl.store(to + 2 * half + further, value, mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """`ep_kernels.rotary.rotate`: [B, N, S, D]."""
    if x.stride(3) != 1:
        x = x.contiguous()
    out = torch.empty_like(x)
    if out.stride(3) != 1:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, length, width = x.shape
    half = cos.shape[-1] // 2
    rest = width - 2 * half
    padded = triton.next_power_of_2(max(1, half))
    some = max(1, min(triton.next_power_of_2(heads), _BLOCK // (2 * padded)))
    tiles = triton.cdiv(heads, some)
    with torch.cuda.device_of(x):
        _rotary_kernel[(batch * length * tiles,)](
            x,
            cos,
            sin,
            out,
            heads,
            length,
            half,
            rest,
            *x.stride()[:3],
            *out.stride()[:3],
            0 if cos.shape[0] == 1 else cos.stride(0),
            tiles,
            BACK=back,
            WIDE=wide(x.dtype),
            HEADS=some,
            HALF=padded,
            REST=triton.next_power_of_2(rest) if rest else 0,
        )
    return out
