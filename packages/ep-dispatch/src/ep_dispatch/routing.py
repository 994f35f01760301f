"""Index arithmetic of routing: which rows tokens become, and in which order they lie. No communication.

T = tokens of this rank, M = slots of this rank, E = experts of a layer, P = ranks that own them,
N = rows sent, R = rows received, S = slots received. A slot is one of a token's K choices; a row is one
token copy in a buffer. Expert e is owned by rank `e // (E / P)`: owners hold contiguous ranges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "SKIPPED",
    "SendOrder",
    "SentRows",
    "expert_major_order",
    "local_routes",
    "owner_places",
    "transpose_index",
]

SKIPPED = -1
"""The expert id of a slot that no expert shall compute: it contributes exactly zero."""


@dataclass(frozen=True, eq=False)
class SendOrder:
    """How the slots of a rank are counted before the host knows how many there are.

    A token is one row for each rank that owns any of its experts: rows lie by owner, then by token.
    Slots lie by expert, so also by owner; each names its row. `sent` tells where they lie when the host
    has read the counts.

    Attributes:
        counts: [E] int64, slots of each expert.
        rows_per_owner: [P] int64, rows for each rank.
        ids: [M] int64, the ids, ascending, so that the first and the last tell whether any is out of
            range. If so, nothing else here means anything.
        slots: [M] int64, the slot of each of `ids`, equal ids in slot order: the skipped ones come first.
        places: [M] int64, the pair of owner and token of each slot, as a place in `before`.
        before: [P + 1, T + 1] int64, rows for an owner of the tokens before each one; the last owner is
            that of skipped slots, the last token is behind all.
        present: [P + 1, T + 1] int64, one behind each pair of an owner and a token with a row there.
    """

    counts: Tensor
    rows_per_owner: Tensor
    ids: Tensor
    slots: Tensor
    places: Tensor
    before: Tensor
    present: Tensor

    @classmethod
    def of(
        cls, token_of_slot: Tensor, expert_ids: Tensor, *, tokens: int, experts: int, ranks: int
    ) -> SendOrder:
        """Order M slots.

        Args:
            token_of_slot: int64, the token of each slot; it broadcasts with `expert_ids`.
            expert_ids: M of them in any shape, each below `experts`, or `SKIPPED`.
            tokens: T.
            experts: E.
            ranks: P.

        Cost: one stable sort of M integers, a sum over P*T; no host synchronization.
        """
        device, ids = expert_ids.device, expert_ids.long()
        ascending, slots = ids.reshape(-1).sort(stable=True)
        starts = torch.searchsorted(ascending, torch.arange(experts + 1, device=device))
        # The owner of skipped slots is the last one. What is out of range gets any owner.
        owners = (ids // (experts // ranks)).remainder(ranks + 1)
        places = torch.add(token_of_slot, owners, alpha=tokens + 1).reshape(-1)
        # One place later, so that the sums are those of the tokens before.
        shape = ranks + 1, tokens + 1
        present = torch.zeros(shape, dtype=torch.int64, device=device)
        present.view(-1)[1:].scatter_(0, places, 1)
        before = present.cumsum(1)
        return cls(
            counts=starts.diff(),
            rows_per_owner=before[:ranks, -1],
            ids=ascending,
            slots=slots,
            places=places,
            before=before,
            present=present,
        )

    def sent(self, slots: int, rows: int) -> SentRows:
        """The rows and slots that are sent, if all ids are in range: the host knows both numbers by now.

        Cost: one stable sort of N integers, sums over P*T; no host synchronization.
        """
        ranks, tokens = (size - 1 for size in self.before.shape)
        chosen = self.slots[len(self.slots) - slots :]
        places = self.places[chosen]
        row = self.present.view(-1).cumsum(0)[places]
        # Each row has a slot; those of several write the same token.
        token_of_row = row.new_empty(rows).scatter_(0, row, places.remainder(tokens + 1))
        return SentRows(
            slots=chosen,
            row_of_slot=self.before.view(-1)[places].int(),
            token_of_row=token_of_row,
            rows_by_token=token_of_row.argsort(stable=True),
            token_ends=self.present[:ranks].sum(0).cumsum(0),
        )


@dataclass(frozen=True, eq=False)
class SentRows:
    """How the rows and slots of a rank lie in its send buffers.

    Attributes:
        slots: [S'] int64, slots by expert id, equal ids in slot order.
        row_of_slot: [S'] int32, for each of `slots`, its row, counted from the first of its owner.
        token_of_row: [N] int64, the token of each row.
        rows_by_token: [N] int64, the rows of token 0 first, then those of token 1, and so on.
        token_ends: [T + 1] int64, where each token's part of `rows_by_token` begins, and the end.
    """

    slots: Tensor
    row_of_slot: Tensor
    token_of_row: Tensor
    rows_by_token: Tensor
    token_ends: Tensor

    @classmethod
    def nowhere(cls, slots: int, rows: int, tokens: int, device: torch.device) -> SentRows:
        """So many slots and rows, all of token 0 and the first row."""
        index = torch.zeros(max(slots, rows, tokens + 1), dtype=torch.int64, device=device)
        of_rows, of_slots = index[:rows], index[:slots]
        return cls(of_slots, of_slots.int(), of_rows, of_rows, index[: tokens + 1])


def transpose_index(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """From `index` [N], which names a target below `size` for each row, the rows of each target.

    Returns:
        `order` [N] int64, the rows of target 0 first, in order, then those of target 1, and so on;
        `ends` [size + 1] int64, where each target's part begins, and the end.
    """
    counts = torch.zeros(size, dtype=torch.int64, device=index.device)
    counts.scatter_add_(0, index, torch.ones_like(index))
    return index.argsort(stable=True), torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def expert_major_order(
    counts: Tensor, rows: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The order that groups received slots by local expert.

    Slots arrive by source rank, and by local expert within a source.

    Args:
        counts: [P, E/P] int64, slots that source p sent for local expert e.
        rows: [P] int64, rows that source p sent.
        num_slots: S, the sum of `counts` (given, so that the device need not be asked).

    Returns:
        `order` [S] int64: slot i in expert order is received slot `order[i]`; slots of one expert stay
        in source order. `first_rows` [S] int64, the first row of each slot's source. `expert_ids` [S]
        int64, ascending. `offsets` [E/P] int32, the end of each expert's slots, as
        `torch.nn.functional.grouped_mm` takes them.

    Cost: sums over E integers, a search for each slot; no sort, no host synchronization.
    """
    ranks, experts = counts.shape
    # Slots of one source and expert lie side by side in both orders: these are their ends.
    ends = counts.T.reshape(-1).cumsum(0)  # [E], by expert
    arriving = counts.reshape(-1).cumsum(0).view(ranks, experts)
    shift = arriving.T - ends.view(experts, ranks)
    first_rows = (rows.cumsum(0) - rows).expand(experts, ranks)
    slots = torch.arange(num_slots, device=counts.device)
    part = torch.searchsorted(ends, slots, right=True)
    shift, first_rows = torch.stack([shift, first_rows]).view(2, -1)[:, part]
    return slots + shift, first_rows, part // ranks, ends[ranks - 1 :: ranks].int()


def local_routes(top_k_index: Tensor, rank: int, num_local_experts: int) -> tuple[Tensor, Tensor]:
    """Local expert ids of the routes to `rank`'s experts, and a mask of all other routes.

    Returns:
        ids [T, K] int64, `num_local_experts` where the route leads elsewhere (or is skipped), and
        `foreign` [T, K] bool, true there. No host synchronization.
    """
    ids = top_k_index.long() - rank * num_local_experts
    foreign = (ids < 0) | (ids >= num_local_experts)
    return ids.masked_fill(foreign, num_local_experts), foreign


def owner_places(top_k_index: Tensor, *, experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each token's row lies among those for each owner, by shapes that no routing changes.

    Args:
        top_k_index: [T, K] expert ids below `experts`, or `SKIPPED`.
        experts: E.
        ranks: P.

    Returns:
        `place` [P, T] int64, counted from the first row for that rank, in token order, -1 where the
        token has no expert there; `counts` [P] int64, rows for each rank; `invalid`, 0-dim bool, whether
        any id was out of range (such slots are ordered as skipped). No sort, no host synchronization.
    """
    ids = top_k_index.long()
    inside = (ids >= 0) & (ids < experts)
    owner = (ids // (experts // ranks)).masked_fill(~inside, ranks)
    present = ids.new_zeros((ids.shape[0], ranks + 1)).scatter_(1, owner, 1)[:, :ranks].T
    place = (present.cumsum(1) - 1).masked_fill(present == 0, -1)
    return place, present.sum(1), (~inside & (ids != SKIPPED)).any()
