"""Boxes: parts of tensors as index arithmetic, with no process group and no data.

A *box* is a part of a tensor: for each dimension the half-open intervals of indices in it,
ascending and disjoint. A rank's local tensor is its box with the intervals of each dimension
put side by side: one interval for an ordinary shard, one per block for a packed weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from ep_plans.sharding import cut_ranges

Interval = tuple[int, int]
Box = tuple[tuple[Interval, ...], ...]


class Part(NamedTuple):
    """One of the parts that a dimension is cut into, by the rule of `ep_plans.sharding.cut_ranges`.

    Attributes:
        dim: the dimension.
        parts: how many parts.
        place: which of them.
        packs: equal blocks that are each cut by itself; 1 for an ordinary weight.
    """

    dim: int
    parts: int
    place: int
    packs: int = 1


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor of `shape`."""
    return tuple(((0, size),) if size else () for size in shape)


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of the tensor that holds `box`."""
    return tuple(length(intervals) for intervals in box)


def length(intervals: Sequence[Interval]) -> int:
    """How many indices the intervals hold."""
    return sum(end - start for start, end in intervals)


def numel(box: Box) -> int:
    """How many elements the box holds."""
    return math.prod(lengths(box))


def shifted(intervals: Sequence[Interval], by: int) -> tuple[Interval, ...]:
    """The intervals moved by `by`."""
    return tuple((start + by, end + by) for start, end in intervals)


def clipped(
    intervals: Sequence[Interval], start: int, end: int
) -> tuple[int, tuple[Interval, ...]]:
    """What of the intervals lies in [start, end), and the position of its first index in them."""
    position = sum(max(min(high, start) - low, 0) for low, high in intervals)
    inside = [(max(low, start), min(high, end)) for low, high in intervals]
    return position, tuple((low, high) for low, high in inside if low < high)


def pieces(box: Box) -> list[tuple[tuple[Interval, ...], tuple[Interval, ...]]]:
    """The contiguous blocks of a box: for each, its place in the tensor and in the local one."""
    per_dim = []
    for intervals in box:
        position, dim = 0, []
        for start, end in intervals:
            dim.append(((start, end), (position, position + end - start)))
            position += end - start
        per_dim.append(dim)
    return [
        (tuple(place for place, _ in block), tuple(local for _, local in block))
        for block in product(*per_dim)
    ]


def intersection(first: Box, second: Box) -> Box:
    """The part that two boxes of one tensor share."""
    return tuple(
        tuple((max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) < min(b, d))
        for one, other in zip(first, second, strict=True)
    )


def positions(inner: Box, outer: Box) -> Box:
    """Where `inner`, a part of `outer`, lies in the local tensor of `outer`."""
    return tuple(
        tuple(_locate(interval, intervals) for interval in part)
        for part, intervals in zip(inner, outer, strict=True)
    )


def _locate(interval: Interval, intervals: Sequence[Interval]) -> Interval:
    position = 0
    for start, end in intervals:
        if start <= interval[0] and interval[1] <= end:
            return position + interval[0] - start, position + interval[1] - start
        position += end - start
    raise ValueError(f"{interval} is not inside {tuple(intervals)}")


def _at(intervals: Sequence[Interval], low: int, high: int) -> tuple[Interval, ...]:
    """The indices at the positions [low, high) among those that the intervals hold."""
    kept, position = [], 0
    for start, end in intervals:
        first, last = max(low, position), min(high, position + end - start)
        if first < last:
            kept.append((start + first - position, start + last - position))
        position += end - start
    return tuple(kept)


def local_box(shape: Sequence[int], parts: Sequence[Part]) -> Box:
    """What is left of a tensor of `shape` when each part in turn is taken of the one before."""
    box: list[tuple[Interval, ...]] = list(whole_box(shape))
    for dim, count, place, packs in parts:
        ranges = cut_ranges(length(box[dim]), count, place, packs)
        box[dim] = tuple(interval for low, high in ranges for interval in _at(box[dim], low, high))
    return tuple(box)
