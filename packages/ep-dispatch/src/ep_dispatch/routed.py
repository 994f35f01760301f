"""Where each row of a call goes, settled by all ranks before any row moves.

T = tokens of this rank, K = experts per token, E = experts of a layer, P = ranks of the EP group,
S = slots received.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks
from .agreement import Notice, agree
from .checkpointing import CheckpointMemory
from .host import on_device, on_host
from .implementation import EPImplementation, ExpertsForward
from .links import exchange_linked, new_link
from .plan import ChunkedRouting, Hop, Routing, SlotHop
from .stage import Stage, complete

__all__ = ["RoutedImplementation"]


class RoutedImplementation(EPImplementation):
    """The part of `AllToAll` that plans: it orders a call's rows, and tells the ranks what comes.

    Args:
        experts_forward: see `EPImplementation`.
        num_chunks, max_rows: see `AllToAll`.
        settings: see `EPImplementation`.
    """

    def __init__(
        self,
        experts_forward: ExpertsForward,
        *,
        num_chunks: int | Literal["auto"] = 1,
        max_rows: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(experts_forward, **settings)
        if num_chunks != "auto" and (type(num_chunks) is not int or num_chunks < 1):
            raise ValueError(
                'num_chunks must be "auto" or an int of at least 1, the same on all ranks, got '
                f"{num_chunks!r}."
            )
        if max_rows is not None and (type(max_rows) is not int or max_rows < self.ep_size):
            raise ValueError(
                "max_rows must be None or an int of at least ep_size, since each rank of the EP group may "
                f"send a row at one time, got max_rows={max_rows!r} with ep_size={self.ep_size}."
            )
        self.num_chunks = num_chunks
        self._most_chunks = self._auto_chunks() if num_chunks == "auto" else num_chunks
        self.max_rows = max_rows
        self._warned = False
        self.stages = self._make_stages()
        self._memory = CheckpointMemory[ChunkedRouting]()

    def _make_stages(self) -> Sequence[Stage]:
        """The exchanges on the way to the experts."""
        return [Stage(self.ep_group, self.num_experts)]

    def _auto_chunks(self) -> int:
        """How many chunks "auto" is in training. In inference, where calls are small, it is 1.

        Only what all ranks know alike may decide. With NCCL exchanges run beside the experts: two chunks
        hide half of them, and each further one hides less and makes the experts' products smaller. With
        gloo they would run on the cores that the experts run on.
        """
        if self.ep_group is None or self.ep_size == 1:
            return 1
        return 2 if dist.get_backend(self.ep_group) == "nccl" else 1

    def _prepare(
        self,
        num_chunks: int,
        max_rows: int | None,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        hidden_states: Tensor | None,
    ) -> tuple[ChunkedRouting, list[Tensor], Tensor | None]:
        """As `prepare`, for chunks of this rank's slice: the routing, the weights of each, the link.

        The counts of all chunks travel together, and so do the facts of their slots.
        """
        routing = self._memory.recall()
        if routing is not None:
            link, weights, _ = self._send_weights(routing, top_k_weights)
            return routing, weights, link
        problem = (
            checks.routing_problem(top_k_index, top_k_weights)
            if hidden_states is None
            else checks.inputs_problem(hidden_states, top_k_index, top_k_weights)
        )
        inputs = top_k_index, top_k_weights, hidden_states
        routing, rows = self._route(problem, num_chunks, *inputs)
        if max_rows is not None:
            rank, most = self._most_rows(routing)
            if most > max_rows:
                # All ranks know these numbers, so all reach the same number of rounds.
                rounds = min(-(-most // max_rows), routing.longest)
                routing, rows = self._route(problem, rounds, *inputs, rounds=True)
                while rounds < routing.longest and self._most_rows(routing)[1] > max_rows:
                    rounds = min(2 * rounds, routing.longest)
                    routing, rows = self._route(problem, rounds, *inputs, rounds=True)
                self._warn_of_rounds(rank, most, rounds)
        link, weights, rows = self._send_weights(routing, top_k_weights, rows)
        with torch.no_grad():
            last = complete([chunk.hops[-1] for chunk in routing.chunks], rows)
        chunks = tuple(
            replace(chunk, hops=(*chunk.hops[:-1], hop))
            for chunk, hop in zip(routing.chunks, last, strict=True)
        )
        routing = replace(routing, chunks=chunks)
        self._memory.remember(routing)
        return routing, weights, link

    def _route(
        self,
        problem: str | None,
        num_chunks: int,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        hidden_states: Tensor | None,
        *,
        rounds: bool = False,
    ) -> tuple[ChunkedRouting, Tensor]:
        """Order rows and slots, tell the other ranks how many come, and reach the verdict.

        A rank that refuses takes part with nothing to send, so that all ranks hear of it. All hear the
        notices of all, and raise at the end.

        Returns:
            the routing, whose last hops lack `row_of_slot`; for each slot sent there its row, counted
            from the first of its owner.
        """
        if problem is not None and self.ep_size == 1:
            raise ValueError(problem)
        if problem is None:
            first, last = self._slice(top_k_index.shape[0])
            known = [self._notice(top_k_weights, hidden_states)]
            ids = top_k_index[first:last]
        else:
            first = last = 0
            known = [Notice(rank=self.ep_rank, refused=True)]
            ids = torch.empty((0, 1), dtype=torch.int64, device=self._device())
        # All ranks' grad modes are the same only once they are agreed upon, so the table has room for
        # all chunks in any.
        auto = self.num_chunks == "auto" and not rounds
        used = 1 if auto and not torch.is_grad_enabled() else num_chunks
        ends = [(last - first) * min(end, used) // used for end in range(num_chunks + 1)]
        bounds = list(pairwise(ends))
        hops: list[list[Hop]] = []
        ways: list[SlotHop] = []
        with torch.no_grad():
            parts = [
                (torch.arange(len(part), device=ids.device)[:, None], part, len(part))
                for part in ids.split([end - start for start, end in bounds])
            ]
            for stage in self.stages:
                orders = [stage.order(*part) for part in parts]
                with self.phase("counts"):
                    counted = stage.count(orders, known)
                known = counted[0].notices
                made, way, rows = stage.hops(
                    orders, counted, [part.numel() for _, part, _ in parts]
                )
                if stage is not self.stages[-1]:
                    if stage.size > 1:
                        (rows,) = stage.slot_exchange(way, self.phase("slots")).there([rows])
                    made = complete(made, rows[way.arrival])
                    parts = [(hop.row_of_slot, hop.expert_ids, hop.num_rows) for hop in made]
                hops.append(made)
                ways.append(way)
        if problem is not None:
            raise ValueError(problem)
        if any(notice.bad_ids for notice in known if notice.rank == self.ep_rank):
            raise ValueError(checks.ids_problem(top_k_index, self.num_experts))
        needs, tokens = agree(known), top_k_index.shape[0]
        chunks = [
            Routing(tokens, first + start, first + end, tuple(made), needs)
            for (start, end), *made in zip(bounds, *hops, strict=True)
        ]
        longest = max(notice.tokens for notice in known)
        if self._slices:
            longest = -(-longest // self.tp_size)
        return ChunkedRouting(tuple(chunks[:used]), tuple(ways), longest, rounds), rows

    def _most_rows(self, routing: ChunkedRouting) -> tuple[int, int]:
        """The rank of the EP group that gets most rows at one time, and how many. Cost: an all-reduce."""
        hops = zip(*(chunk.hops for chunk in routing.chunks), strict=True)
        at_once = max if routing.rounds else sum
        rows = max(at_once([hop.num_rows for hop in of_stage]) for of_stage in hops)
        if self.ep_group is None or self.ep_size == 1:
            return self.ep_rank, rows
        device = routing.slots[-1].arrival.device
        most = on_device([rows * self.ep_size + self.ep_rank], device)
        with self.phase("counts"):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.ep_group)
            rows, rank = divmod(on_host(most)[0], self.ep_size)
        return rank, rows

    @contextmanager
    def _rows_told(self, chunks: Sequence[Routing]) -> Iterator[None]:
        """If memory ends in here, the error gets a note of the rows that came, which a router may pile up."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            came, slots = sum(c.num_rows for c in chunks), sum(c.num_slots for c in chunks)
            sent = sum(sum(c.hops[0].send_sizes) for c in chunks)
            error.add_note(
                f"layer {self.layer or '(not named)'}: {came} rows for {slots} slots came to rank "
                f"{self.ep_rank} of the EP group, which sent {sent} rows itself. Balanced routing makes "
                "them about as many. If far more came, bound the rows that are on a rank at one time "
                "(max_rows), or balance the router."
            )
            raise

    def _warn_of_rounds(self, rank: int, rows: int, rounds: int) -> None:
        """Tell of imbalance, once for an object; on all ranks, where a warning may be an error."""
        if self._warned:
            return
        self._warned = True
        layer = "an MoE layer" if self.layer is None else self.layer
        warnings.warn(
            f"{layer}: {rows} rows would reach rank {rank} of the EP group at one time, more than "
            f"max_rows={self.max_rows}, so this call runs in {rounds} rounds. The result is the same, "
            "and slower; balance the router, or raise max_rows. Not told again for this layer.",
            stacklevel=2,
        )

    def _send_weights(
        self, routing: ChunkedRouting, top_k_weights: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor | None, list[Tensor], Tensor]:
        """Bring each slot's weight to its owner, and with it the slot's row.

        Returns:
            the link, if one goes on from here; the weights [S] of each chunk by expert; the rows of the
            slots of all chunks, by chunk and expert.
        """
        link = None
        if self.ep_size > 1 and routing.needs is not None and routing.needs.weights:
            link = new_link(top_k_weights.device)
        link, weights = self._split(link, top_k_weights, True, "slots")
        weights = weights.reshape(-1)
        arrived = top_k_weights if rows is None else rows
        for stage, hop in zip(self.stages, routing.slots, strict=True):
            tensors = [weights[hop.slots]]
            if rows is not None and hop is routing.slots[-1]:
                tensors.append(rows)
            if stage.size > 1:
                needs = [x.is_floating_point() for x in tensors]
                exchange = stage.slot_exchange(hop, self.phase("slots"))
                link, tensors = exchange_linked(link, tensors, needs, exchange)
            weights, *others = (x[hop.arrival] for x in tensors)
            arrived = others[0] if others else arrived
        sizes = [chunk.num_slots for chunk in routing.chunks]
        return link, list(weights.split(sizes)) if len(sizes) > 1 else [weights], arrived
