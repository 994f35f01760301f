"""What the ranks of `checkpoint.py` do."""

from __future__ import annotations

import os
import shutil
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from step_ranks import together
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REPEATS = 5


def costs(rank: int, folder: str, sizes: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    """Of each layout, one after the other, what its checkpoint costs."""
    return {layout: cost(rank, folder, fields) for layout, fields in sizes.items()}


def cost(rank: int, folder: str, sizes: dict[str, int], repeats: int = REPEATS) -> dict[str, float]:
    """Medians of a save, of what training waits for one in the background, of a load; of plain files and a plain copy.

    The first save in the background plans and takes memory; it is that which is counted. `saved_bytes`: of
    all files, `staged_bytes`: what this rank keeps on the host while a save is under way.
    """
    from checkpoint_figures import state_on_rank

    from ep_trainer.checkpoint import Checkpointer, Contents

    sections, manifest = state_on_rank(folder, sizes)
    saver = Checkpointer()
    target, plain = Path(folder) / "checkpoint-1", Path(folder) / f"plain-{rank}"

    def save(in_background: bool = False) -> None:
        saver.save(target, lambda: Contents(sections), manifest, in_background=in_background)

    def removed() -> None:
        together()
        if rank == 0:
            shutil.rmtree(target, ignore_errors=True)
        together()

    removed()
    with Made() as made:
        save(in_background=True)
    staged = made.living_bytes()
    saver.wait()
    source = torch.ones(staged, dtype=torch.uint8)
    copy = source.clone()
    stalls, copies = [], []
    for _ in range(repeats):
        removed()
        stalls.append(busy(lambda: save(in_background=True)))
        saver.wait()
        copies.append(busy(lambda: copy.copy_(source)))
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    content = os.urandom(size // dist.get_world_size())
    writes, saves, loads = [], [], []
    for _ in range(repeats):
        removed()
        writes.append(seconds(lambda: write(plain, content)))
        saves.append(seconds(save))
        loads.append(seconds(lambda: saver.load(target, sections)))
    return {
        "save_seconds": median(saves),
        "plain_write_seconds": median(writes),
        "load_seconds": median(loads),
        "stall_cpu_seconds": median(stalls),
        "copy_cpu_seconds": median(copies),
        "saved_bytes": size,
        "staged_bytes": staged,
    }


def busy(work: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def seconds(work: Callable[[], object]) -> float:
    """Of all ranks together."""
    together()
    start = time.perf_counter()
    work()
    together()
    return time.perf_counter() - start


def write(path: Path, content: bytes) -> None:
    """Write and flush a file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class Made(TorchDispatchMode):
    """The host memory that operators of this thread make and that lives on."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}

    def living_bytes(self) -> int:
        """Bytes of what is still held."""
        alive = (reference() for reference in self._storages.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        result = func(*args, **kwargs)
        given = storages((args, kwargs))
        for storage in storages(result):
            if not any(storage is one for one in given):
                self._storages[id(storage)] = weakref.ref(storage)
        return result


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """Of the host's tensors."""
    tensors = (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
    return [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
