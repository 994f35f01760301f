"""Routing for a step whose router decides nothing: the ids are drawn, and ranks that are not there told of.

[Note: integers are real]
How many rows reach a rank depends on data. So the expert ids of a simulated step are real tensors, drawn
by a routing model, and all that orders rows by them (`RoutedImplementation._route`) runs for real; what the
other ranks would send of their counts, and on two hops of their rows, is computed from their ids, which
are drawn alike. Rows, weights and everything that only has a size stay fake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatch.all_reduce
import ep_dispatch.exchange
import ep_dispatch.routed
import ep_dispatch.stage
import ep_kernels.module
from ep_dispatch import EPImplementation
from ep_dispatch.agreement import Notice
from ep_dispatch.collectives import chunk_bounds, group_rank
from ep_dispatch.routing import local_routes
from ep_dispatch.stage import Stage
from ep_mesh import Layout

from ._compat import unset_fake_temporarily
from .routing import RoutingModel, draw_experts


@dataclass(frozen=True)
class Routes:
    """The expert ids of every layer and batch.

    Attributes:
        layout: of the ranks.
        rank: this one.
        routing: the model that draws.
        seed: of the simulation.
        paused: gives a context for what a run does not do.
        read: is called where the host reads numbers.
    """

    layout: Layout
    rank: int
    routing: RoutingModel
    seed: int
    paused: Callable[[], AbstractContextManager[None]] = nullcontext
    read: Callable[[], None] = lambda: None

    def ids(self, layer: str, rank: int, tokens: int, slots: int, experts: int) -> Tensor:
        """What the router of `rank` would choose in `layer`: [T, K] int64."""
        batch = self.layout.batch_of(rank)
        with self.paused(), unset_fake_temporarily():
            return draw_experts(
                self.routing, tokens, slots, experts, seed=self.seed, layer=layer, batch=batch
            )

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Every implementation of `ep_dispatch` gets the drawn ids in the place of its router's."""
        call = EPImplementation.__call__
        inside: list[EPImplementation] = []

        def chosen(
            this: EPImplementation, hidden: Tensor, index: Tensor, weights: Tensor, **kwargs: Any
        ) -> Tensor:
            if inside:  # `auto` calls another one
                return call(this, hidden, index, weights, **kwargs)
            layer = this.layer or ""
            ids = self.ids(layer, self.rank, index.shape[0], index.shape[1], this.num_experts)
            ids = ids.to(index.device, index.dtype)
            inside.append(this)
            try:
                return call(this, hidden, ids, weights, **kwargs)
            finally:
                inside.pop()

        with mock.patch.object(EPImplementation, "__call__", chosen):
            yield

    @contextmanager
    def told(self) -> Iterator[None]:
        """Besides, integers are real though tensors are fake, and what other ranks tell arrives."""
        routed = ep_dispatch.routed.RoutedImplementation
        slots = ep_dispatch.exchange.SlotExchange
        route, most, there = routed._route, routed._most_rows, slots.there
        asked: list[_Asked] = []

        def really(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with unset_fake_temporarily():
                    return function(*args, **kwargs)

            return run

        def on_host(x: Tensor) -> Any:
            self.read()
            return x.tolist()

        def routing(
            this: Any, problem: Any, num_chunks: int, index: Tensor, *rest: Any, **kwargs: Any
        ) -> Any:
            asked.append(_Asked(this, num_chunks, *index.shape))
            try:
                with unset_fake_temporarily():
                    return route(this, problem, num_chunks, index, *rest, **kwargs)
            finally:
                asked.pop()

        def exchanged(table: Tensor, group: Any, send: list[int], receive: list[int]) -> Tensor:
            dist.all_to_all_single(torch.empty_like(table), table, receive, send, group=group)
            with self.paused():
                return self._counts(asked[-1], group, table)

        def rows_exchanged(exchange: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
            arrived = there(exchange, tensors)
            if not asked:
                return arrived
            with self.paused():
                return [self._rows(asked[-1])]

        with ExitStack() as stack:
            stack.enter_context(self.chosen())
            for owner, name, function in (
                (routed, "_route", routing),
                (routed, "_most_rows", really(most)),
                (slots, "there", rows_exchanged),
                (ep_dispatch.stage, "_all_to_all", exchanged),
                (ep_dispatch.stage, "on_host", on_host),
                (ep_dispatch.routed, "on_host", on_host),
                (ep_dispatch.all_reduce, "local_routes", really(local_routes)),
                (ep_kernels.module, "sorted_slots", really(ep_kernels.module.sorted_slots)),
            ):
                stack.enter_context(mock.patch.object(owner, name, function))
            yield

    def _counts(self, asked: _Asked, group: dist.ProcessGroup, table: Tensor) -> Tensor:
        """What the ranks of an exchange would have put into their tables for this one.

        What a rank sends on inside a node are the rows that came to it from its place in each node: of
        each of them those for this rank, as if it had sent them here itself.
        """
        this, chunks = asked.this, asked.chunks
        first = this.stages[0].group is group
        stage = this.stages[0] if first else Stage(this.ep_group, this.num_experts)
        own, each = group_rank(stage.group), stage.experts // stage.size + 3
        arrived = table.clone()
        told = [int(x) for x in table[0, chunks * each :]]
        notice = Notice.decode(told[: Notice.LENGTH])
        ranks = self._ranks(this)
        for place, rank in enumerate(dist.get_process_group_ranks(group)):
            if rank == self.rank:
                continue
            sources = [rank]
            if not first:
                local = this.stages[1].size
                sources = ranks[ranks.index(rank) % local :: local]
            notices = []
            arrived[place, : chunks * each].view(chunks, each)[:, :-2] = 0
            for source in sources:
                for chunk, part in enumerate(self._parts(asked, source)):
                    order = stage.order(torch.arange(len(part))[:, None], part, len(part))
                    columns = arrived[place, chunk * each : (chunk + 1) * each]
                    columns[:-3] += order.counts.view(stage.size, -1)[own]
                    columns[-3] += order.rows_per_owner[own]
                at = ranks.index(source)
                alone = this.sequence_parallel
                batch = at if alone else at - self.layout.coordinate("tp", source)
                notices += replace(notice, rank=at, batch=batch).encode()
            arrived[place, chunks * each :] = torch.tensor(notices)
        return arrived

    def _rows(self, asked: _Asked) -> Tensor:
        """For each slot that comes to this node, its row, counted from the first of its source."""
        stage = asked.this.stages[0]
        own, found = group_rank(stage.group), []
        for rank in dist.get_process_group_ranks(stage.group):
            for part in self._parts(asked, rank):
                order = stage.order(torch.arange(len(part))[:, None], part, len(part))
                sent = order.sent(part.numel(), int(order.rows_per_owner.sum()))
                ends = order.counts.view(stage.size, -1).sum(1).cumsum(0).tolist()
                found.append(sent.row_of_slot[ends[own - 1] if own else 0 : ends[own]])
        return torch.cat(found)

    def _parts(self, asked: _Asked, rank: int) -> list[Tensor]:
        """The expert ids of the tokens that a rank sends in each chunk."""
        this, tokens, chunks = asked.this, asked.tokens, asked.chunks
        batch = self.layout.batch_of(rank)
        if batch not in asked.ids:
            asked.ids[batch] = self.ids(
                this.layer or "", rank, tokens, asked.slots, this.num_experts
            )
        first, last = 0, tokens
        if this._slices:
            first, last = chunk_bounds(tokens, this.tp_size, self.layout.coordinate("tp", rank))
        ends = [first + (last - first) * end // chunks for end in range(chunks + 1)]
        return [asked.ids[batch][start:end] for start, end in pairwise(ends)]

    def _ranks(self, this: EPImplementation) -> list[int]:
        assert this.ep_group is not None
        return dist.get_process_group_ranks(this.ep_group)


@dataclass(frozen=True)
class _Asked:
    """A call whose routes are being settled.

    Attributes:
        this: the implementation.
        chunks: into which its tokens are cut.
        tokens, slots: T and K.
        ids: of each batch, as far as they were drawn.
    """

    this: Any
    chunks: int
    tokens: int
    slots: int
    ids: dict[int, Tensor] = field(default_factory=dict)


__all__: Sequence[str] = ["Routes"]
