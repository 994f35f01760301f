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
    "expert_major_order",
    "local_routes",
    "owner_places",
    "transpose_index",
]

SKIPPED = -1
"""The expert id of a slot that no expert shall compute: it contributes exactly zero."""


@dataclass(frozen=True, eq=False)
class SendOrder:
    """How the rows and slots of a rank lie in its send buffers.

    A token is one row for each rank that owns any of its experts: rows lie by owner, then by token.
    Slots lie by expert, so also by owner; each names its row. What is not sent lies at the end: how much
    that is, is on the device (`rows_per_owner`, `counts`) until the host has read it.

    Attributes:
        counts: [E] int64, slots of each expert.
        rows_per_owner: [P] int64, rows for each rank.
        slots: [M] int64, slots by expert id, equal ids in slot order.
        row_of_slot: [M] int32, for each of `slots`, its row, counted from the first of its owner.
        token_of_row: [P*T] int64, the token of each row.
        rows_by_token: [P*T] int64, the rows of token 0 first, then those of token 1, and so on.
        token_ends: [T + 1] int64, where each token's part of `rows_by_token` begins, and the end.
        invalid: 0-dim bool, whether any id was out of range (such slots are ordered as skipped).
    """

    counts: Tensor
    rows_per_owner: Tensor
    slots: Tensor
    row_of_slot: Tensor
    token_of_row: Tensor
    rows_by_token: Tensor
    token_ends: Tensor
    invalid: Tensor

    @classmethod
    def of(
        cls, token_of_slot: Tensor, expert_ids: Tensor, *, tokens: int, experts: int, ranks: int
    ) -> SendOrder:
        """Order M slots.

        Args:
            token_of_slot: [M] int64, the token of each slot.
            expert_ids: [M], the expert of each slot, below `experts`, or `SKIPPED`.
            tokens: T.
            experts: E.
            ranks: P.

        Cost: one stable sort of M integers, sums over P*T; no host synchronization.
        """
        num_experts, ids = experts, expert_ids.long()
        inside = (ids >= 0) & (ids < num_experts)
        # Skipped slots sort behind the last expert; they and their owner have a bin that is dropped.
        keys, slots = ids.masked_fill(~inside, num_experts).sort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, keys, torch.ones_like(keys))
        pairs = keys // (num_experts // ranks) * tokens + token_of_slot[slots]
        present = torch.zeros((ranks + 1) * tokens, dtype=torch.int64, device=ids.device)
        present = present.scatter_(0, pairs, 1)[: ranks * tokens].view(ranks, tokens)
        row = present.view(-1).cumsum(0).view(ranks, tokens) - 1
        rows_per_owner, rows_per_token = present.sum(1), present.sum(0)
        first = rows_per_owner.cumsum(0) - rows_per_owner
        in_block = torch.nn.functional.pad((row - first[:, None]).view(-1), (0, tokens))
        token = torch.arange(tokens, device=ids.device).expand(ranks, tokens)
        return cls(
            counts=counts[:num_experts],
            rows_per_owner=rows_per_owner,
            slots=slots,
            row_of_slot=in_block[pairs].int(),
            token_of_row=_compacted(token, present),
            rows_by_token=_compacted(row.T, present.T),
            token_ends=torch.nn.functional.pad(rows_per_token.cumsum(0), (1, 0)),
            invalid=(~inside & (ids != SKIPPED)).any(),
        )


def _compacted(values: Tensor, present: Tensor) -> Tensor:
    """The values where `present` is 1, in order, and anything behind them."""
    kept, count = present.reshape(-1), present.numel()
    out = torch.zeros(count + 1, dtype=values.dtype, device=values.device)
    place = (kept.cumsum(0) - 1).masked_fill(kept == 0, count)
    return out.scatter_(0, place, values.reshape(-1))[:count]


def transpose_index(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """From `index` [N], which names a target below `size` for each row, the rows of each target.

    Returns:
        `order` [N] int64, the rows of target 0 first, in order, then those of target 1, and so on;
        `ends` [size + 1] int64, where each target's part begins, and the end.
    """
    counts = torch.zeros(size, dtype=torch.int64, device=index.device)
    counts.scatter_add_(0, index, torch.ones_like(index))
    return index.argsort(stable=True), torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def expert_major_order(counts: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order that groups received slots by local expert.

    Slots arrive by source rank, and by local expert within a source.

    Args:
        counts: [P, E/P] int64, slots that source p sent for local expert e.
        num_slots: S, their sum (given, so that the device need not be asked).

    Returns:
        `order` [S] int64: slot i in expert order is received slot `order[i]`; slots of one expert stay
        in source order. `expert_ids` [S] int64, ascending. `offsets` [E/P] int32, the end of each
        expert's slots, as `torch.nn.functional.grouped_mm` takes them.
    """
    ranks, experts = counts.shape
    ids = torch.arange(experts, device=counts.device).repeat(ranks)
    ids = ids.repeat_interleave(counts.reshape(-1), output_size=num_slots)
    expert_ids, order = torch.sort(ids, stable=True)
    offsets = counts.sum(dim=0).cumsum(dim=0).to(torch.int32)
    return order, expert_ids, offsets


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
