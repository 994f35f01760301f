"""Measure a figure that the documentation gives: `python tools/figures.py NAME` or `list`.

A figure is a function here, under its own name, that measures and returns plain data; the command
prints it as one line of JSON. Run it in the environment of `nox -s dev`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Figure = Callable[[], dict[str, Any]]
FIGURES: dict[str, Figure] = {}


def figure(function: Figure) -> Figure:
    """Register a figure."""
    FIGURES[function.__name__] = function
    return function


@figure
def layouts_checked() -> dict[str, Any]:
    """How many layouts of up to 64 ranks there are: the property tests of ep-mesh go through all."""
    from ep_mesh import Layout, legal_ep_sizes

    sizes = range(1, 65)
    layouts = [
        Layout(tp=tp, fsdp=fsdp, dp_replicate=replicas, pp=pp, ep=ep)
        for tp in sizes
        for fsdp in sizes
        if tp * fsdp <= 64
        for replicas in sizes
        if tp * fsdp * replicas <= 64
        for pp in sizes
        if tp * fsdp * replicas * pp <= 64
        for ep in legal_ep_sizes(tp, fsdp)
    ]
    return {"layouts": len(layouts), "ranks": sum(layout.world_size for layout in layouts)}


@figure
def rank_pool() -> dict[str, Any]:
    """What the multi-rank tests wait for: the first start of 8 ranks, a further one, and a call."""
    from ep_testing import RankPool

    pool = RankPool()
    start = time.perf_counter()
    pool.run(int)
    first = time.perf_counter() - start
    pool.close()
    start = time.perf_counter()
    pool.run(int)
    further = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(50):
        pool.run(int)
    call = (time.perf_counter() - start) / 50
    pool.close()
    return {"first_s": first, "further_s": further, "call_ms": 1000 * call}


@figure
def load_cost() -> dict[str, Any]:
    """Load and save 2 GB on 8 ranks: bytes read and host memory of a rank against its share."""
    import tempfile
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration_tests"))
    import checkpoints

    from ep_testing import RankPool

    sizes = {"tp_size": 2, "fsdp_size": 4, "ep_size": 4}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        small = checkpoints.moe_config(
            hidden_size=64, vocab_size=128, moe_intermediate_size=32, num_hidden_layers=1
        )
        warm = Path(folder) / "warm"
        checkpoints.write_checkpoint(warm, small, "fused", file_bytes=1 << 30)
        for form in checkpoints.FORMS:
            path = Path(folder) / form
            config = checkpoints.moe_config()
            size = checkpoints.write_checkpoint(path, config, form, file_bytes=300 << 20)
            pool = RankPool()
            costs = pool.run(checkpoints.load_cost, str(path), sizes, str(warm), timeout=500)
            original = form == "per_expert"
            target = str(Path(folder) / "saved")
            saves = pool.run(checkpoints.save_cost, str(path), sizes, target, original, timeout=500)
            pool.close()
            result[form] = {
                "checkpoint_MB": round(size / 1e6),
                "share_MB": round(max(cost.shards for cost in costs) / 1e6, 1),
                "read_MB": round(max(cost.read for cost in costs) / 1e6, 1),
                "memory_MB": round(max(cost.memory for cost in costs) / 1e6, 1),
                "seconds": round(max(cost.seconds for cost in costs), 1),
                "save_memory_first_rank_MB": round(saves[0].memory / 1e6, 1),
                "save_memory_others_MB": round(max(cost.memory for cost in saves[1:]) / 1e6, 1),
                "save_seconds": round(saves[0].seconds, 1),
            }
    return result


def main() -> None:
    """Print one figure, or the names of all."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name == "list":
        for known, function in FIGURES.items():
            print(f"{known}: {(function.__doc__ or '').splitlines()[0]}")
    elif name in FIGURES:
        result = {k: round(v, 4) if isinstance(v, float) else v for k, v in FIGURES[name]().items()}
        print(json.dumps({"figure": name, **result}))
    else:
        sys.exit(
            f"usage: python tools/figures.py NAME, with NAME one of {', '.join(FIGURES)}; or list"
        )


if __name__ == "__main__":
    main()
