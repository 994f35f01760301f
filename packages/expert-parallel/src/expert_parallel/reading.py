"""Reading a checkpoint: the boxes that a rank needs, straight into its own memory.

[Note: what loading holds in memory]
A rank holds its shards, from the first read on. Files are mapped: what is copied out of them passes
through the page cache, at most a piece (64 MiB, or one row of a tensor where that is more) at a time
and thread. Only a conversion that computes (a dequantization by other than rows) holds its whole
inputs meanwhile, for one tensor per thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ep_plans.boxes import Box, Interval, pieces
from expert_parallel.lazy import LazyTensor, Node, block

_PIECE = 64 << 20  # bytes read at once
_READERS = 4


class Slice(Protocol):
    """A tensor in a file that indexing reads, such as safetensors' `get_slice` gives."""

    def get_shape(self) -> list[int]:
        """The tensor's shape."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part."""


@dataclass(frozen=True)
class LoadReport:
    """What this rank did to load a model.

    Attributes:
        bytes_read: bytes taken out of checkpoint files.
        seconds: from the first to the last read, conversions included.
    """

    bytes_read: int
    seconds: float


class Tally:
    """Bytes read so far, counted from several threads."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def add(self, tensor: torch.Tensor) -> None:
        """Count a part that was read."""
        with self._lock:
            self.bytes += tensor.numel() * tensor.element_size()


class CheckpointTensor(Node):
    """A tensor of a checkpoint file."""

    def __init__(self, source: Slice, tally: Tally) -> None:
        shape = source.get_shape()
        kind = source[tuple(slice(0, 0) for _ in shape)] if shape else source[...]
        super().__init__(shape, kind.dtype)
        self.source, self.tally = source, tally

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Copy the box, at most `_PIECE` bytes at a time (unless one row is larger)."""
        if out.is_meta:
            return
        if not self.shape:
            self._copy(..., out)
            return
        for place, local in pieces(box):
            target = block(out, local)
            for first, last in self._rows(place):
                rows = slice(place[0][0] + first, place[0][0] + last)
                index = (rows, *(slice(start, end) for start, end in place[1:]))
                self._copy(index, target.narrow(0, first, last - first))

    def _rows(self, place: Sequence[Interval]) -> list[Interval]:
        """The block's rows in pieces."""
        count = place[0][1] - place[0][0]
        bytes_per_row = self.dtype.itemsize
        for start, end in place[1:]:
            bytes_per_row *= end - start
        step = max(_PIECE // max(bytes_per_row, 1), 1)
        return [(at, min(at + step, count)) for at in range(0, count, step)]

    def _copy(self, index: Any, out: torch.Tensor) -> None:
        # The file is mapped, not read: this is a view, and copying it out touches its pages only.
        part = self.source[index]
        self.tally.add(part)
        out.copy_(part)


class Readers:
    """A few threads that fill shards while the conversions of later parameters are set up."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="expert-parallel-read")
        self._jobs: list[Future[None]] = []

    def fill(self, out: torch.Tensor, source: LazyTensor, box: Box) -> None:
        """Read a box of `source` into `out`, some time before `finish` returns."""
        self._jobs.append(self._pool.submit(_fill, out, source, box))

    def finish(self) -> None:
        """Wait for all; raises what the first failed one raised."""
        try:
            for job in self._jobs:
                job.result()
        finally:
            self.close()

    def close(self) -> None:
        """Drop what has not begun."""
        self._jobs.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _fill(out: torch.Tensor, source: LazyTensor, box: Box) -> None:
    with torch.inference_mode(False), torch.no_grad():
        source.read(box, out)
