"""Routing for a step whose router decides nothing: the ids are drawn, and ranks that are not there told of.

[Note: integers are real]
How many rows reach a rank depends on data. So the expert ids of a simulated step are real tensors, drawn
by a routing model, and all that orders rows by them (`RoutedImplementation._route`) runs for real; what the
other ranks would send of their counts is computed from their ids, which are drawn alike. Rows, weights
and everything that only has a size stay fake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatch.all_reduce
import ep_dispatch.routed
import ep_dispatch.stage
import ep_kernels.module
from ep_dispatch import EPImplementation
from ep_dispatch.agreement import Notice
from ep_dispatch.collectives import chunk_bounds
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
        """Besides, integers are real though tensors are fake, and other ranks' counts arrive."""
        routed = ep_dispatch.routed.RoutedImplementation
        route, most = routed._route, routed._most_rows
        asked: list[tuple[Any, int, int, int]] = []

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
            asked.append((this, num_chunks, index.shape[0], index.shape[1]))
            try:
                with unset_fake_temporarily():
                    return route(this, problem, num_chunks, index, *rest, **kwargs)
            finally:
                asked.pop()

        def exchanged(table: Tensor, group: Any, send: list[int], receive: list[int]) -> Tensor:
            dist.all_to_all_single(torch.empty_like(table), table, receive, send, group=group)
            with self.paused():
                return self._arriving(table, *asked[-1])

        with ExitStack() as stack:
            stack.enter_context(self.chosen())
            for owner, name, function in (
                (routed, "_route", routing),
                (routed, "_most_rows", really(most)),
                (ep_dispatch.stage, "_all_to_all", exchanged),
                (ep_dispatch.stage, "on_host", on_host),
                (ep_dispatch.routed, "on_host", on_host),
                (
                    ep_dispatch.all_reduce,
                    "local_routes",
                    really(local_routes),
                ),
                (ep_kernels.module, "sorted_slots", really(ep_kernels.module.sorted_slots)),
            ):
                stack.enter_context(mock.patch.object(owner, name, function))
            yield

    def _arriving(
        self, table: Tensor, this: EPImplementation, chunks: int, tokens: int, slots: int
    ) -> Tensor:
        """What the other ranks of the group would have put into their tables for this one."""
        experts, ranks = this.num_experts, this.ep_size
        group = self.layout.group("ep", self.rank)
        stage = Stage(this.ep_group, experts)
        each = experts // ranks + 3
        arrived = table.clone()
        told = [int(x) for x in table[0, chunks * each :]]
        notice = Notice.decode(told[: Notice.LENGTH])
        ids_of: dict[int, Tensor] = {}
        for place, rank in enumerate(group):
            if place == this.ep_rank:
                continue
            batch = self.layout.batch_of(rank)
            if batch not in ids_of:
                ids_of[batch] = self.ids(this.layer or "", rank, tokens, slots, experts)
            ids = ids_of[batch]
            first, last = 0, tokens
            if this._slices:
                first, last = chunk_bounds(tokens, this.tp_size, self.layout.coordinate("tp", rank))
            ends = [first + (last - first) * end // chunks for end in range(chunks + 1)]
            for chunk in range(chunks):
                part = ids[ends[chunk] : ends[chunk + 1]]
                order = stage.order(torch.arange(len(part))[:, None], part, len(part))
                columns = arrived[place, chunk * each : (chunk + 1) * each]
                columns[:-3] = order.counts.view(ranks, -1)[this.ep_rank]
                columns[-3] = order.rows_per_owner[this.ep_rank]
            own = this.sequence_parallel
            first_of_batch = place if own else place - self.layout.coordinate("tp", rank)
            known = replace(notice, rank=place, batch=first_of_batch)
            arrived[place, chunks * each :] = torch.tensor(known.encode())
        return arrived


__all__: Sequence[str] = ["Routes"]
