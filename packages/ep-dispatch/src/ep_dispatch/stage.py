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
from .routing import SKIPPED, SendOrder, SentRows, expert_major_order

__all__ = ["Counted", "Stage", "complete"]


@dataclass(frozen=True, eq=False)
class Counted:
    """What the ranks told each other of one chunk.

    Attributes:
        table: [P, E/P + 1] int64 of the slots and rows that arrive, on the device.
        leaving, arriving: the same of what leaves and arrives, known to the host.
        notices: all that the ranks of the stage knew.
        invalid: whether an id of this rank is out of range.
    """

    table: Tensor
    leaving: list[list[int]]
    arriving: list[list[int]]
    notices: list[Notice]
    invalid: bool


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

        Cost: one all-to-all of `E/P + 3` integers a chunk and 8 a notice for each rank pair, and a host
        synchronization.
        """
        local, chunks = self.experts // self.size, len(orders)
        each = local + 3
        told = on_device([x for notice in known for x in notice.encode()], orders[0].ids.device)
        columns = [part for order in orders for part in self._columns(order)]
        table = torch.cat([*columns, told.expand(self.size, -1)], dim=1)
        arrived = table
        if self.group is not None and self.size > 1:
            one = [1] * self.size
            arrived = _all_to_all(table, self.group, one, one)
        sent, received = on_host(torch.stack([table, arrived]))
        notices = [
            # Only the first stage has ids that may be out of range, and one notice of each rank.
            replace(notice, bad_ids=notice.bad_ids or self._invalid(row[: chunks * each]))
            for row in received
            for at in range(chunks * each, len(row), Notice.LENGTH)
            for notice in [Notice.decode(row[at : at + Notice.LENGTH])]
        ]
        return [
            Counted(
                arrived[:, first : first + local + 1],
                [row[first : first + local + 1] for row in sent],
                [row[first : first + local + 1] for row in received],
                notices,
                self._invalid(sent[0][first : first + each]),
            )
            for first in range(0, chunks * each, each)
        ]

    def _columns(self, order: SendOrder) -> list[Tensor]:
        """What a chunk has in the table: its slots, its rows, its least and its greatest id."""
        ids = order.ids if len(order.ids) else order.ids.new_full((1,), SKIPPED)
        extremes = [ids[at].expand(self.size, 1) for at in (0, -1)]
        return [order.counts.view(self.size, -1), order.rows_per_owner[:, None], *extremes]

    def _invalid(self, told: Sequence[int]) -> bool:
        """Whether an id was out of range, by the columns of some chunks."""
        each = self.experts // self.size + 3
        return min(told[each - 2 :: each]) < SKIPPED or max(told[each - 1 :: each]) >= self.experts

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
        sent = [self._sent(order, one) for order, one in zip(orders, counted, strict=True)]
        made = [self._hop(rows, one) for rows, one in zip(sent, counted, strict=True)]
        leaving = [[sum(row[:-1]) for row in one.leaving] for one in counted]
        arriving = [[sum(row[:-1]) for row in one.arriving] for one in counted]
        hops = [hop for hop, _ in made]
        which, rows = [one.slots for one in sent], [one.row_of_slot for one in sent]
        arrival = [order for _, order in made]
        if len(sent) > 1:
            before = [sum(slots[:chunk]) for chunk in range(len(slots))]
            out = _places([order.counts.view(self.size, -1).sum(1) for order in orders], leaving)
            back = _places([one.table[:, :-1].sum(1) for one in counted], arriving)
            which = [_placed([x + n for x, n in zip(which, before, strict=True)], out)]
            rows = [_placed(rows, out)]
            arrival = [torch.cat([p[order] for p, order in zip(back, arrival, strict=True)])]
        way = SlotHop(
            slots=which[0],
            sent=tuple(map(sum, zip(*leaving, strict=True))),
            received=tuple(map(sum, zip(*arriving, strict=True))),
            arrival=arrival[0],
        )
        return hops, way, rows[0]

    def _sent(self, order: SendOrder, counted: Counted) -> SentRows:
        """The rows and slots that one chunk sends."""
        slots = sum(sum(row[:-1]) for row in counted.leaving)
        rows = sum(row[-1] for row in counted.leaving)
        if counted.invalid:
            # All ranks will raise; until then nobody may meet a row that isn't there.
            return SentRows.nowhere(slots, rows, order.before.shape[1] - 1, order.ids.device)
        return order.sent(slots, rows)

    def _hop(self, sent: SentRows, counted: Counted) -> tuple[Hop, Tensor]:
        """The hop of one chunk, and which of the slots that came each slot is."""
        send, receive = (
            tuple(row[-1] for row in table) for table in (counted.leaving, counted.arriving)
        )
        columns = [sum(column) for column in zip(*counted.arriving, strict=True)][:-1]
        arrival, first_rows, ids, offsets = expert_major_order(
            counted.table[:, :-1], counted.table[:, -1], sum(columns)
        )
        hop = Hop(
            token_of_row=sent.token_of_row,
            rows_by_token=sent.rows_by_token,
            token_ends=sent.token_ends,
            send_sizes=send,
            receive_sizes=receive,
            row_of_slot=first_rows,
            expert_ids=ids,
            offsets=offsets,
            rows_per_expert=tuple(columns),
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


def _places(counts: Sequence[Tensor], known: Sequence[Sequence[int]]) -> list[Tensor]:
    """Where the slots of each chunk lie in a buffer by rank, then by chunk.

    Args:
        counts: [P] slots to (or from) each rank, for each chunk.
        known: the same, known to the host.

    Returns:
        for each chunk the place of its slots, which lie by rank.
    """
    by_rank = torch.stack(list(counts), dim=1)  # [P, chunks]
    first = (by_rank.view(-1).cumsum(0) - by_rank.view(-1)).view_as(by_rank)
    shift = first - (by_rank.cumsum(0) - by_rank)
    return [
        torch.arange(sum(size), device=count.device)
        + shift[:, chunk].repeat_interleave(count, output_size=sum(size))
        for chunk, (count, size) in enumerate(zip(counts, known, strict=True))
    ]


def _placed(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """The values of each chunk at their places."""
    values = torch.cat(list(parts))
    return torch.empty_like(values).scatter_(0, torch.cat(list(places)), values)
