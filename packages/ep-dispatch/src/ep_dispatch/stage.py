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
from .plan import Hop
from .routing import SendOrder, expert_major_order

__all__ = ["Counted", "Stage"]


@dataclass(frozen=True, eq=False)
class Counted:
    """What the ranks told each other.

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

    def count(self, order: SendOrder, known: Sequence[Notice]) -> Counted:
        """Tell every rank how many slots come for each of its experts, how many rows, and notices.

        Args:
            order: of what this rank sends.
            known: this rank's notice, or those that it learned in the stages before; each rank of the
                group has as many.

        Cost: one all-to-all of `E/P + 1` integers and 7 a notice for each rank pair, and a host
        synchronization.
        """
        counted = self.experts // self.size + 1
        told = [number for notice in known for number in notice.encode()]
        table = order.counts.new_empty((self.size, counted + len(told)))
        table[:, : counted - 1] = order.counts.view(self.size, -1)
        table[:, counted - 1] = order.rows_per_owner
        table[:, counted:] = table.new_tensor(told)
        table[:, -1] += order.invalid  # only the first stage has ids that may be
        arrived = table
        if self.group is not None and self.size > 1:
            each = [1] * self.size
            arrived = _all_to_all(table, self.group, each, each)
        sent, received = torch.stack([table, arrived]).tolist()  # the host synchronization
        return Counted(
            arrived[:, :counted],
            [row[:counted] for row in sent],
            [row[:counted] for row in received],
            [
                Notice.decode(row[at : at + Notice.LENGTH])
                for row in received
                for at in range(counted, len(row), Notice.LENGTH)
            ],
        )

    def hop(self, order: SendOrder, counted: Counted) -> Hop:
        """Where the rows go; but for `row_of_slot`, which the senders know (`complete`)."""
        send, receive = (
            tuple(row[-1] for row in table) for table in (counted.leaving, counted.arriving)
        )
        slots_sent, slots_received = (
            tuple(sum(row[:-1]) for row in table) for table in (counted.leaving, counted.arriving)
        )
        arrival, ids, offsets = expert_major_order(counted.table[:, :-1], sum(slots_received))
        columns = zip(*(row[:-1] for row in counted.arriving), strict=True)
        return Hop(
            slots=order.slots[: sum(slots_sent)],
            slots_sent=slots_sent,
            slots_received=slots_received,
            arrival=arrival,
            token_of_row=order.token_of_row[: sum(send)],
            rows_by_token=order.rows_by_token[: sum(send)],
            token_ends=order.token_ends,
            send_sizes=send,
            receive_sizes=receive,
            row_of_slot=arrival,
            expert_ids=ids,
            offsets=offsets,
            rows_per_expert=tuple(map(sum, columns)),
        )

    def complete(self, hop: Hop, counted: Counted, rows: Tensor) -> Hop:
        """The hop with `row_of_slot`, from the rows [S] of the slots as they came.

        They are counted from the first row of their source.
        """
        slots, sent = counted.table[:, :-1].sum(1), counted.table[:, -1]
        before = sent.cumsum(0) - sent
        before = before.repeat_interleave(slots, output_size=sum(hop.slots_received))
        return replace(hop, row_of_slot=(rows + before)[hop.arrival])

    def slot_exchange(self, hop: Hop) -> SlotExchange:
        """Facts of slots to the ranks that own their experts."""
        assert self.group is not None
        return SlotExchange(self.group, hop.slots_sent, hop.slots_received)

    def row_exchange(
        self, hop: Hop, wire: torch.dtype | None, *, back: bool = False
    ) -> RowExchange:
        """Rows to the ranks that own their experts, or `back` from them."""
        assert self.group is not None
        send, receive = hop.send_sizes, hop.receive_sizes
        if back:
            send, receive = receive, send
        return RowExchange(self.group, send, receive, wire)
