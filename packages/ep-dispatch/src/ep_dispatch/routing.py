"""Index arithmetic of routing: which row a slot becomes, and in which order rows lie. No communication.

T = tokens of this rank, K = experts per token, E = experts of a layer, P = ranks of the EP group,
N = rows sent, R = rows received. A slot is one of a token's K choices; a row is one token copy in a
buffer. Expert e is owned by rank `e // (E / P)`: owners hold contiguous ranges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SKIPPED", "SlotOrder", "expert_major_order", "inverse_permutation", "local_routes"]

SKIPPED = -1
"""The expert id of a slot that no expert shall compute: it contributes exactly zero."""


@dataclass(frozen=True, eq=False)
class SlotOrder:
    """How the T*K slots of a rank lie in its send buffer: sorted by expert, so also by owner rank.

    Attributes:
        slots: [T*K] int64, flat slots (`token * K + k`) by expert id, equal ids in slot order;
            skipped slots come last.
        rows: [T, K] int64, the row of each slot: the inverse of `slots`. A skipped slot's row lies
            behind the last row that is sent.
        counts: [E] int64, rows of each expert.
        invalid: 0-dim bool, whether any id was out of range (such slots are ordered as skipped).
    """

    slots: Tensor
    rows: Tensor
    counts: Tensor
    invalid: Tensor

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int) -> SlotOrder:
        """Order the slots of `top_k_index` ([T, K], global expert ids or `SKIPPED`).

        Cost: one stable sort of T*K integers; no host synchronization.
        """
        ids = top_k_index.reshape(-1).long()
        inside = (ids >= 0) & (ids < num_experts)
        # Skipped slots sort behind the last expert, and are counted in a bin that is dropped.
        keys = ids.masked_fill(~inside, num_experts)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, keys, torch.ones_like(keys))
        slots = torch.argsort(keys, stable=True)
        return cls(
            slots=slots,
            rows=inverse_permutation(slots).view(top_k_index.shape),
            counts=counts[:num_experts],
            invalid=(~inside & (ids != SKIPPED)).any(),
        )


def inverse_permutation(order: Tensor) -> Tensor:
    """The permutation that undoes `order`: `x[order][inverse]` is `x`."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), dtype=order.dtype, device=order.device)
    return inverse


def expert_major_order(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order that groups received rows by local expert.

    Rows arrive by source rank, and by local expert within a source.

    Args:
        counts: [P, E/P] int64, rows that source p sent for local expert e.
        num_rows: R, their sum (given, so that the device need not be asked).

    Returns:
        `order` [R] int64: row i in expert order is received row `order[i]`; rows of one expert stay
        in source order. `expert_ids` [R] int64, ascending. `offsets` [E/P] int32, the end of each
        expert's rows, as `torch.nn.functional.grouped_mm` takes them.
    """
    ranks, experts = counts.shape
    ids = torch.arange(experts, device=counts.device).repeat(ranks)
    ids = ids.repeat_interleave(counts.reshape(-1), output_size=num_rows)
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
