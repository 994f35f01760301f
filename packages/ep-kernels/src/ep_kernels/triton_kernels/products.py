"""Products of rows grouped by expert, with the gather of the rows fused in.

Shape letters: E experts held here, R rows, S slots, A and B sizes of one product.

[Note: tiles]
A program computes a tile: some slots of one expert by some columns. How many tiles an expert's slots
make, the device alone knows, but all together they are at most S // size + E. So many programs are
started, a table on the device tells each its expert and first slot, and those left over return. Slots
past the last offset are like those of one more expert, whose product is zero: nothing is unwritten.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_kernels.products import Taken

from .rows import with_unit_stride

_MOST_SLOTS = 64  # of a tile
_SMALLEST = 16  # that tl.dot takes
_INNER = 32  # terms that one step adds


class Tiles(NamedTuple):
    """Which slots each tile has.

    Attributes:
        size: the slots of a tile, except an expert's last one.
        ends: [E + 1], the end of each expert's slots, then S.
        expert: per tile, E for slots past the last offset, E + 1 for a tile that is left over.
        slot: per tile, its first slot.
    """

    size: int
    ends: Tensor
    expert: Tensor
    slot: Tensor


def tiles_of(offsets: Tensor, num_slots: int, size: int) -> Tiles:
    """The tiles of `size` slots, all int64. No host synchronization; wrong offsets stay within S."""
    experts = offsets.shape[0]
    inside = offsets.to(torch.int64).clamp(0, num_slots)
    ends = torch.cat([inside, inside.new_full((1,), num_slots)])
    counts = ends.diff(prepend=ends.new_zeros(1)).clamp(min=0)
    tiles = (counts + size - 1) // size
    last = tiles.cumsum(0)
    most = num_slots // size + min(num_slots, experts + 1)
    tile = torch.arange(most, device=offsets.device)
    expert = torch.searchsorted(last, tile, right=True)
    known = expert.clamp(max=experts)
    slot = (ends - counts - (last - tiles) * size)[known] + tile * size
    return Tiles(size, ends, expert, slot)


@triton.jit
def _rows_kernel(
    rows,
    index,
    weight,
    out,
    ends,
    tile_expert,
    tile_slot,
    num_experts,
    inner,
    outer,
    rows_stride,
    expert_stride,
    inner_stride,
    outer_stride,
    tiles_across,
    TAKEN: tl.constexpr,
    PRECISION: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    program = tl.program_id(0)
    tile = program // tiles_across
    expert = tl.load(tile_expert + tile)
    if expert > num_experts:
        return
    slot = tl.load(tile_slot + tile) + tl.arange(0, SLOTS)
    real = slot < tl.load(ends + expert)
    row = slot
    if TAKEN:
        row = tl.load(index + slot, mask=real, other=0).to(tl.int64)
    column = ((program % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = column < outer
    term = tl.arange(0, INNER).to(tl.int64)
    left = rows + row[:, None] * rows_stride + term[None, :]
    right = weight + expert * expert_stride
    right += term[:, None] * inner_stride + column[None, :] * outer_stride
    total = tl.zeros((SLOTS, COLUMNS), tl.float32)
    terms = tl.where(expert < num_experts, inner, 0)
    for first in range(0, terms, INNER):
        more = first + term < inner
        x = tl.load(left, mask=real[:, None] & more[None, :], other=0)
        w = tl.load(right, mask=more[:, None] & inside[None, :], other=0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        left += INNER
        right += INNER * inner_stride
    to = out + slot[:, None] * outer + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def _matrices_kernel(
    left,
    left_index,
    right,
    right_index,
    out,
    ends,
    height,
    width,
    left_stride,
    right_stride,
    tiles_down,
    tiles_across,
    LEFT_TAKEN: tl.constexpr,
    RIGHT_TAKEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    program = tl.program_id(0)
    expert = (program // (tiles_down * tiles_across)).to(tl.int64)
    row = (program // tiles_across % tiles_down) * ROWS + tl.arange(0, ROWS)
    column = (program % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, end, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        real = slot < end
        one, other = slot, slot
        if LEFT_TAKEN:
            one = tl.load(left_index + slot, mask=real, other=0).to(tl.int64)
        if RIGHT_TAKEN:
            other = tl.load(right_index + slot, mask=real, other=0).to(tl.int64)
        mask = real[:, None] & (row < height)[None, :]
        x = tl.load(left + one[:, None] * left_stride + row[None, :], mask=mask, other=0)
        mask = real[:, None] & (column < width)[None, :]
        y = tl.load(right + other[:, None] * right_stride + column[None, :], mask=mask, other=0)
        total = tl.dot(tl.trans(x), y, total, input_precision=PRECISION)
    to = out + (expert * height + row[:, None]) * width + column[None, :]
    inside = (row < height)[:, None] & (column < width)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


class TritonProducts:
    """`ep_kernels.products.Products` of S slots, of which those past the last offset give zeros.

    Accumulated in float32. float32 is multiplied as TF32 only where torch's products are.
    """

    def __init__(self, offsets: Tensor, num_slots: int) -> None:
        average = triton.next_power_of_2(max(1, num_slots // max(1, offsets.shape[0])))
        size = min(_MOST_SLOTS, max(_SMALLEST, average))
        self.num_slots, self.tiles = num_slots, tiles_of(offsets, num_slots, size)

    def rows(self, rows: Tensor | Taken, weight: Tensor) -> Tensor:
        """As in `Products`."""
        values, index = _parts(rows)
        weight = weight.to(values.dtype)
        experts, inner, outer = weight.shape
        out = values.new_empty(self.num_slots, outer)
        if out.numel() == 0:
            return out
        columns = _block(outer, values.dtype)
        across = triton.cdiv(outer, columns)
        tiles = self.tiles
        with torch.cuda.device_of(values):
            _rows_kernel[(tiles.expert.shape[0] * across,)](
                values,
                index,
                weight,
                out,
                tiles.ends,
                tiles.expert,
                tiles.slot,
                experts,
                inner,
                outer,
                values.stride(0),
                *weight.stride(),
                across,
                TAKEN=isinstance(rows, Taken),
                PRECISION=_precision(),
                SLOTS=tiles.size,
                COLUMNS=columns,
                INNER=_INNER,
                num_warps=4,
            )
        return out

    def matrices(self, left: Tensor | Taken, right: Tensor | Taken, dtype: torch.dtype) -> Tensor:
        """As in `Products`."""
        one, one_index = _parts(left)
        other, other_index = _parts(right)
        experts, height, width = self.tiles.ends.shape[0] - 1, one.shape[1], other.shape[1]
        out = one.new_empty(experts, height, width, dtype=dtype)
        if out.numel() == 0:
            return out
        down, across = _block(height, one.dtype), _block(width, one.dtype)
        tiles_down, tiles_across = triton.cdiv(height, down), triton.cdiv(width, across)
        with torch.cuda.device_of(one):
            _matrices_kernel[(experts * tiles_down * tiles_across,)](
                one,
                one_index,
                other,
                other_index,
                out,
                self.tiles.ends,
                height,
                width,
                one.stride(0),
                other.stride(0),
                tiles_down,
                tiles_across,
                LEFT_TAKEN=isinstance(left, Taken),
                RIGHT_TAKEN=isinstance(right, Taken),
                PRECISION=_precision(),
                ROWS=down,
                COLUMNS=across,
                SLOTS=_INNER,
                num_warps=8 if down * across > 64 * 64 else 4,
            )
        return out


def _parts(rows: Tensor | Taken) -> tuple[Tensor, Tensor]:
    """The values and the index; where nothing is taken, any tensor in its place."""
    if isinstance(rows, Taken):
        return with_unit_stride(rows.rows), rows.index.contiguous()
    rows = with_unit_stride(rows)
    return rows, rows


def _block(size: int, dtype: torch.dtype) -> int:
    """The rows or columns of a tile, of `size` in all."""
    most = 64 if dtype is torch.float32 else 128
    return min(most, max(_SMALLEST, int(triton.next_power_of_2(size))))


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
