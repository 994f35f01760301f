"""The plain data between the phases of `all_to_all`.

T = tokens of this rank, H = hidden size, K = experts per token, E = experts of a layer, P = ranks of
the EP group, N = rows sent, R = rows received, S = slots received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .links import GradNeeds
from .routing import transpose_index
from .rows import gather_rows, sum_rows

__all__ = ["ChunkedRouting", "DispatchPlan", "Hop", "ReceivedRows", "Routing", "SlotHop", "Ticket"]


@dataclass(frozen=True, eq=False)
class Hop:
    """Where rows go in one exchange: integers alone. T = tokens (or rows of the hop before).

    Attributes:
        token_of_row: [N] int64, the token of each row sent, by owner and token.
        rows_by_token: [N] int64, the rows of each token, token by token.
        token_ends: [T + 1] int64, where each token's part of `rows_by_token` begins, and the end.
        send_sizes, receive_sizes: [P] rows to and from each rank of the exchange.
        row_of_slot: [S] int64, the received row of each slot, slots by local expert.
        expert_ids: [S] int64, the expert of each slot among those of the receiver, ascending.
        offsets: [E/P] int32, the end of each expert's slots.
        rows_per_expert: [E/P] slots of each expert, known to the host.
    """

    token_of_row: Tensor
    rows_by_token: Tensor
    token_ends: Tensor
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]
    row_of_slot: Tensor
    expert_ids: Tensor
    offsets: Tensor
    rows_per_expert: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """R, the rows that arrive."""
        return sum(self.receive_sizes)


@dataclass(frozen=True, eq=False)
class SlotHop:
    """Where the slots of all chunks go in one exchange: integers alone.

    Slots before and after it lie by chunk; on the way by owner, then by chunk.

    Attributes:
        slots: [N'] int64, which of the slots each sent one is.
        sent, received: [P] slots to and from each rank of the exchange.
        arrival: [S] int64, slot i (by chunk, then by expert) is received slot `arrival[i]`.
    """

    slots: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    arrival: Tensor


@dataclass(frozen=True, eq=False)
class Routing:
    """Where each row of one routing goes, or of one chunk of its tokens: integers alone.

    Attributes:
        num_tokens: T, the tokens that were routed, those of all chunks.
        first, last: this rank's slice of the T tokens, or its part in this chunk, `last` excluded.
        hops: one for each exchange on the way to the experts.
        needs: which gradients travel; None if the plan was made with grad mode off.
    """

    num_tokens: int
    first: int
    last: int
    hops: tuple[Hop, ...]
    needs: GradNeeds | None

    @property
    def num_rows(self) -> int:
        """R, the rows that reach this rank's experts."""
        return self.hops[-1].num_rows

    @property
    def rows_per_expert(self) -> tuple[int, ...]:
        """[E/P] slots of each local expert, known to the host."""
        return self.hops[-1].rows_per_expert

    @property
    def num_slots(self) -> int:
        """S, the slots of this rank's experts."""
        return sum(self.rows_per_expert)

    def received(self, rows: Tensor, weights: Tensor) -> ReceivedRows:
        """The rows [R, H] that came, with the slots that name them and their weights [S]."""
        last = self.hops[-1]
        return ReceivedRows(rows, last.row_of_slot, weights, last.expert_ids, last.offsets)


@dataclass(frozen=True, eq=False)
class ChunkedRouting:
    """A routing whose tokens go in chunks, one after the other.

    Attributes:
        chunks: contiguous parts of this rank's slice; as many on all ranks.
        slots: one for each exchange on the way to the experts.
        longest: the most tokens that any rank dispatches.
        rounds: whether a chunk begins when the one before it is done.
    """

    chunks: tuple[Routing, ...]
    slots: tuple[SlotHop, ...]
    longest: int
    rounds: bool

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.chunks[0].num_tokens

    @property
    def needs(self) -> GradNeeds | None:
        """Which gradients travel."""
        return self.chunks[0].needs


@dataclass(frozen=True, eq=False)
class DispatchPlan(Routing):
    """A routing, and the weights of the slots. It can be saved, logged, and dispatched again.

    Attributes:
        weights: [S], the routing weight of each slot, differentiable.
        link: see `ep_dispatch.links`.
    """

    weights: Tensor
    link: Tensor | None


@dataclass(frozen=True, eq=False)
class ReceivedRows:
    """The tokens that this rank's experts get, each once, and the slots that name them.

    Attributes:
        rows: [R, H], by source rank.
        row_of_slot: [S] int64, the row of each slot; slots are grouped by local expert.
        weights: [S], the routing weight of each slot, differentiable.
        expert_ids: [S] int64, the local expert of each slot, ascending.
        offsets: [E/P] int32, the end of each local expert's slots.
    """

    rows: Tensor
    row_of_slot: Tensor
    weights: Tensor
    expert_ids: Tensor
    offsets: Tensor

    def by_expert(self) -> Tensor:
        """A copy of its row for each slot: [S, H], grouped by local expert up to `offsets`."""
        return gather_rows(self.rows, self.row_of_slot, *self._slots_by_row)

    def sum(self, outputs: Tensor) -> Tensor:
        """From outputs [S, H] of the slots, weighted, to the sum of each row: [R, H].

        Accumulated in float32 or wider; of the outputs' dtype.
        """
        return sum_rows(outputs, self.row_of_slot, *self._slots_by_row)

    @property
    def _slots_by_row(self) -> tuple[Tensor, Tensor]:
        # Kept by hand: `cached_property` takes a lock in Python 3.11, which torch.compile can't trace.
        kept: dict[str, tuple[Tensor, Tensor]] = vars(self)
        if "_by_row" not in kept:
            kept["_by_row"] = transpose_index(self.row_of_slot, self.rows.shape[0])
        return kept["_by_row"]


@dataclass(frozen=True, eq=False)
class Ticket:
    """What `combine` needs to bring the rows of one `dispatch` back.

    Attributes:
        plan: the plan that was dispatched.
        needs: which gradients travel.
        link: see `ep_dispatch.links`.
        dtype, width: of the hidden states.
    """

    plan: DispatchPlan
    needs: GradNeeds
    link: Tensor | None
    dtype: torch.dtype
    width: int
