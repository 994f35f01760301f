"""One exchange over symmetric memory: rows to the ranks of their experts, or sums of rows back.

T = tokens of this rank, K = experts per token, P = ranks of the group, C = rows that one rank may send to
one, R = P * C, W = width of a row in 8-byte words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding_bag

from .links import GradNeeds, _facts, _filled
from .phase import Phase
from .routing import SKIPPED
from .symmetric_buffers import Buffer, shared_buffer

__all__ = ["Exchange", "exchange_back", "exchange_there"]

_ALIGNMENT = 16  # bytes, of each part of a row


@dataclass(frozen=True)
class _Field:
    """A part of a row: `width` values of a dtype."""

    width: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """In bytes, with what is left free behind it."""
        return -(-self.width * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [N, *] side by side: [N, W] int64."""
    fields = [_Field(x.shape[1], x.dtype) for x in tensors]
    width = sum(field.size for field in fields) // torch.int64.itemsize
    words = tensors[0].new_empty((tensors[0].shape[0], width), dtype=torch.int64)
    for part, x in zip(_unpacked(words, fields), tensors, strict=True):
        part.copy_(x)
    return words


def _unpacked(words: Tensor, fields: Sequence[_Field]) -> list[Tensor]:
    """Views of the parts of rows [N, W]."""
    raw, begin, parts = words.view(torch.uint8), 0, []
    for field in fields:
        end = begin + field.width * field.dtype.itemsize
        parts.append(raw[:, begin:end].view(field.dtype))
        begin += field.size
    return parts


@dataclass(frozen=True)
class Exchange:
    """Rows of tokens to the ranks that own their experts, and rows back to the tokens' ranks.

    Attributes:
        group: the ranks.
        ranks: P.
        capacity: C.
        top_k: K, at most so many ranks hold an expert of a token.
        phase: names it in an error.
    """

    group: ProcessGroup
    ranks: int
    capacity: int
    top_k: int
    phase: Phase

    def there(
        self,
        tensors: Sequence[Tensor],
        place: Tensor,
        fills: Sequence[float],
        header: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """Bring tensors [T, *] to the owners.

        Args:
            tensors: of the tokens.
            place: [P, T], see `owner_places`.
            fills: what stands in the rows where no token came, for each tensor.
            header: [P, HEADER], what each rank is told: first how many rows come for it.
            counts: [P], how many came when the header was sent; with them none is.

        Returns:
            copies [R, *], rows of source p from `p * C` on; the headers [P, HEADER] that came.
        """
        packed = _packed(tensors)
        buffer = self._move(packed.expand(self.ranks, *packed.shape), place, header)
        told = buffer.header(self.ranks).clone()
        fields = [_Field(x.shape[1], x.dtype) for x in tensors]
        count = self.ranks * self.capacity
        views = _unpacked(buffer.rows(count, packed.shape[1], self.ranks), fields)
        absent = self._row_places(told[:, 0] if counts is None else counts).view(-1, 1) < 0
        # Copied, since the next exchange overwrites; and filled, since what lies there is of the last one.
        copies = [x.masked_fill(absent, fill) for x, fill in zip(views, fills, strict=True)]
        return copies, told

    def back(self, tensors: Sequence[Tensor], place: Tensor, counts: Tensor) -> list[Tensor]:
        """From tensors [R, *] of the owners to their sums over each token's rows, [T, *].

        Accumulated in float32 or wider, in the order of ranks.
        """
        packed = _packed(tensors)
        width = packed.shape[1]
        rows = packed.view(self.ranks, self.capacity, width)
        buffer = self._move(rows, self._row_places(counts), None)
        count = self.ranks * self.capacity
        arrived = buffer.rows(count + 1, width, self.ranks)
        arrived[count] = 0  # stands for the rows that a token has not
        first = torch.arange(self.ranks, device=place.device)[:, None] * self.capacity
        absent = (place < 0) | (place >= self.capacity)
        rows_of_token = (place + first).masked_fill(absent, count).T
        if self.top_k < self.ranks:
            rows_of_token = rows_of_token.sort(dim=1).values[:, : self.top_k]
        fields = [_Field(x.shape[1], x.dtype) for x in tensors]
        return [_sum(x, rows_of_token) for x in _unpacked(arrived, fields)]

    def in_backward(self) -> Exchange:
        """The same, called from backward."""
        return replace(self, phase=self.phase.backward())

    def _row_places(self, counts: Tensor) -> Tensor:
        """[P, C], 0 to C - 1 for rows that came from source p, -1 for others."""
        places = torch.arange(self.capacity, device=counts.device).expand(self.ranks, -1)
        return places.masked_fill(places >= counts[:, None], -1)

    def _move(self, rows: Tensor, place: Tensor, header: Tensor | None) -> Buffer:
        buffer = shared_buffer(self.group, rows.device, capacity=self.capacity, width=rows.shape[2])
        with self.phase:
            buffer.barrier(self.group)
            buffer.put(rows, place, self.capacity, header)
            buffer.barrier(self.group)
        return buffer


def _sum(rows: Tensor, rows_of_token: Tensor) -> Tensor:
    if rows_of_token.numel() == 0 or rows.shape[1] == 0:
        return rows.new_zeros((rows_of_token.shape[0], rows.shape[1]))
    return embedding_bag(rows_of_token.contiguous(), rows, mode="sum")


def exchange_there(
    link: Tensor | None,
    exchange: Exchange,
    needs: GradNeeds,
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    place: Tensor,
    header: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [T, H], weights and ids [T, K] to the owners; the gradients of both in one exchange back.

    Returns:
        the link; rows [R, H], weights and ids [R, K], `SKIPPED` where no token came; the headers that came.
    """
    args = link, exchange, needs, hidden, weights, ids, place, header
    return _Dispatch.apply(*args)  # type: ignore[no-any-return]


def exchange_back(
    link: Tensor | None, exchange: Exchange, rows: Tensor, place: Tensor, counts: Tensor
) -> Tensor:
    """The experts' outputs [R, H] back, summed per token: [T, H]."""
    return _Combine.apply(link, exchange, rows, place, counts)  # type: ignore[no-any-return]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, link: Tensor | None, exchange: Exchange, needs: GradNeeds, hidden: Tensor,
        weights: Tensor, ids: Tensor, place: Tensor, header: Tensor,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        (rows, slot_weights, slot_ids), told = exchange.there(
            [hidden, weights, ids], place, [0, 0, SKIPPED], header
        )
        ctx.save_for_backward(place, told[:, 0])
        ctx.exchange, ctx.needs = exchange, (needs.hidden, needs.weights)
        ctx.facts = [_facts(rows), _facts(slot_weights)]
        outputs = zip((rows, slot_weights), ctx.needs, strict=True)
        ctx.mark_non_differentiable(slot_ids, told, *(x for x, need in outputs if not need))
        ctx.set_materialize_grads(False)
        return None if link is None else torch.zeros_like(link), rows, slot_weights, slot_ids, told

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        place, counts = ctx.saved_tensors
        parts = zip(grads[:2], ctx.facts, ctx.needs, strict=True)
        filled = [_filled(grad, facts) for grad, facts, need in parts if need]
        sums = iter(ctx.exchange.in_backward().back(filled, place, counts))
        hidden, weights = (next(sums) if need else None for need in ctx.needs)
        return None, None, None, hidden, weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        link: Tensor | None,
        exchange: Exchange,
        rows: Tensor,
        place: Tensor,
        counts: Tensor,
    ) -> Tensor:
        # All ranks ask for these first in backward: see `ep_dispatch.links._SumLinked`.
        ctx.save_for_backward(place, counts)
        ctx.exchange = exchange
        return exchange.back([rows], place, counts)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        place, counts = ctx.saved_tensors
        (rows,), _ = ctx.exchange.in_backward().there([grad], place, [0], counts=counts)
        return None, None, rows, None, None
