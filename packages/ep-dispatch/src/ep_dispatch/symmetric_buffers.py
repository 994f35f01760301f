"""Memory that all ranks of a group write to directly: one buffer for a group, and how rows get there.

P = ranks of the group, N = rows that may go to a rank, C = rows that one source may send to one rank,
W = width of a row in 8-byte words.

A buffer is a header of four integers for each source, then rows [P, C, W], C of each source, and one more
row (which stays on its rank: the one that absent rows are read from).

[Note: no rank overtakes another]
An exchange is: barrier, write into the others' buffers, barrier, read one's own. Behind the second barrier
all rows are there. Behind the first one each rank has read what the exchange before brought, since a rank
reads before it comes to its next barrier. So no write meets a read, one buffer is enough for all layers,
and no number of exchanges must be even, as two buffers in turn would ask of a captured CUDA graph. On CUDA
"before" is the order of a stream: a group's layers must run on one.
"""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ._compat import symmetric_memory
from .host import capturing

__all__ = [
    "HEADER",
    "Buffer",
    "CudaBuffer",
    "SharedBuffer",
    "release_buffers",
    "shared_buffer",
]

HEADER = 4
"""Integers that each source tells each rank beside its rows."""

_SHARED = Path("/dev/shm")  # where there is none, files in the directory for temporary ones do
_WORD = 8


class Buffer:
    """A rank's buffer, and the way into those of the others.

    Attributes:
        words: [W'] int64, this rank's memory.
        captured: a CUDA graph writes to it, so that it stays until `release_buffers`.
    """

    words: Tensor
    captured: bool = False

    def put(self, rows: Tensor, place: Tensor, capacity: int, header: Tensor | None) -> None:
        """Write rows into the others' buffers.

        Args:
            rows: [P, N, W] int64, dimension 0 of any stride (0: the same rows to all).
            place: [P, N] int64, where each lies among those for that rank; not written if it is not
                in 0 to C - 1.
            capacity: C.
            header: [P, HEADER] int64, for each rank.
        """
        raise NotImplementedError

    def barrier(self, group: ProcessGroup) -> None:
        """Go on when all ranks have come here. On CUDA the stream waits, not the host."""
        raise NotImplementedError

    def header(self, ranks: int) -> Tensor:
        """[P, HEADER], what each source told this rank."""
        return self.words[: ranks * HEADER].view(ranks, HEADER)

    def rows(self, count: int, width: int, ranks: int) -> Tensor:
        """[count, W], the first rows of this rank's memory."""
        return self.words[ranks * HEADER :][: count * width].view(count, width)


class SharedBuffer(Buffer):
    """Memory that processes of one machine share, for tensors on the CPU.

    Args:
        mapped: [P] int64 tensors, the memory of each rank.
        rank: this one.
    """

    def __init__(self, mapped: list[Tensor], rank: int) -> None:
        self.mapped, self.rank, self.words = mapped, rank, mapped[rank]

    def put(self, rows: Tensor, place: Tensor, capacity: int, header: Tensor | None) -> None:
        """As `Buffer.put` says."""
        ranks, _, width = rows.shape
        for peer, words in enumerate(self.mapped):
            if header is not None:
                words[self.rank * HEADER :][:HEADER] = header[peer]
            chosen = ((place[peer] >= 0) & (place[peer] < capacity)).nonzero()[:, 0]
            block = words[ranks * HEADER + self.rank * capacity * width :][: capacity * width]
            block.view(capacity, width)[place[peer][chosen]] = rows[peer][chosen]

    def barrier(self, group: ProcessGroup) -> None:
        """One all-reduce of one number."""
        dist.all_reduce(torch.zeros(1), group=group)


class CudaBuffer(Buffer):
    """CUDA symmetric memory: a kernel writes through NVLink or PCIe into the other GPUs' memory."""

    def __init__(self, words: Tensor, handle: Any, rank: int) -> None:
        self.words, self.handle, self.rank = words, handle, rank
        self.pointers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=words.device)

    def put(self, rows: Tensor, place: Tensor, capacity: int, header: Tensor | None) -> None:
        """As `Buffer.put` says."""
        from .put_kernel import put_rows

        put_rows(self.pointers, rows, place, capacity, header, rank=self.rank)

    def barrier(self, group: ProcessGroup) -> None:
        """Over the signal pads of symmetric memory, on the stream."""
        self.handle.barrier(0)


@dataclass
class _Held:
    buffer: Buffer | None = None
    captured: list[Buffer] = field(default_factory=list)


# One buffer serves all layers of a group; it goes with the group, or by `release_buffers`.
_held: WeakKeyDictionary[ProcessGroup, dict[str, _Held]] = WeakKeyDictionary()


def release_buffers(group: ProcessGroup | None = None) -> None:
    """Free the symmetric memory of `group` (None: of all groups); it is made again when it is needed.

    Call it on every rank, when no layer runs any more, no backward is to come, and no CUDA graph that was
    captured will be replayed. Cost: one barrier a group.
    """
    for key in list(_held) if group is None else [group]:
        for held in _held.pop(key, {}).values():
            if held.buffer is not None:
                held.buffer.barrier(key)
                _synchronize(held.buffer)


def shared_buffer(
    group: ProcessGroup, device: torch.device, *, capacity: int, width: int
) -> Buffer:
    """The group's buffer for C rows of each source of W words, or more.

    The first call, and one that needs a larger buffer, makes one: collectives, which cannot be captured in
    a CUDA graph. All ranks ask for the same sizes in the same order, so all make one or none does.

    Raises:
        RuntimeError: the ranks cannot share memory (all of them raise, before anything is allocated),
            or there is not enough of it.
    """
    ranks = dist.get_world_size(group)
    needed = ranks * HEADER + (ranks * capacity + 1) * width
    held = _held.setdefault(group, {}).setdefault(device.type, _Held())
    buffer = held.buffer
    if buffer is None or buffer.words.numel() < needed:
        if capturing():
            raise RuntimeError(
                f"symmetric memory of {needed * _WORD} bytes is needed, which cannot be allocated while a "
                "CUDA graph is captured; run each layer once before capturing."
            )
        if buffer is not None:
            buffer.barrier(group)  # others may still write to it
            _synchronize(buffer)
            needed = max(needed, buffer.words.numel() * 3 // 2)
            if buffer.captured:
                held.captured.append(buffer)
            held.buffer = None
        # Written to in every mode, so made in none.
        with torch.inference_mode(False), torch.no_grad():
            make = _make_on_cuda if device.type == "cuda" else _make_shared
            buffer = held.buffer = make(group, needed)
    buffer.captured |= capturing()
    return buffer


def _synchronize(buffer: Buffer) -> None:
    if buffer.words.is_cuda:
        torch.cuda.synchronize()


def _told(group: ProcessGroup, value: object) -> list[Any]:
    """What each rank of the group says."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _refuse_alike(group: ProcessGroup, problem: str | None) -> None:
    """Raise on all ranks if any has a problem."""
    problems = {rank: told for rank, told in enumerate(_told(group, problem)) if told}
    if problems:
        told = "; ".join(f"rank {rank} of the EP group: {what}" for rank, what in problems.items())
        raise RuntimeError(
            f'ep_implementation="symmetric_memory" cannot run here: {told}. Use "all_to_all".'
        )


def _one_machine(group: ProcessGroup, words: int) -> None:
    told = _told(group, (socket.gethostname(), words))
    hosts, sizes = ([one[i] for one in told] for i in (0, 1))
    if len(set(hosts)) > 1:
        raise RuntimeError(
            'ep_implementation="symmetric_memory" needs all ranks of an EP group on one machine, got '
            f"hosts {hosts} by EP rank; use an ep_size that divides the ranks of a machine, or "
            '"all_to_all_hierarchical".'
        )
    if len(set(sizes)) > 1:
        raise RuntimeError(
            "the ranks of an EP group must be given the same max_tokens and max_rows_per_pair, they want "
            f"buffers of {[size * _WORD for size in sizes]} bytes, by EP rank."
        )


def _make_shared(group: ProcessGroup, words: int) -> Buffer:
    """Each rank makes a file, all map it, and its name goes before anything is written there."""
    _one_machine(group, words)
    folder = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
    file, path, problem = None, "", None
    mapped: list[Tensor] = []
    try:
        try:
            file, path = tempfile.mkstemp(prefix="ep-dispatch-", dir=folder)
            if Path("/proc/self/fd").is_dir():
                # Its name goes at once, so that nothing is left of a rank that is killed here.
                Path(path).unlink()
                path = f"/proc/{os.getpid()}/fd/{file}"
            # Without pages behind it, the first write would end the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, words * _WORD)
        except OSError as error:
            problem = f"no {words * _WORD} bytes of shared memory in {folder} ({error})"
        _refuse_alike(group, problem)
        try:
            for name in _told(group, path):
                mapped.append(torch.from_file(name, shared=True, size=words, dtype=torch.int64))
        except (OSError, RuntimeError) as error:
            problem = f"the shared memory of another rank cannot be mapped ({error})"
        _refuse_alike(group, problem)
    finally:
        if file is not None:
            os.close(file)
        if path and not path.startswith("/proc"):
            Path(path).unlink()
    return SharedBuffer(mapped, dist.get_rank(group))


def _make_on_cuda(group: ProcessGroup, words: int) -> Buffer:
    _one_machine(group, words)
    mine = torch.device("cuda", torch.cuda.current_device())
    problem = None
    try:
        from . import put_kernel  # noqa: F401
    except ImportError as error:
        problem = f"its kernel needs triton ({error}); pip install triton"
    visible = torch.cuda.device_count()
    for other in set(_told(group, mine.index)) - {mine.index}:
        if other < visible and not torch.cuda.can_device_access_peer(mine.index, other):
            problem = f"GPU {mine.index} cannot access the memory of GPU {other}"
    _refuse_alike(group, problem)
    library = symmetric_memory()
    tensor = library.empty(words, dtype=torch.int64, device=mine)
    return CudaBuffer(tensor, library.rendezvous(tensor, group), dist.get_rank(group))
