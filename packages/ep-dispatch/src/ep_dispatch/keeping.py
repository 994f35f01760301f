"""What came from other ranks, kept for the recomputation of activation checkpointing.

[Note: nothing is sent twice]
A region that is checkpointed with `context_fn=keep_communicated` has a tape. In its forward each
collective puts its result there; in its recomputation it takes it from there, in the same order, and
sends nothing. So the experts' inputs are kept, and what is behind them is computed again.
What comes back from the experts is an exception. `combine` adds up the rows of a token, five of them say,
and nothing on the way to the sum depends on their values in backward. So the sum is kept and the rows are
not: in the recomputation they are zeros, and the sum is put in the place of theirs.
Source of the idea: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
(2022), recompute what is cheap for its size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

__all__ = ["keep_communicated", "keep_value", "kept", "replays"]


class _Tape:
    """The results of one region, in the order of its forward.

    Attributes:
        results: each with the number of changes in place that it had seen when it was kept.
        place: in a recomputation the next one to take; None in the forward.
    """

    def __init__(self) -> None:
        self.results: list[tuple[Tensor, int]] = []
        self.place: int | None = None

    def put(self, result: Tensor) -> None:
        self.results.append((result.detach(), result._version))

    def take(self) -> Tensor:
        assert self.place is not None
        if self.place == len(self.results):
            raise RuntimeError(
                "the recomputation of a checkpointed region asks for more results of collectives than its "
                f"forward had ({self.place}): the region does not run alike both times."
            )
        result, changes = self.results[self.place]
        self.place += 1
        if result._version != changes:
            raise RuntimeError(
                "rows that came from other ranks were changed in place, and a checkpointed region keeps "
                "them for its recomputation: let the experts copy them, or checkpoint without "
                "keep_communicated (selective)."
            )
        return result.detach()


class _Now(threading.local):
    """The tape of the region that runs in this thread."""

    tape: _Tape | None = None


_now = _Now()


def keep_communicated() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Checkpoint a region so that its recomputation communicates nothing.

    For `torch.utils.checkpoint.checkpoint(region, *args, use_reentrant=False,
    context_fn=keep_communicated)`, or of a transformers model
    `model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_communicated})`.

    Kept until the region's backward: of each dispatch the rows received, [R, H] as they travelled, which
    the experts keep for their backward anyway, and a weight per slot; of each combine, all-reduce,
    reduce-scatter and all-gather of activations one result. `symmetric_memory` and rounds of `max_rows`
    send their rows again. Of regions inside each other the innermost counts.

    Returns:
        contexts for the forward and for the recomputation.

    Raises:
        RuntimeError: in backward, if the recomputation runs other collectives than the forward, or the
            experts changed the rows that they got in place.
    """
    tape = _Tape()
    return _Turn(tape, replay=False), _Turn(tape, replay=True)


class _Turn(AbstractContextManager[None]):
    def __init__(self, tape: _Tape, *, replay: bool) -> None:
        self._tape, self._replay = tape, replay
        self._before: list[_Tape | None] = []

    def __enter__(self) -> None:
        self._before.append(_now.tape)
        _now.tape = self._tape
        self._tape.place = 0 if self._replay else None

    def __exit__(self, *error: object) -> None:
        _now.tape = self._before.pop()


def _tape() -> _Tape | None:
    return None if torch.compiler.is_compiling() else _now.tape


def replays() -> bool:
    """Whether this runs in a recomputation that takes results from a tape."""
    tape = _tape()
    return tape is not None and tape.place is not None


def kept(communicate: Callable[[], Tensor], *, own: bool = False) -> Tensor:
    """The result of a collective, or what it was in the forward of the region that is recomputed.

    Args:
        communicate: runs it.
        own: nobody changes the result in place, so that the tape need not copy it.
    """
    tape = _tape()
    if tape is None:
        return communicate()
    if tape.place is not None:
        return tape.take() if own else tape.take().clone()
    result = communicate()
    tape.put(result if own else result.clone())
    return result


def keep_value(x: Tensor) -> Tensor:
    """`x`; in a recomputation with the value that it had in the forward, and the history of `x`."""
    tape = _tape()
    if tape is None:
        return x
    if tape.place is None:
        tape.put(x.detach().clone())
        return x
    value: Tensor = _Recalled.apply(x, tape.take())
    return value


class _Recalled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
