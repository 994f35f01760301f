"""The routing of a forward, used again when activation checkpointing recomputes it.

A router that is recomputed may decide a near tie in another way (other kernels, other shapes). Then
another number of rows would go to an expert, and the recomputed tensors would not fit those of the
forward, on other ranks too.
"""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from ._compat import checkpoint_frame

__all__ = ["CheckpointMemory"]


Routing = TypeVar("Routing")


class CheckpointMemory(Generic[Routing]):
    """What one experts module routed in each checkpointed region whose backward is to come.

    A region may run the module more than once, and be recomputed more than once: the calls of a
    recomputation come in the order of the forward's. Entries go with the region's graph. All ranks
    checkpoint alike, so all find an entry, or none does. Of regions inside each other the innermost
    counts; when the outer one is recomputed, the inner one is a new region.
    """

    def __init__(self) -> None:
        self._routings: WeakKeyDictionary[object, list[Routing]] = WeakKeyDictionary()
        self._recalled: WeakKeyDictionary[object, dict[int, int]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[CheckpointMemory[Routing]], tuple[()]]:
        """Copied or pickled, it is empty: a graph is neither."""
        return CheckpointMemory, ()

    def kept(self, routing: Routing) -> Routing:
        """That of the forward that is being recomputed; else `routing`, remembered."""
        earlier = self.recall()
        if earlier is not None:
            return earlier
        self.remember(routing)
        return routing

    def remember(self, routing: Routing) -> None:
        """Keep the routing of a forward, if that is checkpointed."""
        region, backward = _region()
        if region is not None and backward is None:
            self._routings.setdefault(region, []).append(routing)

    def recall(self) -> Routing | None:
        """The routing of the forward that is being recomputed; None if none is."""
        region, backward = _region()
        if region is None or backward is None or region not in self._routings:
            return None
        calls = self._recalled.setdefault(region, {})
        number = calls.get(backward, 0)
        calls[backward] = number + 1
        routings = self._routings[region]
        return routings[number] if number < len(routings) else None


def _region() -> tuple[object | None, int | None]:
    return (None, None) if torch.compiler.is_compiling() else checkpoint_frame()
