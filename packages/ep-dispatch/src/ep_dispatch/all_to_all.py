"""`all_to_all`: only routed tokens move, each once to a rank that holds any of its experts, and back.

T = tokens of this rank, H = hidden size, K = experts per token, E = experts of a layer, P = ranks of
the EP group, N = rows sent, R = rows received, S = slots received.

    hidden [T, H] -slice 1/tp-> -copy per owner rank-> [N, H] -all-to-all-> [R, H] by source
        -experts over S slots, sum over a row's slots-> [R, H] -all-to-all-> [N, H]
        -sum over a token's rows-> -gather over tp-> [T, H]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .agreement import Notice
from .compiling import as_written
from .implementation import ExpertsForward, add_shared
from .journey import Journey, Legs
from .keeping import keep_value
from .links import GradNeeds, hold_linked, join_parameters, new_link
from .pending import Pending
from .plan import ChunkedRouting, DispatchPlan, ReceivedRows, Routing, Ticket
from .routed import RoutedImplementation
from .rows import gather_rows, sum_rows
from .wire import WIRE_DTYPES, sums_dtype

__all__ = ["AllToAll"]


class AllToAll(RoutedImplementation):
    """Only routed tokens move: all-to-all there, local experts, all-to-all back, sum.

    A token crosses once to each rank that holds any of its experts (of 8 in 128 experts over 8 ranks:
    5.3 rows, not 8), with a row index and a weight for each slot. There its experts' weighted outputs are
    summed, and one row comes back.

    Fits every layout. The ranks of a TP group hold the same tokens, so each sends its own `1/tp`
    slice of them (uneven or empty), and the outputs are gathered over TP.

    Inside `torch.utils.checkpoint.checkpoint(use_reentrant=False)` the routing of the forward is kept
    (integers) and used again in the recomputation: a near tie that the recomputed router decides in
    another way changes no shape, and the counts travel once. (A region inside another one is routed anew
    when the outer one is recomputed.) Nothing else of a call is kept on the object: several may be in
    flight.

    If `experts_forward` has a method `grouped(rows [R, H], row_of_slot [S], weights [S], offsets [E/P])
    -> [R, H]`, it is called with each row once; else with a copy of the row per slot.

    Args:
        experts_forward: see `EPImplementation`.
        wire_dtype: what rows are cast to while they travel, if that is narrower: bfloat16, float16, or
            float8_e4m3fn with a scale per row (then partial sums travel in bfloat16). Gradients travel in
            bfloat16, for its range.
            None: the hidden states' dtype. The same on all ranks.
        settings: see `EPImplementation`; and `num_chunks` and `max_rows`.

    `num_chunks` (1): into how many contiguous parts a call's tokens are cut, so that one's rows travel
    while the experts run on another's. The output is the same. Worth it where exchanges run beside the
    experts, on a GPU, and take as long; each chunk has exchanges and calls of the experts of its own.
    "auto": 2 in training with NCCL, else 1. The same on all ranks, however many tokens each has.

    `max_rows` (None: no bound): how many rows may be on a rank at one time, at least P. If more would
    come, on any rank, a call's tokens go in rounds, one after the other: slower, not out of memory, and
    the same result. With gradients a round's dispatch and experts run again in backward. The same on all
    ranks.

    Cost of a forward: one all-to-all of `E/P + 11` integers a rank pair and one host synchronization to
    read them; one of an integer and a weight per slot; one of rows there and one back; one all-gather
    over TP. Backward: the same for the gradients that any rank of the group needs. Saved for backward:
    integer indices. With `max_rows` one all-reduce of an integer and its host synchronization; if it is
    exceeded, counts and an all-reduce for each number of rounds that is tried. Under torch.compile: one
    break of the graph, and nothing compiled anew for new sizes.
    """

    def __init__(
        self,
        experts_forward: ExpertsForward,
        *,
        wire_dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(experts_forward, **settings)
        if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
            raise ValueError(
                f"wire_dtype must be None or one of {', '.join(map(str, WIRE_DTYPES))}, got "
                f"{wire_dtype!r}."
            )
        self.wire_dtype = wire_dtype

    @as_written
    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        shared_experts: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Dispatch, run the experts, combine."""
        shared: list[Tensor] = []

        def meanwhile() -> None:
            if shared_experts is not None:
                shared.append(shared_experts(hidden_states))

        if self._most_chunks == 1 and self.max_rows is None:
            # Through the public phases, so that those of a subclass are asked.
            plan = self.prepare(top_k_index, top_k_weights, hidden_states=hidden_states)
            with self._rows_told([plan]):
                if shared_experts is None:
                    received, ticket = self.dispatch(hidden_states, plan)
                else:
                    there = self.start_dispatch(hidden_states, plan)
                    meanwhile()
                    received, ticket = there.wait()
                rows = join_parameters(self.run_on(received), self._idle_parameters(plan))
                output = self.combine(rows, ticket)
        else:
            output = self._run(hidden_states, top_k_index, top_k_weights, meanwhile)
        return add_shared(output, *shared) if shared else output

    def _run(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        meanwhile: Callable[[], None],
    ) -> Tensor:
        """As `forward`, in chunks or rounds; `meanwhile` is called while the first rows travel."""
        routing, weights, link = self._prepare(
            self._most_chunks, self.max_rows, top_k_index, top_k_weights, hidden_states
        )
        needs = _needs_now(routing)
        link = self._begin(link, needs, hidden_states.device)
        link, rows = self._split(link, hidden_states, needs.hidden, "dispatch")
        parts = rows.split([chunk.last - chunk.first for chunk in routing.chunks])
        run = self._run_rounds if routing.rounds else self._run_chunks
        with self._rows_told(routing.chunks):
            _, outputs = run(routing.chunks, parts, weights, needs, link, meanwhile)
        return self._gather(torch.cat(outputs), routing.num_tokens)

    def _run_chunks(
        self,
        chunks: Sequence[Routing],
        parts: Sequence[Tensor],
        weights: Sequence[Tensor],
        needs: GradNeeds,
        link: Tensor | None,
        meanwhile: Callable[[], None] | None = None,
        *,
        keep: bool = True,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """While the experts run on a chunk, the next one travels, and the outputs of the one before.

        Start and wait come in this order on all ranks, and backward in the reverse one:

            there 0 | wait there 0 | there 1 | experts 0 | back 0
                    | wait there 1 | there 2 | experts 1 | back 1 | wait back 0
                    | wait there 2 | ...
        """
        there = [
            Journey(self._there(part, chunk, keep=keep), linked=link is not None and needs.hidden)
            for part, chunk in zip(parts, chunks, strict=True)
        ]
        back: list[Journey] = []
        outputs: list[Tensor] = []
        link = there[0].start(link)
        if meanwhile is not None:
            meanwhile()
        for number, chunk in enumerate(chunks):
            link, arrived = there[number].finish(link)
            if number + 1 < len(chunks):
                link = there[number + 1].start(link)
            rows = self.run_on(chunk.received(arrived, weights[number]))
            # Here, so that the way to an idle parameter leads through the exchanges on every rank.
            rows = join_parameters(rows, self._idle_parameters(chunk))
            del arrived
            rows = _checked(rows, chunk, parts[number].shape[1]).to(parts[number].dtype)
            back.append(Journey(self._back(rows, chunk), linked=link is not None))
            link = back[number].start(link)
            if number:
                link, done = back[number - 1].finish(link)
                outputs.append(done)
        link, done = back[-1].finish(link)
        return link, [*outputs, done]

    def _run_rounds(
        self,
        chunks: Sequence[Routing],
        parts: Sequence[Tensor],
        weights: Sequence[Tensor],
        needs: GradNeeds,
        link: Tensor | None,
        meanwhile: Callable[[], None],
    ) -> tuple[Tensor | None, list[Tensor]]:
        """One chunk after the other; what one received is gone before the next begins.

        With gradients, a round runs again in backward, when all rounds behind it are done there.
        """

        def run(
            chunk: Routing, rows: Tensor, weights: Tensor, link: Tensor | None
        ) -> tuple[Tensor | None, Tensor]:
            # Kept rows would be those of all rounds at one time.
            link, [out] = self._run_chunks([chunk], [rows], [weights], needs, link, keep=False)
            return hold_linked(link, out)

        meanwhile()
        outputs: list[Tensor] = []
        for chunk, rows, held in zip(chunks, parts, weights, strict=True):
            if torch.is_grad_enabled():
                link, out = checkpoint(run, chunk, rows, held, link, use_reentrant=False)
            else:
                link, out = run(chunk, rows, held, link)
            outputs.append(out)
        return link, outputs

    @as_written
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

        Cost: one all-to-all of `E/P + 11` integers a rank pair, one host synchronization, one all-to-all
        of an integer and a weight per slot. In backward one of the weights' gradients, and one
        all-gather over TP, if any rank needs them.
        """
        chunked, weights, link = self._prepare(1, None, top_k_index, top_k_weights, hidden_states)
        return DispatchPlan(**vars(chunked.chunks[0]), weights=weights[0], link=link)

    @as_written
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
        return self.start_dispatch(hidden_states, plan).wait()

    @as_written
    def start_dispatch(
        self, hidden_states: Tensor, plan: DispatchPlan
    ) -> Pending[tuple[ReceivedRows, Ticket]]:
        """As `dispatch`, but come back while the rows travel.

        In backward the gradient of the rows travels while autograd runs what was called between this and
        `wait`. Calls come in the same order on all ranks. With several hops (`all_to_all_hierarchical`)
        this starts the first, and `wait` runs the others.

        Returns:
            what gives, when it is waited for, what `dispatch` gives.

        Raises:
            ValueError: as `dispatch`.

        Cost: that of `dispatch`. The rows sent stay in memory until `wait`.
        """
        if hidden_states.ndim != 2 or hidden_states.shape[0] != plan.num_tokens:
            raise ValueError(
                f"hidden_states must be [{plan.num_tokens}, H], one row for each token that the plan "
                f"was prepared for, got {list(hidden_states.shape)}."
            )
        needs = _needs_now(plan)
        link = self._begin(plan.link, needs, hidden_states.device)
        link, rows = self._split(link, hidden_states, needs.hidden, "dispatch")
        linked = link is not None and needs.hidden
        journey = Journey(self._there(rows, plan), linked=linked)
        link = journey.start(link)
        dtype, width = hidden_states.dtype, hidden_states.shape[1]

        def end() -> tuple[ReceivedRows, Ticket]:
            after, arrived = journey.finish(link)
            ticket = Ticket(plan=plan, needs=needs, link=after, dtype=dtype, width=width)
            return plan.received(arrived, plan.weights), ticket

        return Pending(end)

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

    @as_written
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
        return self.start_combine(rows, ticket).wait()

    @as_written
    def start_combine(self, rows: Tensor, ticket: Ticket) -> Pending[Tensor]:
        """As `combine`, but come back while the rows travel; `start_dispatch` tells the rest.

        `rows` must not be changed until `wait`, which also gathers over TP.
        """
        plan = ticket.plan
        rows = _checked(rows, plan, ticket.width).to(ticket.dtype)
        journey = Journey(self._back(rows, plan), linked=ticket.link is not None)
        link = journey.start(ticket.link)
        return Pending(lambda: self._gather(journey.finish(link)[1], plan.num_tokens))

    def _gather(self, rows: Tensor, num_tokens: int) -> Tensor:
        return super()._gather(rows, num_tokens) if self._slices else keep_value(rows)

    def _there(self, rows: Tensor, plan: Routing, *, keep: bool = True) -> Legs:
        """From this rank's tokens to the rows of its experts."""
        for stage, hop in zip(self.stages, plan.hops, strict=True):
            rows = gather_rows(rows, hop.token_of_row, hop.rows_by_token, hop.token_ends)
            if stage.size > 1:
                phase = self.phase("dispatch")
                rows = yield rows, stage.row_exchange(hop, self.wire_dtype, phase, keep=keep)
        return rows

    def _back(self, rows: Tensor, plan: Routing) -> Legs:
        """From the experts' outputs to the sums of this rank's tokens."""
        wire = sums_dtype(self.wire_dtype)
        for stage, hop in zip(reversed(self.stages), reversed(plan.hops), strict=True):
            if stage.size > 1:
                rows = yield rows, stage.row_exchange(hop, wire, self.phase("combine"), back=True)
            rows = sum_rows(rows, hop.token_of_row, hop.rows_by_token, hop.token_ends)
        return rows

    def _notice(self, top_k_weights: Tensor, hidden_states: Tensor | None) -> Notice:
        notice = super()._notice(top_k_weights, hidden_states)
        return replace(notice, wire=self.wire_dtype, bound=self.max_rows or 0)

    def _begin(self, link: Tensor | None, needs: GradNeeds, device: torch.device) -> Tensor | None:
        """The link that rows go on: that of their weights, or a new one; None if nothing goes back."""
        if not needs.rows or self.ep_size == 1:
            return None
        return new_link(device) if link is None else link

    def _idle_parameters(self, plan: Routing) -> list[nn.Parameter]:
        """The parameters that the experts' own forward may leave without a gradient in one call of it.

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


def _checked(rows: Tensor, plan: Routing, width: int) -> Tensor:
    if rows.shape != (plan.num_rows, width):
        raise ValueError(
            f"combine takes one row per received row, [{plan.num_rows}, {width}], got "
            f"{list(rows.shape)}; outputs of slots are summed per row first (`ReceivedRows.sum`)."
        )
    return rows


def _needs_now(plan: Routing | ChunkedRouting) -> GradNeeds:
    if not torch.is_grad_enabled():
        return GradNeeds()
    # Made with grad mode off (all ranks were), used with it on: assume that all are needed.
    return plan.needs or GradNeeds(hidden=True, weights=True, rows=True)
