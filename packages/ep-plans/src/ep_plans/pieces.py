"""Which rows and columns of a tensor each rank of its mesh holds, as arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from torch.distributed.tensor import DTensor, Replicate

from ep_plans.sharding import DATA_AXES, cut_ranges, dim_and_packs

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""For each dimension the ranges that a rank holds, in the order in which it holds them."""


def held_ranges(tensor: DTensor, coordinates: Sequence[int]) -> Ranges:
    """What the rank at `coordinates` of `tensor`'s mesh holds of it. No communication.

    Knows what `full_tensor` knows: packed weights, uneven and empty parts, FSDP over a cut.
    """
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    held = [[(0, size)] for size in tensor.shape]
    axes = [axis for axis, p in enumerate(tensor.placements) if not isinstance(p, Replicate)]
    # Model axes cut first, data axes what they left.
    for axis in sorted(axes, key=lambda axis: bool(names) and names[axis] in DATA_AXES):
        dim, packs = dim_and_packs(tensor.placements[axis], tensor.ndim)
        if names and names[axis] in DATA_AXES:
            packs = 1
        length = sum(end - start for start, end in held[dim])
        cut = cut_ranges(length, mesh.size(axis), coordinates[axis], packs)
        held[dim] = [part for piece in cut for part in _inside(held[dim], *piece)]
    return tuple(tuple(ranges) for ranges in held)


def shape_of(ranges: Ranges) -> tuple[int, ...]:
    """The shape of a piece."""
    return tuple(sum(end - start for start, end in dim) for dim in ranges)


def numel_of(ranges: Ranges) -> int:
    """The number of its elements."""
    return math.prod(shape_of(ranges))


def blocks(ranges: Ranges) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The contiguous blocks of a piece: where each is in the whole tensor, and where in the piece."""
    places = []
    for dim in ranges:
        ends = list(itertools.accumulate(end - start for start, end in dim))
        starts = [0, *ends]
        places.append(
            [
                (slice(*whole), slice(*piece))
                for whole, piece in zip(dim, itertools.pairwise(starts), strict=True)
            ]
        )
    for block in itertools.product(*places):
        yield tuple(whole for whole, _ in block), tuple(piece for _, piece in block)


def _inside(ranges: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Positions `start` to `end` of the concatenated `ranges`, as ranges of the tensor."""
    passed = 0
    for low, high in ranges:
        first, last = max(start - passed, 0), min(end - passed, high - low)
        if first < last:
            yield low + first, low + last
        passed += high - low
