"""Who multiplies S slots grouped by expert: the protocol, and what torch brings for it.

Shape letters: E experts held here, R rows, S slots, A and B sizes of one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from .rows import gather


@dataclass(frozen=True)
class Taken:
    """The rows of S slots, not copied yet: slot s is `rows[index[s]]`.

    Attributes:
        rows: [R, A].
        index: [S] int64.
    """

    rows: Tensor
    index: Tensor

    def copied(self) -> Tensor:
        """[S, A]."""
        return gather(self.rows, self.index)


class Products(Protocol):
    """Matrix products of S slots grouped by expert. Plain computation, unknown to autograd."""

    def rows(self, rows: Tensor | Taken, weight: Tensor) -> Tensor:
        """`rows` [S, A] times each expert's part of `weight` [E, A, B]: [S, B]."""

    def matrices(self, left: Tensor | Taken, right: Tensor | Taken, dtype: torch.dtype) -> Tensor:
        """Per expert, `left` [S, A] transposed times `right` [S, B]: [E, A, B] of `dtype`.

        Zero for an expert without slots.
        """


class LoopProducts:
    """One product per expert that has slots, written where it belongs.

    Rows are taken expert by expert, so that the copies are small and still in the cache.
    """

    def __init__(self, counts: list[int]) -> None:
        ends = list(accumulate(counts))
        self.experts, self.slots = len(counts), ends[-1] if ends else 0
        parts = enumerate(zip(counts, ends, strict=True))
        self.groups = [(expert, end - count, end) for expert, (count, end) in parts if count]
        self.empty = [expert for expert, count in enumerate(counts) if not count]

    def rows(self, rows: Tensor | Taken, weight: Tensor) -> Tensor:
        """As in `Products`."""
        values = rows.rows if isinstance(rows, Taken) else rows
        out = values.new_empty(self.slots, weight.shape[2])
        for expert, start, end in self.groups:
            matrix = weight[expert].to(values.dtype)
            torch.mm(_part(rows, start, end), matrix, out=out[start:end])
        return out

    def matrices(self, left: Tensor | Taken, right: Tensor | Taken, dtype: torch.dtype) -> Tensor:
        """As in `Products`."""
        one, other = (x.rows if isinstance(x, Taken) else x for x in (left, right))
        out = one.new_empty(self.experts, one.shape[1], other.shape[1], dtype=dtype)
        for expert in self.empty:
            out[expert].zero_()
        for expert, start, end in self.groups:
            one, other = _part(left, start, end).t(), _part(right, start, end)
            if dtype is one.dtype:
                torch.mm(one, other, out=out[expert])
            else:
                out[expert].copy_(one @ other)
        return out


def _part(rows: Tensor | Taken, start: int, end: int) -> Tensor:
    """Slots from `start` to `end`."""
    if isinstance(rows, Taken):
        return rows.rows.index_select(0, rows.index[start:end])
    return rows[start:end]


class GroupedProducts:
    """By torch's grouped_mm: no host synchronization."""

    def __init__(self, offsets: Tensor) -> None:
        self.offsets = offsets.to(torch.int32)

    def rows(self, rows: Tensor | Taken, weight: Tensor) -> Tensor:
        """As in `Products`."""
        rows = _copied(rows)
        return torch.nn.functional.grouped_mm(rows, weight.to(rows.dtype), offs=self.offsets)

    def matrices(self, left: Tensor | Taken, right: Tensor | Taken, dtype: torch.dtype) -> Tensor:
        """As in `Products`."""
        left, right = _copied(left), _copied(right)
        return torch.nn.functional.grouped_mm(left.t(), right, offs=self.offsets).to(dtype)


def _copied(rows: Tensor | Taken) -> Tensor:
    return rows.copied() if isinstance(rows, Taken) else rows
