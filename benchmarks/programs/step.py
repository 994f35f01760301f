"""A training step in one layout, ours beside native transformers': `python step.py tp=4/fsdp=2 [--out FILE]`.

On the CPU 8 gloo ranks; where there are 8 GPUs, one rank on each.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import main


def sizes_of(layout: str) -> dict[str, int]:
    """`tp=4/fsdp=2` as fields of `DistributedConfig`."""
    pairs = (part.split("=") for part in layout.split("/"))
    return {f"{axis}_size": int(size) for axis, size in pairs}


def implementations(sizes: dict[str, int]) -> list[str]:
    """Those that train in a layout; `all_reduce` needs one batch for the whole EP group."""
    shared = ["all_reduce"] if sizes["tp_size"] == 8 else []
    return ["native", "all_to_all", "symmetric_memory", *shared]


def measure(layout: str) -> dict[str, dict[str, float]]:
    """Of each implementation: seconds of a step, CPU seconds of all ranks, peak memory, tokens."""
    import moe_step
    import step_ranks

    sizes = sizes_of(layout)
    names = implementations(sizes)
    with tempfile.TemporaryDirectory() as folder:
        moe_step.write_checkpoint(Path(folder), step_ranks.SHAPE)
        times = step_ranks.on_ranks(step_ranks.times, folder, sizes, names)
        peaks = {name: step_ranks.on_ranks(step_ranks.peak, folder, sizes, name) for name in names}
    own = step_ranks.SHAPE.batch * step_ranks.SHAPE.length
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = {
            "seconds": times[0][name][0],
            "cpu_seconds": sum(rank[name][1] for rank in times),
            "peak_bytes": max(peaks[name]),
            "own_tokens": own,
            "unique_tokens": own * 8 // sizes["tp_size"],
        }
    return found


if __name__ == "__main__":
    main(measure, "layout")
