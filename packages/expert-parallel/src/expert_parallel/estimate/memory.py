"""Which storages live, of what kind, and when they were most."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Kind = Literal[
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "gathered_buffers",
    "exchange_buffers",
    "temporaries",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
_BLOCK = 512  # bytes that the CUDA allocator rounds up to


@dataclass
class _Live:
    size: int
    kind: Kind
    reference: weakref.ref[torch.UntypedStorage]


@dataclass(frozen=True)
class Peak:
    """The most bytes that lived at one time.

    Attributes:
        total: bytes.
        by_kind: of each kind.
        phase, place: where in the step.
    """

    total: int
    by_kind: dict[str, int]
    phase: str
    place: str


@dataclass
class Memory:
    """The storages that live. Storages are followed from their first use until they are freed."""

    total: int = 0
    phase: str = "build"
    place: str = ""
    by_kind: Counter[str] = field(default_factory=Counter)
    peaks: dict[str, Peak] = field(default_factory=dict)
    places: dict[tuple[str, str], Peak] = field(default_factory=dict)
    _live: dict[int, _Live] = field(default_factory=dict)

    def add(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        """Follow a storage; nothing if it is followed."""
        key = id(storage)
        if key in self._live or not storage.nbytes():
            return
        reference = weakref.ref(storage, lambda _: self._freed(key))
        self._live[key] = _Live(_rounded(storage), kind, reference)
        self._grow(kind, self._live[key].size)

    def set_kind(self, tensor: Tensor, kind: Kind) -> None:
        """Say what a tensor is."""
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        live = self._live.get(id(storage))
        if live is None:
            self.add(storage, kind)
        elif live.kind != kind:
            self.by_kind[live.kind] -= live.size
            self.by_kind[kind] += live.size
            live.kind = kind

    def kind_of(self, storage: torch.UntypedStorage) -> Kind | None:
        """What a storage is; None if it is not followed."""
        live = self._live.get(id(storage))
        return None if live is None else live.kind

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """FSDP2 frees and allocates storages in place."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            self._resized(storage)
            return storage

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def enter(self, phase: str) -> None:
        """Begin a phase of the step."""
        self.phase = phase
        self._look()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        live = self._live.get(id(storage))
        if live is None:
            self.add(storage, "gathered_buffers")
            return
        size = _rounded(storage)
        grown, live.size = size - live.size, size
        self._grow(live.kind, grown)

    def _grow(self, kind: Kind, size: int) -> None:
        self.total += size
        self.by_kind[kind] += size
        if size > 0:
            self._look()

    def _look(self) -> None:
        key = self.phase, self.place
        here = self.places.get(key)
        if here is None or self.total > here.total:
            here = self.places[key] = Peak(self.total, dict(self.by_kind), *key)
            peak = self.peaks.get(self.phase)
            if peak is None or here.total > peak.total:
                self.peaks[self.phase] = here

    def _freed(self, key: int) -> None:
        live = self._live.pop(key)
        self.total -= live.size
        self.by_kind[live.kind] -= live.size


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // _BLOCK) * _BLOCK
