"""Autograd nodes that keep the ranks of a group together in backward.

[Note: one order of collectives in backward]
A collective in backward runs only if autograd reaches its node, and autograd reaches a node only if
one of the node's inputs needs a gradient and one of its outputs was used. Neither is the same on all
ranks: hidden states may be frozen on one rank, and experts that get no row may give back a tensor that
has no history. A rank that leaves out a collective leaves the others waiting forever. So:

- which gradients travel (`GradNeeds`) is agreed by the whole group in forward, never read off a tensor;
- each exchange is one node, whatever number of tensors it moves, or two, so that their order is fixed;
- a scalar, the link, enters the first node (as a leaf that requires grad) and runs from node to node
  beside the rows up to the output. Each node therefore exists on every rank, is reached on every rank,
  and runs after all nodes behind it. The link's gradient is zero.

[Note: rows that travel while others work]
The exchange of rows is two nodes, Start and Wait. In backward Wait's node starts the way back, and
Start's waits for it, so nodes of the graph that lie between the two in forward run in between in backward
too: the link is reversed, and autograd takes what else is ready in the reverse order of its making.
The gradient on its way cannot be what Wait's node gives Start's, since a gradient has the shape of a
forward's output; the two nodes share a `Trip`, and between them runs the link alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import _all_gather, _all_reduce, _chunk
from .exchange import Flight, RowExchange, SlotExchange
from .keeping import kept
from .phase import Phase

__all__ = [
    "GradNeeds",
    "Trip",
    "exchange_linked",
    "hold_linked",
    "join_parameters",
    "new_link",
    "share_linked",
    "split_linked",
    "start_linked",
    "sum_linked",
    "wait_linked",
]


@dataclass(frozen=True)
class GradNeeds:
    """Which gradients travel back between the ranks of a group: the same on every rank of it.

    Attributes:
        hidden: of the hidden states, on any rank.
        weights: of the routing weights, on any rank.
        rows: of the experts' outputs: if any of the others or the experts need one.
    """

    hidden: bool = False
    weights: bool = False
    rows: bool = False


def new_link(device: torch.device) -> Tensor:
    """The start of a link: a leaf that requires grad. Nobody reads its value, or that of what follows."""
    return torch.empty((), device=device, requires_grad=True)


def split_linked(
    link: Tensor | None, x: Tensor, group: ProcessGroup, phase: Phase
) -> tuple[Tensor | None, Tensor]:
    """This rank's chunk of dimension 0 (`chunk_bounds`). Cost: one all-gather in backward."""
    if link is None:
        return None, _chunk(x, group, 0)
    link, chunk = _SplitLinked.apply(link, group, phase, x)
    assert chunk is not None
    return link, chunk


def exchange_linked(
    link: Tensor | None, tensors: Sequence[Tensor], needs: Sequence[bool], exchange: SlotExchange
) -> tuple[Tensor | None, list[Tensor]]:
    """What the other ranks sent of each tensor.

    Cost: the exchange, and the way back in backward for each tensor that `needs` a gradient.
    """
    if link is None:
        return None, exchange.there(tensors)
    link, *received = _ExchangeLinked.apply(link, exchange, tuple(needs), *tensors)
    return link, received


@dataclass
class Trip:
    """One exchange of rows, of which the two nodes share this.

    Attributes:
        exchange: what it is.
        there: the rows on their way.
        back: their gradient on its way, in backward.
    """

    exchange: RowExchange
    there: Flight | None = None
    back: Flight | None = None


def start_linked(
    link: Tensor | None, rows: Tensor, exchange: RowExchange
) -> tuple[Tensor | None, Trip]:
    """Send rows [N, H] off. `wait_linked` gives what came; between the two others may work.

    Cost: the exchange starts; in backward its way back is waited for.
    """
    trip = Trip(exchange)
    if link is None:
        trip.there = exchange.start(rows)
        return None, trip
    return _StartLinked.apply(link, rows, trip), trip


def wait_linked(link: Tensor | None, trip: Trip) -> tuple[Tensor | None, Tensor]:
    """The rows [R, H] of the exchange that `start_linked` started; in backward it starts the way back."""
    if link is None:
        return None, _landed(trip)
    link, rows = _WaitLinked.apply(link, trip)
    assert rows is not None
    return link, rows


def _landed(trip: Trip) -> Tensor:
    assert trip.there is not None
    flight, trip.there = trip.there, None
    return flight.wait()


def share_linked(
    link: Tensor | None,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    group: ProcessGroup,
    phase: Phase,
) -> tuple[Tensor | None, list[Tensor]]:
    """The tensors, which all ranks hold whole; their gradients are summed over the group.

    Cost: one all-reduce in backward for each tensor that `needs` a gradient.
    """
    if link is None:
        return None, list(tensors)
    link, *shared = _ShareLinked.apply(link, group, phase, tuple(needs), *tensors)
    return link, shared


def sum_linked(link: Tensor | None, partial: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of `partial` over the group; the gradient passes as it is. Cost: one all-reduce."""
    if link is None:
        return _all_reduce(partial, group)
    return _SumLinked.apply(link, partial, group)  # type: ignore[no-any-return]


def hold_linked(link: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor]:
    """The link, and `x`, behind which backward begins when all nodes before it on the link are done.

    At the end of a checkpointed region all ranks so recompute at the same point.
    """
    if link is None:
        return None, x
    link, x = _HoldLinked.apply(link, x)
    return link, x


def join_parameters(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """`x`, behind which each of `parameters` has a gradient of exactly zero.

    A product with zero would do as much, and give NaN where a parameter is not finite. It is a copy of
    `x`, not a view, so that a caller may change it in place.
    """
    if not parameters or not torch.is_grad_enabled():
        return x
    return _JoinParameters.apply(x, *parameters)  # type: ignore[no-any-return]


def _mark(ctx: Any, needs: Sequence[bool], outputs: Sequence[Tensor]) -> None:
    ctx.mark_non_differentiable(*(x for x, need in zip(outputs, needs, strict=True) if not need))
    ctx.set_materialize_grads(False)


def _filled(grad: Tensor | None, like: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad


def _facts(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device


class _SplitLinked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, link: Tensor, group: ProcessGroup, phase: Phase, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        chunk = _chunk(x, group, 0).clone()
        ctx.group, ctx.phase = group, phase
        ctx.facts, ctx.size = _facts(chunk), x.shape[0]
        ctx.set_materialize_grads(False)
        return torch.empty_like(link), chunk

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, grad: Tensor | None) -> tuple[Any, ...]:
        with ctx.phase.backward():
            whole = _all_gather(_filled(grad, ctx.facts), ctx.group, 0, ctx.size)
        return None, None, None, whole


class _ExchangeLinked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, link: Tensor, exchange: SlotExchange, needs: tuple[bool, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        received = exchange.there(tensors)
        ctx.exchange, ctx.needs = exchange, needs
        ctx.facts = [_facts(x) for x in received]
        _mark(ctx, needs, received)
        return torch.empty_like(link), *received

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        returned = [
            ctx.exchange.back(_filled(grad, facts)) if need else None
            for grad, facts, need in zip(grads, ctx.facts, ctx.needs, strict=True)
        ]
        return None, None, None, *returned


class _StartLinked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        ctx.set_materialize_grads(False)
        trip.there = trip.exchange.start(rows)
        return torch.empty_like(link)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, Tensor, None]:
        flight, ctx.trip.back = ctx.trip.back, None
        return None, flight.wait(), None


class _WaitLinked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, trip: Trip) -> tuple[Tensor, Tensor]:
        rows = _landed(trip)
        ctx.trip, ctx.facts = trip, _facts(rows)
        ctx.set_materialize_grads(False)
        return torch.empty_like(link), rows

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, grad: Tensor | None) -> tuple[None, None]:
        ctx.trip.back = ctx.trip.exchange.start_back(_filled(grad, ctx.facts))
        return None, None


class _ShareLinked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        link: Tensor,
        group: ProcessGroup,
        phase: Phase,
        needs: tuple[bool, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        shared = [x.view_as(x) for x in tensors]
        ctx.group, ctx.phase, ctx.needs = group, phase, needs
        ctx.facts = [_facts(x) for x in tensors]
        _mark(ctx, needs, shared)
        return torch.empty_like(link), *shared

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        with ctx.phase.backward():
            summed = [
                _all_reduce(_filled(grad, facts), ctx.group) if need else None
                for grad, facts, need in zip(grads, ctx.facts, ctx.needs, strict=True)
            ]
        return None, None, None, None, *summed


class _HoldLinked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(link)  # for its place, see `_SumLinked`
        return torch.empty_like(link), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[None, Tensor]:
        _ = ctx.saved_tensors
        return None, grad


class _SumLinked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, partial: Tensor, group: ProcessGroup) -> Tensor:
        # Saved for nothing but its place. Non-reentrant checkpointing recomputes when a saved tensor is
        # first asked for, and stops at the last one: with one here, which every rank asks for before
        # anything else of this layer, all ranks run the recomputation's collectives at the same point.
        ctx.save_for_backward(link)
        return kept(lambda: _all_reduce(partial, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        _ = ctx.saved_tensors
        return None, grad, None


class _JoinParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters  # for their shapes alone
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(p) for p in ctx.parameters)
