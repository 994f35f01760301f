"""One exchange of `all_to_all` between the ranks of a group: who tells whom what comes.

M = slots of this rank, E = experts of the group, P = its ranks, N = rows sent, S = slots received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .agreement import Notice
from .collectives import _all_to_all, group_size
from .exchange import RowExchange, SlotExchange
from .host import on_device, on_host
from .phase import Phase
from .plan import Hop, SlotHop
from .routing import SendOrder, expert_major_order

__all__ = ["Counted", "Stage", "complete"]


@dataclass(frozen=True, eq=False)
class Counted:
    """What the ranks told each other of one chunk.

    Attributes:
        table: [P, E/P + 1] int64 of the slots and rows that arrive, on the device.
        leaving, arriving: the same of what leaves and arrives, known to the host.
        notices: all that the ranks of the stage knew.
    """

    table: Tensor
    leaving: list[list[int]]
    arriving: list[list[int]]
    notices: list[Notice]


@dataclass(frozen=True, eq=False)
class Stage:
    """The ranks of one exchange; each is the way to `experts / P` experts.

    Attributes:
        group: the ranks; None: this one alone.
        experts: E.
    """

    group: ProcessGroup | None
    experts: int

    @property
    def size(self) -> int:
        """P."""
        return group_size(self.group)

    def order(self, token_of_slot: Tensor, expert_ids: Tensor, tokens: int) -> SendOrder:
        """Order slots by their owners."""
        return SendOrder.of(
            token_of_slot, expert_ids, tokens=tokens, experts=self.experts, ranks=self.size
        )

    def count(self, orders: Sequence[SendOrder], known: Sequence[Notice]) -> list[Counted]:
        """Tell every rank how many slots come for each of its experts, how many rows, and notices.

        Args:
            orders: of what this rank sends in each chunk; all ranks have as many.
            known: this rank's notice, or those that it learned in the stages before; each rank of the
                group has as many.

        Returns:
            the counts of each chunk.

        Cost: one all-to-all of `E/P + 1` integers a chunk and 7 a notice for each rank pair, and a host
        synchronization.
        """
        each, chunks = self.experts // self.size + 1, len(orders)
        told = [number for notice in known for number in notice.encode()]
        table = orders[0].counts.new_empty((self.size, chunks * each + len(told)))
        for chunk, order in enumerate(orders):
            columns = table[:, chunk * each : (chunk + 1) * each]
            columns[:, :-1] = order.counts.view(self.size, -1)
            columns[:, -1] = order.rows_per_owner
        table[:, chunks * each :] = on_device(told, table.device)
        for order in orders:
            table[:, -1] += order.invalid  # only the first stage has ids that may be
        arrived = table
        if self.group is not None and self.size > 1:
            one = [1] * self.size
            arrived = _all_to_all(table, self.group, one, one)
        sent, received = on_host(torch.stack([table, arrived]))
        notices = [
            Notice.decode(row[at : at + Notice.LENGTH])
            for row in received
            for at in range(chunks * each, len(row), Notice.LENGTH)
        ]
        return [
            Counted(
                arrived[:, first : first + each],
                [row[first : first + each] for row in sent],
                [row[first : first + each] for row in received],
                notices,
            )
            for first in range(0, chunks * each, each)
        ]

    def hops(
        self, orders: Sequence[SendOrder], counted: Sequence[Counted], slots: Sequence[int]
    ) -> tuple[list[Hop], SlotHop, Tensor]:
        """Where the rows and slots of each chunk go.

        Args:
            orders: of what this rank sends.
            counted: what the ranks told each other of them.
            slots: how many there are in each chunk, the skipped ones among them.

        Returns:
            the hops, whose `row_of_slot` is the first row of the slot's source: the senders know the
            rest (`complete`); the way of the slots; for each slot sent its row, counted from the first
            of its owner.
        """
        made = [self._hop(order, one) for order, one in zip(orders, counted, strict=True)]
        leaving = [[sum(row[:-1]) for row in one.leaving] for one in counted]
        arriving = [[sum(row[:-1]) for row in one.arriving] for one in counted]
        sent = [order.counts.view(self.size, -1).sum(1) for order in orders]
        came = [one.table[:, :-1].sum(1) for one in counted]
        out = _places(sent, [sum(one) for one in leaving])
        back = _places(came, [sum(one) for one in arriving])
        before = [sum(slots[:chunk]) for chunk in range(len(slots))]
        which = [
            order.slots[: sum(one)] + first
            for order, one, first in zip(orders, leaving, before, strict=True)
        ]
        rows = [order.row_of_slot[: sum(one)] for order, one in zip(orders, leaving, strict=True)]
        hop = SlotHop(
            slots=_placed(which, out),
            sent=tuple(map(sum, zip(*leaving, strict=True))),
            received=tuple(map(sum, zip(*arriving, strict=True))),
            arrival=torch.cat([p[order] for p, (_, order) in zip(back, made, strict=True)]),
        )
        return [hop for hop, _ in made], hop, _placed(rows, out)

    def _hop(self, order: SendOrder, counted: Counted) -> tuple[Hop, Tensor]:
        """The hop of one chunk, and which of the slots that came each slot is."""
        send, receive = (
            tuple(row[-1] for row in table) for table in (counted.leaving, counted.arriving)
        )
        came = sum(sum(row[:-1]) for row in counted.arriving)
        arrival, ids, offsets = expert_major_order(counted.table[:, :-1], came)
        slots, rows = counted.table[:, :-1].sum(1), counted.table[:, -1]
        before = (rows.cumsum(0) - rows).repeat_interleave(slots, output_size=came)
        columns = zip(*(row[:-1] for row in counted.arriving), strict=True)
        hop = Hop(
            token_of_row=order.token_of_row[: sum(send)],
            rows_by_token=order.rows_by_token[: sum(send)],
            token_ends=order.token_ends,
            send_sizes=send,
            receive_sizes=receive,
            row_of_slot=before[arrival],
            expert_ids=ids,
            offsets=offsets,
            rows_per_expert=tuple(map(sum, columns)),
        )
        return hop, arrival

    def slot_exchange(self, hop: SlotHop, phase: Phase) -> SlotExchange:
        """Facts of slots to the ranks that own their experts."""
        assert self.group is not None
        return SlotExchange(self.group, hop.sent, hop.received, phase)

    def row_exchange(
        self,
        hop: Hop,
        wire: torch.dtype | None,
        phase: Phase,
        *,
        back: bool = False,
        keep: bool = False,
    ) -> RowExchange:
        """Rows to the ranks that own their experts, or `back` from them."""
        assert self.group is not None
        send, receive = hop.send_sizes, hop.receive_sizes
        if back:
            send, receive = receive, send
        return RowExchange(self.group, send, receive, phase, wire, keep)


def complete(hops: Sequence[Hop], rows: Tensor) -> list[Hop]:
    """The hops of a stage with `row_of_slot`.

    Args:
        hops: of each chunk.
        rows: [S] of the slots of all chunks, by chunk and expert, counted from the first of their source.
    """
    parts = rows.split([hop.row_of_slot.shape[0] for hop in hops])
    return [
        replace(hop, row_of_slot=hop.row_of_slot + part)
        for hop, part in zip(hops, parts, strict=True)
    ]


def _places(counts: Sequence[Tensor], sums: Sequence[int]) -> list[Tensor]:
    """Where the slots of each chunk lie in a buffer by rank, then by chunk.

    Args:
        counts: [P] slots to (or from) each rank, for each chunk.
        sums: of each of them, known to the host.

    Returns:
        for each chunk the place of its slots, which lie by rank: [`sums`].
    """
    if len(counts) == 1:
        return [torch.arange(sums[0], device=counts[0].device)]
    by_rank = torch.stack(list(counts), dim=1)  # [P, chunks]
    first = (by_rank.view(-1).cumsum(0) - by_rank.view(-1)).view_as(by_rank)
    shift = first - (by_rank.cumsum(0) - by_rank)
    return [
        torch.arange(size, device=count.device)
        + shift[:, chunk].repeat_interleave(count, output_size=size)
        for chunk, (count, size) in enumerate(zip(counts, sums, strict=True))
    ]


def _placed(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """The values of each chunk at their places."""
    if len(parts) == 1:
        return parts[0]
    values = torch.cat(list(parts))
    return torch.empty_like(values).scatter_(0, torch.cat(list(places)), values)
