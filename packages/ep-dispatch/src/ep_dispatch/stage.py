"""One exchange of `all_to_all` between the ranks of a group: who tells whom what comes.

M = slots of this rank, E = experts of the group, P = its ranks, N = rows sent, S = slots received.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .agreement import Notice
from .collectives import _all_to_all, group_rank, group_size
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
        notices: by EP rank.
    """

    table: Tensor
    leaving: list[list[int]]
    arriving: list[list[int]]
    notices: dict[int, Notice]


@dataclass(frozen=True, eq=False)
class Stage:
    """The ranks of one exchange; each is the way to `experts / P` experts.

    Attributes:
        group: the ranks; None: this one alone.
        members: their EP ranks.
        experts: E.
    """

    group: ProcessGroup | None
    members: tuple[int, ...]
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

    def count(self, order: SendOrder, notice: Notice) -> Counted:
        """Tell every rank how many slots come for each of its experts, how many rows, and the notice.

        Cost: one all-to-all of `E/P + 7` integers a rank pair, and a host synchronization.
        """
        counted = self.experts // self.size + 1
        table = order.counts.new_empty((self.size, counted + Notice.LENGTH))
        table[:, : counted - 1] = order.counts.view(self.size, -1)
        table[:, counted - 1] = order.rows_per_owner
        table[:, counted:] = table.new_tensor(notice.encode())
        table[:, -1] = order.invalid
        arrived = table
        if self.group is not None and self.size > 1:
            each = [1] * self.size
            arrived = _all_to_all(table, self.group, each, each)
        sent, received = torch.stack([table, arrived]).tolist()  # the host synchronization
        notices = [Notice.decode(row[counted:]) for row in received]
        return Counted(
            arrived[:, :counted],
            [row[:counted] for row in sent],
            [row[:counted] for row in received],
            dict(zip(self.members, notices, strict=True)),
        )

    def refuse(self, device: torch.device | None) -> None:
        """Take part in the counts with nothing to send, and let the others raise."""
        if self.size > 1:
            nothing = torch.empty(0, dtype=torch.int64, device=device)
            self.count(self.order(nothing, nothing, 0), Notice(refused=True))

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

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return group_rank(self.group)
