"""What the ranks of `step.py` do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import moe_step
import torch
import torch.distributed as dist

SHAPE = moe_step.Sizes(hidden=256, intermediate=128, experts=32, top_k=4, layers=2, length=128)
REPEATS = 9


def on_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(rank, *args)` gives on each of 8 ranks, in fresh processes."""
    if torch.cuda.device_count() >= 8:
        context = torch.multiprocessing.get_context("spawn")
        with context.Manager() as manager:
            found = manager.dict()
            torch.multiprocessing.spawn(_on_gpu, (function, args, found), nprocs=8)
            return [found[rank] for rank in range(8)]
    from ep_testing import RankPool

    pool = RankPool()
    try:
        return pool.run(function, *args, timeout=300)
    finally:
        pool.close()


def _on_gpu(rank: int, function: Callable[..., Any], args: tuple[Any, ...], found: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29507", rank=rank, world_size=8)
    found[rank] = function(rank, *args)
    dist.destroy_process_group()


def build(folder: str, sizes: dict[str, int], name: str) -> moe_step.Run:
    """A model of one implementation, the EP group over all ranks."""
    if name == "native":
        return moe_step.build(folder, sizes, 8, ours=False, shape=SHAPE)
    return moe_step.build(folder, sizes, 8, ours=True, implementation=name, shape=SHAPE)


def times(
    rank: int, folder: str, sizes: dict[str, int], names: list[str]
) -> dict[str, tuple[float, float]]:
    """Median seconds of a step, all ranks together and in turns, and CPU seconds of this rank."""
    steps = {name: build(folder, sizes, name).step for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    own: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(REPEATS + 2):
        for name, step in steps.items():
            together()
            start, busy = time.perf_counter(), time.process_time()
            step()
            busy = time.process_time() - busy
            together()
            if repeat > 1:
                wall[name].append(time.perf_counter() - start)
                own[name].append(busy)
    return {name: (median(wall[name]), median(own[name])) for name in names}


def together() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def peak(rank: int, folder: str, sizes: dict[str, int], name: str) -> int:
    """Bytes at the peak of loading and two steps: torch's on a GPU, else the process' beyond its start."""
    before = _resident("VmRSS")
    step = build(folder, sizes, name).step
    step()
    step()
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
