"""A simulated step of Qwen3-30B-A3B on 8 H100, ours beside native transformers': `python simulated.py tp=8 [--out FILE]`.

On fake tensors, in full size: the numbers are the same on every machine.
"""

from __future__ import annotations

from typing import Any

from common import main
from step import sizes_of


def measure(layout: str) -> dict[str, dict[str, float]]:
    """Of each implementation: peak memory, seconds, kernels, the batch's tokens; native where it has EP."""
    import estimate_figures as figures

    sizes = sizes_of(layout)
    tp, fsdp = sizes["tp_size"], sizes.get("fsdp_size", 1)
    (name,) = (name for name, pair in figures.SIZES.items() if pair == (tp, fsdp))
    runs: dict[str, Any] = {"all_to_all": figures.ours}
    if name in figures.LAYOUTS:
        runs["native"] = figures.native
    found: dict[str, dict[str, float]] = {}
    for implementation, run in runs.items():
        step = figures.isolated(run, name)
        seconds = step["time"]["seconds"]
        found[implementation] = {
            "peak_bytes": step["peak"]["bytes"],
            "seconds": seconds,
            "unique_tokens": round(8 * step["unique_tokens_per_second_per_device"] * seconds),
            "kernels": sum(step["kernels"].values()),
        }
    return found


if __name__ == "__main__":
    main(measure, "layout")
