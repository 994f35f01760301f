"""The Triton kernel that writes rows into the memory of other ranks. Imported where it is used alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .symmetric_buffers import HEADER

__all__ = ["put_rows"]

_BLOCK = 1024  # words that a program moves at a time


@triton.jit
def _put(
    pointers, rows, place, header, row_count, capacity, width, stride, rank, area,
    HEADER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, peer = tl.program_id(0), tl.program_id(1)
    target = tl.load(pointers + peer).to(tl.pointer_type(tl.int64))
    if HEADER and row == 0:
        at = tl.arange(0, HEADER)
        tl.store(target + rank * HEADER + at, tl.load(header + peer * HEADER + at))
    if row < row_count:
        to = tl.load(place + peer * row_count + row)
        if (to >= 0) & (to < capacity):
            first = area + (to + rank * capacity) * width
            source = rows + peer.to(tl.int64) * stride + row.to(tl.int64) * width
            for begin in range(0, width, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                inside = at < width
                tl.store(target + first + at, tl.load(source + at, mask=inside), mask=inside)


def put_rows(
    pointers: Tensor,
    rows: Tensor,
    place: Tensor,
    capacity: int,
    header: Tensor | None,
    *,
    rank: int,
) -> None:
    """As `ep_dispatch.symmetric_buffers.Buffer.put` says, into the memory that [P] addresses name.

    Rows [P, N, W] are contiguous but for dimension 0. One program for each row and rank.
    """
    ranks, count, width = rows.shape
    grid = (max(count, 1), ranks)
    _put[grid](
        pointers, rows, place.contiguous(), place if header is None else header.contiguous(),
        count, capacity, width, rows.stride(0), rank, ranks * HEADER,
        HEADER=0 if header is None else HEADER, BLOCK=_BLOCK,
    )  # fmt: skip
