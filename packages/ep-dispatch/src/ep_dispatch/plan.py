"""The plain data between the phases of `all_to_all`: nothing of a call is kept on the object.

T = tokens of this rank, H = hidden size, K = experts per token, E = experts of a layer, P = ranks of
the EP group, N = rows sent, R = rows received, J = slots that a received row carries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .links import GradNeeds

__all__ = ["DispatchPlan", "ReceivedRows", "Ticket"]


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Where each row of one routing goes. It can be saved, logged, and used again.

    Using it again with new routing weights: `dataclasses.replace(plan, top_k_weights=new)`.

    Attributes:
        top_k_weights: [T, K], as given, with its history.
        first, last: this rank's slice of the T tokens, `last` excluded.
        slots: [N] int64, the flat slot (within the slice) of each row sent, by owner and expert.
        row_of_slot: [last - first, K] int64, the row of each slot; N or more: the slot is skipped.
        send_sizes, receive_sizes: [P] rows to and from each rank of the EP group.
        counts: [P, E/P] int64, rows that each rank sends for each of this rank's experts.
        arrival: [R] int64, row i in expert order is received row `arrival[i]`.
        arrival_inverse: [R] int64, its inverse.
        expert_ids: [R] int64, local expert of each row in expert order, ascending.
        offsets: [E/P] int32, the end of each local expert's rows.
        rows_per_expert: [E/P] rows of each local expert, known to the host.
        needs: which gradients travel; None if the plan was made with grad mode off.
    """

    top_k_weights: Tensor
    first: int
    last: int
    slots: Tensor
    row_of_slot: Tensor
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]
    counts: Tensor
    arrival: Tensor
    arrival_inverse: Tensor
    expert_ids: Tensor
    offsets: Tensor
    rows_per_expert: tuple[int, ...]
    needs: GradNeeds | None

    @property
    def num_tokens(self) -> int:
        """T, the tokens that were routed."""
        return self.top_k_weights.shape[0]

    @property
    def num_rows(self) -> int:
        """R, the rows that this rank's experts get."""
        return sum(self.receive_sizes)

    @property
    def token_of_row(self) -> Tensor:
        """[N] int64, the token (within the slice) of each row sent."""
        return self.slots // self.row_of_slot.shape[1]


@dataclass(frozen=True, eq=False)
class ReceivedRows:
    """The rows that this rank's experts get, grouped by local expert.

    Attributes:
        rows: [R, H].
        expert_ids: [R, J] int64, local expert ids; here J = 1 and they ascend.
        weights: [R, J], the routing weights that came with the rows, differentiable.
        offsets: [E/P] int32, the end of each local expert's rows.
    """

    rows: Tensor
    expert_ids: Tensor
    weights: Tensor
    offsets: Tensor


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
