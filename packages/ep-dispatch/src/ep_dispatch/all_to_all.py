"""`all_to_all`: only routed tokens move, each once to a rank that holds any of its experts, and back.

T = tokens of this rank, H = hidden size, K = experts per token, E = experts of a layer, P = ranks of
the EP group, N = rows sent, R = rows received, S = slots received.

    hidden [T, H] -slice 1/tp-> -copy per owner rank-> [N, H] -all-to-all-> [R, H] by source
        -experts over S slots, sum over a row's slots-> [R, H] -all-to-all-> [N, H]
        -sum over a token's rows-> -gather over tp-> [T, H]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import checks
from .agreement import Notice, agree
from .checkpointing import CheckpointMemory
from .collectives import _all_to_all, chunk_bounds, gather_over_group
from .implementation import EPImplementation, ExpertsForward
from .links import GradNeeds, exchange_linked, join_parameters, new_link, split_linked
from .plan import DispatchPlan, ReceivedRows, Routing, Ticket
from .routing import SendOrder, expert_major_order
from .rows import gather_rows, sum_rows

__all__ = ["AllToAll"]


class AllToAll(EPImplementation):
    """Only routed tokens move: all-to-all there, local experts, all-to-all back, sum.

    A token crosses once to each rank that holds any of its experts (of 8 in 128 experts over 8 ranks:
    5.3 rows, not 8), with a row index and a weight for each slot. There its experts' weighted outputs are
    summed, and one row comes back.

    Fits every layout. The ranks of a TP group hold the same tokens, so each sends its own `1/tp`
    slice of them (uneven or empty), and the outputs are gathered over TP.

    Nothing of a call is kept on the object: several may be in flight.

    Inside `torch.utils.checkpoint.checkpoint(use_reentrant=False)` the routing of the forward is kept
    (integers) and used again in the recomputation: a near tie that the recomputed router decides in
    another way changes no shape, and the counts travel once.

    If `experts_forward` has a method `grouped(rows [R, H], row_of_slot [S], weights [S], offsets [E/P])
    -> [R, H]`, it is called with each row once; else with a copy of the row per slot.

    Cost of a forward: one all-to-all of `E/P + 7` integers a rank pair and one host synchronization to
    read them; one of an integer and a weight per slot; one of rows there and one back; one all-gather
    over TP. Backward: the same for the gradients that any rank of the group needs. Saved for backward:
    integer indices.
    """

    def __init__(self, experts_forward: ExpertsForward, **settings: Any) -> None:
        super().__init__(experts_forward, **settings)
        self._memory = CheckpointMemory()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Dispatch, run the experts, combine."""
        plan = self.prepare(top_k_index, top_k_weights, hidden_states=hidden_states)
        received, ticket = self.dispatch(hidden_states, plan)
        rows = self.run_on(received)
        return self.combine(join_parameters(rows, self._idle_parameters(plan)), ticket)

    def prepare(
        self, top_k_index: Tensor, top_k_weights: Tensor, *, hidden_states: Tensor | None = None
    ) -> DispatchPlan:
        """Plan where the rows of a routing go, and bring the slots' weights there.

        Args:
            top_k_index: [T, K] int64 or int32, global expert ids, -1 to skip a slot.
            top_k_weights: [T, K].
            hidden_states: [T, H], if they are known already: only then are they checked here, and is
                their gradient left out where no rank of the group needs it.

        Raises:
            ValueError: this rank's inputs are wrong: shapes, dtypes, ids out of range.
            RuntimeError: another rank's inputs are, or the ranks' inputs do not fit together. Both are
                raised before any row moves, on every rank of the EP group.

        Cost: one all-to-all of `E/P + 7` integers a rank pair, one host synchronization, one all-to-all
        of an integer and a weight per slot. In backward one of the weights' gradients, and one
        all-gather over TP, if any rank needs them.
        """
        routing = self._memory.recall()
        if routing is not None:
            link, (weights,) = self._exchange_slots(routing, top_k_weights)
            return DispatchPlan(**vars(routing), weights=weights[routing.arrival], link=link)

        problem = (
            checks.routing_problem(top_k_index, top_k_weights)
            if hidden_states is None
            else checks.inputs_problem(hidden_states, top_k_index, top_k_weights)
        )
        if problem is not None:
            self._refuse(top_k_index, problem)
        routing, counts, row_in_block = self._route(top_k_index, top_k_weights, hidden_states)
        link, (weights, rows) = self._exchange_slots(routing, top_k_weights, row_in_block)
        with torch.no_grad():
            # From rows counted within their source to rows counted over all.
            before = counts[:, -1].cumsum(0) - counts[:, -1]
            before = before.repeat_interleave(
                counts[:, :-1].sum(1), output_size=sum(routing.slots_received)
            )
            routing = replace(routing, row_of_slot=(rows + before)[routing.arrival])
        self._memory.remember(routing)
        return DispatchPlan(**vars(routing), weights=weights[routing.arrival], link=link)

    def dispatch(self, hidden_states: Tensor, plan: DispatchPlan) -> tuple[ReceivedRows, Ticket]:
        """Send the tokens [T, H] to the ranks of their experts.

        Returns:
            the rows that this rank gets with the slots that name them, and the ticket that brings
            their outputs back.

        Raises:
            ValueError: `hidden_states` does not have the plan's T tokens.

        Cost: an all-to-all of rows; no host synchronization. In backward the same, and an all-gather
        over TP, if any rank of the group needs the hidden states' gradient.
        """
        if hidden_states.ndim != 2 or hidden_states.shape[0] != plan.num_tokens:
            raise ValueError(
                f"hidden_states must be [{plan.num_tokens}, H], one row for each token that the plan "
                f"was prepared for, got {list(hidden_states.shape)}."
            )
        needs = _needs_now(plan)
        linked = needs.rows and self.ep_size > 1
        link = plan.link if linked else None
        if linked and link is None:
            link = new_link(hidden_states.device)
        # If the hidden states need no gradient, nothing goes back behind them.
        inner = link if needs.hidden else None
        tokens = hidden_states
        if self._slices:
            assert self.tp_group is not None
            inner, (tokens,) = split_linked(inner, (tokens,), (True,), self.tp_group)
        rows = gather_rows(tokens, plan.token_of_row, plan.rows_by_token, plan.token_ends)
        if self.ep_size > 1:
            assert self.ep_group is not None
            sizes = plan.send_sizes, plan.receive_sizes
            inner, (rows,) = exchange_linked(inner, (rows,), (True,), self.ep_group, *sizes)
        ticket = Ticket(
            plan=plan,
            needs=needs,
            link=link if inner is None else inner,
            dtype=hidden_states.dtype,
            width=hidden_states.shape[1],
        )
        received = ReceivedRows(rows, plan.row_of_slot, plan.weights, plan.expert_ids, plan.offsets)
        return received, ticket

    def run_on(self, received: ReceivedRows) -> Tensor:
        """This rank's experts on the received rows: [R, H], the weighted sum over each row's slots."""
        grouped = getattr(self.experts_forward, "grouped", None)
        if grouped is not None:
            out: Tensor = grouped(
                received.rows, received.row_of_slot, received.weights, received.offsets
            )
            return out
        ids, weights = received.expert_ids[:, None], received.weights[:, None]
        return received.sum(self.run_experts(received.by_expert(), ids, weights))

    def combine(self, rows: Tensor, ticket: Ticket) -> Tensor:
        """Bring the experts' outputs back and sum them per token.

        Args:
            rows: [R, H], the output for each received row, in the same order: the sum over its slots,
                multiplied by their routing weights already. It is cast to the hidden states' dtype.
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
                f"{list(rows.shape)}; outputs of slots are summed per row first (`ReceivedRows.sum`)."
            )
        rows = rows.to(ticket.dtype)
        if self.ep_size > 1:
            assert self.ep_group is not None
            sizes = plan.receive_sizes, plan.send_sizes
            link, needs = ticket.link, (ticket.needs.rows,)
            _, (rows,) = exchange_linked(link, (rows,), needs, self.ep_group, *sizes)
        output = sum_rows(rows, plan.token_of_row, plan.rows_by_token, plan.token_ends)
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

    def _route(
        self, top_k_index: Tensor, top_k_weights: Tensor, hidden_states: Tensor | None
    ) -> tuple[Routing, Tensor, Tensor]:
        """Order rows and slots, tell the other ranks how many come, and reach the verdict.

        Returns:
            the routing, but for `row_of_slot`; [P, E/P + 1] of the slots and rows that arrive; for each
            slot sent, its row, counted from the first of its owner.
        """
        first, last = self._slice(top_k_index.shape[0])
        notice = self._notice(top_k_weights, hidden_states)
        with torch.no_grad():
            order = SendOrder.of(top_k_index[first:last], self.num_experts, self.ep_size)
            counts, leaving, arriving, notices = self._exchange_counts(order, notice)
            if notices[self.ep_rank].bad_ids:
                raise ValueError(checks.ids_problem(top_k_index, self.num_experts))
            needs = agree(notices)
            send, receive = (tuple(row[-1] for row in table) for table in (leaving, arriving))
            slots_sent, slots_received = (
                tuple(sum(row[:-1]) for row in table) for table in (leaving, arriving)
            )
            arrival, expert_ids, offsets = expert_major_order(counts[:, :-1], sum(slots_received))
        routing = Routing(
            num_tokens=top_k_index.shape[0],
            first=first,
            last=last,
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
            expert_ids=expert_ids,
            offsets=offsets,
            rows_per_expert=tuple(map(sum, zip(*(row[:-1] for row in arriving), strict=True))),
            needs=needs,
        )
        return routing, counts, order.row_of_slot[: sum(slots_sent)]

    def _exchange_counts(
        self, order: SendOrder, notice: Notice
    ) -> tuple[Tensor, list[list[int]], list[list[int]], list[Notice]]:
        """Tell every rank how many slots come for each of its experts, how many rows, and the notice.

        Returns:
            [P, E/P + 1] of the slots and rows that arrive, on the device; those that leave and those
            that arrive, known to the host; the notices of all ranks.
        """
        counted = self.num_local_experts + 1
        table = order.counts.new_empty((self.ep_size, counted + Notice.LENGTH))
        table[:, : counted - 1] = order.counts.view(self.ep_size, -1)
        table[:, counted - 1] = order.rows_per_owner
        table[:, counted:] = table.new_tensor(notice.encode())
        table[:, -1] = order.invalid
        arrived = table
        if self.ep_group is not None and self.ep_size > 1:
            ones = [1] * self.ep_size
            arrived = _all_to_all(table, self.ep_group, ones, ones)
        sent, received = torch.stack([table, arrived]).tolist()  # the one host synchronization
        notices = [Notice.decode(row[counted:]) for row in received]
        leaving, arriving = ([row[:counted] for row in rows] for rows in (sent, received))
        return arrived[:, :counted], leaving, arriving, notices

    def _exchange_slots(
        self, routing: Routing, top_k_weights: Tensor, *others: Tensor
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Bring each slot's weight, and what else there is of it, to its owner, in one exchange.

        Returns:
            the link, if one goes on from here; the weights [S] and the others [S], as they arrive.
        """
        link = None
        if self.ep_size > 1 and routing.needs is not None and routing.needs.weights:
            link = new_link(top_k_weights.device)
        weights = top_k_weights
        if self._slices:
            assert self.tp_group is not None
            link, (weights,) = split_linked(link, (weights,), (True,), self.tp_group)
        tensors = [weights.reshape(-1)[routing.slots], *others]
        if self.ep_size == 1:
            return None, tensors
        assert self.ep_group is not None
        sizes = routing.slots_sent, routing.slots_received
        needs = [x.is_floating_point() for x in tensors]
        return exchange_linked(link, tensors, needs, self.ep_group, *sizes, packed=True)

    def _refuse(self, top_k_index: object, problem: str) -> NoReturn:
        """Raise, and let the other ranks of the group raise too."""
        if self.ep_size > 1:
            device = top_k_index.device if isinstance(top_k_index, Tensor) else None
            nothing = torch.empty((0, 1), dtype=torch.int64, device=device)
            order = SendOrder.of(nothing, self.num_experts, self.ep_size)
            self._exchange_counts(order, Notice(refused=True))
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
