"""`all_to_all`: only routed tokens move, to the ranks that hold their experts and back.

T = tokens of this rank, H = hidden size, K = experts per token, E = experts of a layer, P = ranks of
the EP group, N = rows sent, R = rows received.

    hidden [T, H] -slice 1/tp-> -copy per slot-> [N, H] -all-to-all-> [R, H] by source
        -permute-> [R, H] by local expert -experts-> [R, H] -permute, all-to-all-> [N, H]
        -sum over slots-> -gather over tp-> [T, H]
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from . import checks
from .agreement import Notice, agree
from .collectives import _all_to_all, chunk_bounds, gather_over_group
from .implementation import EPImplementation
from .links import GradNeeds, exchange_linked, join_parameters, new_link, split_linked
from .plan import DispatchPlan, ReceivedRows, Ticket
from .routing import SlotOrder, expert_major_order, inverse_permutation
from .rows import gather_rows, permute_rows, sum_rows

__all__ = ["AllToAll"]


class AllToAll(EPImplementation):
    """Only routed tokens move: all-to-all there, local experts, all-to-all back, sum over slots.

    Fits every layout. The ranks of a TP group hold the same tokens, so each sends its own `1/tp`
    slice of them (uneven or empty), and the outputs are gathered over TP. The routing weights travel
    with the rows and are applied by the experts.

    Nothing of a call is kept on the object: several may be in flight.

    Cost of a forward: one all-to-all of `E/P + 6` integers a rank pair and one host synchronization to
    read them, two all-to-alls there (rows, weights), one back, one all-gather over TP. Backward: the
    same for the gradients that any rank of the group needs. Saved for backward: integer indices.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Dispatch, run the experts, combine."""
        plan = self.prepare(top_k_index, top_k_weights, hidden_states=hidden_states)
        received, ticket = self.dispatch(hidden_states, plan)
        rows = self.run_experts(received.rows, received.expert_ids, received.weights)
        return self.combine(join_parameters(rows, self._idle_parameters(plan)), ticket)

    def prepare(
        self, top_k_index: Tensor, top_k_weights: Tensor, *, hidden_states: Tensor | None = None
    ) -> DispatchPlan:
        """Plan where the rows of a routing go.

        Args:
            top_k_index: [T, K] int64 or int32, global expert ids, -1 to skip a slot.
            top_k_weights: [T, K].
            hidden_states: [T, H], if they are known already: only then are they checked here, and is
                their gradient left out where no rank of the group needs it.

        Raises:
            ValueError: this rank's inputs are wrong: shapes, dtypes, ids out of range.
            RuntimeError: another rank's inputs are, or the ranks' inputs do not fit together. Both are
                raised before any row moves, on every rank of the EP group.

        Cost: one all-to-all of `E/P + 6` integers a rank pair, one host synchronization.
        """
        problem = (
            checks.routing_problem(top_k_index, top_k_weights)
            if hidden_states is None
            else checks.inputs_problem(hidden_states, top_k_index, top_k_weights)
        )
        if problem is not None:
            self._refuse(top_k_index, problem)
        first, last = self._slice(top_k_index.shape[0])
        notice = self._notice(top_k_weights, hidden_states)
        with torch.no_grad():
            order = SlotOrder.of(top_k_index[first:last], self.num_experts)
            counts, leaving, arriving, notices = self._exchange_counts(
                order.counts, notice, order.invalid
            )
            if notices[self.ep_rank].bad_ids:
                raise ValueError(checks.ids_problem(top_k_index, self.num_experts))
            needs = agree(notices)
            send_sizes, receive_sizes = (tuple(map(sum, table)) for table in (leaving, arriving))
            arrival, expert_ids, offsets = expert_major_order(counts, sum(receive_sizes))
            return DispatchPlan(
                top_k_weights=top_k_weights,
                first=first,
                last=last,
                slots=order.slots[: sum(send_sizes)],
                row_of_slot=order.rows,
                send_sizes=send_sizes,
                receive_sizes=receive_sizes,
                counts=counts,
                arrival=arrival,
                arrival_inverse=inverse_permutation(arrival),
                expert_ids=expert_ids,
                offsets=offsets,
                rows_per_expert=tuple(map(sum, zip(*arriving, strict=True))),
                needs=needs,
            )

    def dispatch(self, hidden_states: Tensor, plan: DispatchPlan) -> tuple[ReceivedRows, Ticket]:
        """Send the tokens [T, H] to their experts.

        Returns:
            the rows that this rank's experts get, and the ticket that brings their outputs back.

        Raises:
            ValueError: `hidden_states` does not have the plan's T tokens.

        Cost: an all-to-all of rows and one of weights; no host synchronization. In backward the same,
        and an all-gather each over TP, for those of the two that need a gradient on any rank.
        """
        if hidden_states.ndim != 2 or hidden_states.shape[0] != plan.num_tokens:
            raise ValueError(
                f"hidden_states must be [{plan.num_tokens}, H], one row for each token that the plan "
                f"was prepared for, got {list(hidden_states.shape)}."
            )
        needs = _needs_now(plan)
        inputs = needs.hidden, needs.weights
        linked = needs.rows and self.ep_size > 1
        link = new_link(hidden_states.device) if linked else None
        # If the experts alone need a gradient, nothing goes back behind them.
        inner = link if any(inputs) else None
        tokens, weights = hidden_states, plan.top_k_weights
        if self._slices:
            assert self.tp_group is not None
            inner, (tokens, weights) = split_linked(inner, (tokens, weights), inputs, self.tp_group)
        rows = gather_rows(tokens, plan.token_of_row, plan.row_of_slot)
        weights = gather_rows(weights.reshape(-1, 1), plan.slots, plan.row_of_slot.view(-1, 1))
        if self.ep_size > 1:
            assert self.ep_group is not None
            inner, (rows, weights) = exchange_linked(
                inner, (rows, weights), inputs, self.ep_group, plan.send_sizes, plan.receive_sizes
            )
            rows = permute_rows(rows, plan.arrival, plan.arrival_inverse)
            weights = permute_rows(weights, plan.arrival, plan.arrival_inverse)
        ticket = Ticket(
            plan=plan,
            needs=needs,
            link=link if inner is None else inner,
            dtype=hidden_states.dtype,
            width=hidden_states.shape[1],
        )
        return ReceivedRows(rows, plan.expert_ids.unsqueeze(1), weights, plan.offsets), ticket

    def combine(self, rows: Tensor, ticket: Ticket) -> Tensor:
        """Bring the experts' outputs back and sum them per token.

        Args:
            rows: [R, H], the output for each received row, in the same order, multiplied by its
                routing weight already (`ReceivedRows.weights`). It is cast to the hidden states' dtype.
            ticket: of the `dispatch` that brought the rows.

        Returns:
            [T, H] of the hidden states' dtype; sums are accumulated in float32 or wider.

        Raises:
            ValueError: not one row of output per received row.

        Cost: one all-to-all of rows, one all-gather over TP; in backward one all-to-all.
        """
        plan = ticket.plan
        if rows.shape != (plan.num_rows, ticket.width):
            raise ValueError(
                f"combine takes one row per received row, [{plan.num_rows}, {ticket.width}], got "
                f"{list(rows.shape)}."
            )
        rows = rows.to(ticket.dtype)
        if self.ep_size > 1:
            assert self.ep_group is not None
            rows = permute_rows(rows, plan.arrival_inverse, plan.arrival)
            sizes = plan.receive_sizes, plan.send_sizes
            link, needs = ticket.link, (ticket.needs.rows,)
            _, (rows,) = exchange_linked(link, (rows,), needs, self.ep_group, *sizes)
        output = sum_rows(rows, plan.token_of_row, plan.row_of_slot)
        if self._slices:
            output = gather_over_group(output, self.tp_group, size=plan.num_tokens)
        return output

    @property
    def _slices(self) -> bool:
        """Whether this rank dispatches a slice of a batch that it holds whole."""
        return self.tp_size > 1 and not self.sequence_parallel

    def _slice(self, num_tokens: int) -> tuple[int, int]:
        if not self._slices:
            return 0, num_tokens
        return chunk_bounds(num_tokens, self.tp_size, self.tp_rank)

    def _notice(self, top_k_weights: Tensor, hidden_states: Tensor | None) -> Notice:
        width, dtype, wants_grad = 0, None, True
        if hidden_states is not None:
            width, dtype = hidden_states.shape[1], hidden_states.dtype
            wants_grad = hidden_states.requires_grad
        return Notice(
            grad=torch.is_grad_enabled(),
            hidden=wants_grad,
            weights=top_k_weights.requires_grad,
            experts=self.experts_need_grad(),
            tokens=top_k_weights.shape[0],
            batch=self._first_of_batch,
            width=width,
            dtype=dtype,
            weights_dtype=top_k_weights.dtype,
        )

    def _exchange_counts(
        self, counts: Tensor, notice: Notice, bad_ids: Tensor
    ) -> tuple[Tensor, list[list[int]], list[list[int]], list[Notice]]:
        """Tell every rank how many rows come for each of its experts, and the notice.

        Returns:
            counts [P, E/P] of the rows that arrive, on the device; the rows that leave and those that
            arrive, known to the host; the notices of all ranks.
        """
        experts = self.num_local_experts
        table = counts.new_empty((self.ep_size, experts + Notice.LENGTH))
        table[:, :experts] = counts.view(self.ep_size, experts)
        table[:, experts:] = counts.new_tensor(notice.encode())
        table[:, -1] = bad_ids
        arrived = table
        if self.ep_group is not None and self.ep_size > 1:
            ones = [1] * self.ep_size
            arrived = _all_to_all(table, self.ep_group, ones, ones)
        sent, received = torch.stack([table, arrived]).tolist()  # the one host synchronization
        notices = [Notice.decode(row[experts:]) for row in received]
        leaving, arriving = ([row[:experts] for row in rows] for rows in (sent, received))
        return arrived[:, :experts].contiguous(), leaving, arriving, notices

    def _refuse(self, top_k_index: object, problem: str) -> NoReturn:
        """Raise, and let the other ranks of the group raise too."""
        if self.ep_size > 1:
            device = top_k_index.device if isinstance(top_k_index, Tensor) else None
            nothing = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
            self._exchange_counts(nothing, Notice(refused=True), nothing[0])
        raise ValueError(problem)

    def _idle_parameters(self, plan: DispatchPlan) -> list[nn.Parameter]:
        """The parameters that the experts' own forward may leave without a gradient in this call.

        All of them if no row came. If some expert got none: those that are not one tensor for all
        local experts, since they may belong to that expert alone.
        """
        if all(plan.rows_per_expert):
            return []
        parameters = self.expert_parameters()
        if plan.num_rows == 0:
            return parameters
        fused = (self.num_local_experts,)
        return [p for p in parameters if p.shape[:1] != fused]


def _needs_now(plan: DispatchPlan) -> GradNeeds:
    if not torch.is_grad_enabled():
        return GradNeeds()
    # Made with grad mode off (all ranks were), used with it on: assume that all are needed.
    return plan.needs or GradNeeds(hidden=True, weights=True, rows=True)
