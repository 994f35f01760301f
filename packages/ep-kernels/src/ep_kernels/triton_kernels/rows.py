"""Gathers and sums of rows. Shape letters: H width of a row, R rows, S slots, N sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements of a row that one program handles
_MOST_SLOTS = 32  # that one step of a sum adds


@triton.jit
def _gather_kernel(rows, index, out, width, stride, tiles, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)  # products with a stride may pass 2^31
    slot = program // tiles
    column = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(index + slot).to(tl.int64)
    value = tl.load(rows + row * stride + column, mask=inside)
    tl.store(out + slot * width + column, value, mask=inside)


@triton.jit
def _sum_kernel(
    values,
    order,
    starts,
    weights,
    out,
    width,
    stride,
    num_sums,
    num_slots,
    tiles,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    segment = program // tiles
    column = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = tl.load(starts + segment).to(tl.int64)
    end = tl.load(starts + segment + 1, mask=segment + 1 < num_sums, other=num_slots)
    total = tl.zeros((SLOTS, BLOCK), WIDE)
    for first in range(start, end.to(tl.int64), SLOTS):
        slot = first + tl.arange(0, SLOTS)
        real = slot < end
        row = tl.load(order + slot, mask=real, other=0).to(tl.int64)
        mask = real[:, None] & inside[None, :]
        value = tl.load(values + row[:, None] * stride + column[None, :], mask=mask, other=0)
        value = value.to(WIDE)
        if WEIGHTED:
            value *= tl.load(weights + slot, mask=real, other=0).to(WIDE)[:, None]
        total += value
    result = tl.sum(total, axis=0).to(out.dtype.element_ty)
    tl.store(out + segment * width + column, result, mask=inside)


def wide(dtype: torch.dtype) -> tl.dtype:
    """What is computed in."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def with_unit_stride(rows: Tensor) -> Tensor:
    """`rows` [R, H], copied unless the elements of a row lie side by side."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """Row `index[s]` of `rows` [R, H] at s: [S, H]. An index out of range is not noticed."""
    out = rows.new_empty(index.shape[0], rows.shape[1])
    if out.numel() == 0:
        return out
    rows, index = with_unit_stride(rows), index.contiguous()
    width = rows.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(width))
    tiles = triton.cdiv(width, block)
    with torch.cuda.device_of(rows):
        _gather_kernel[(index.shape[0] * tiles,)](
            rows, index, out, width, rows.stride(0), tiles, BLOCK=block
        )
    return out


def segment_sums(values: Tensor, order: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
    """`ep_kernels.rows.segment_sums`: [N, H]."""
    num_sums = starts.shape[0]
    out = values.new_empty(num_sums, values.shape[1])
    if out.numel() == 0:
        return out
    values, order, starts = with_unit_stride(values), order.contiguous(), starts.contiguous()
    width, num_slots = values.shape[1], order.shape[0]
    # As many slots a step as a segment has on average: few for a token, many for an expert.
    slots = min(_MOST_SLOTS, triton.next_power_of_2(max(1, triton.cdiv(num_slots, num_sums))))
    block = min(_BLOCK // max(1, slots // 4), triton.next_power_of_2(width))
    tiles = triton.cdiv(width, block)
    with torch.cuda.device_of(values):
        _sum_kernel[(num_sums * tiles,)](
            values,
            order,
            starts,
            order if weights is None else weights.contiguous(),
            out,
            width,
            values.stride(0),
            num_sums,
            num_slots,
            tiles,
            WEIGHTED=weights is not None,
            WIDE=wide(values.dtype),
            SLOTS=slots,
            BLOCK=block,
        )
    return out
