"""One rank's step of Qwen3-30B-A3B in full size beside its estimate: memory, kernels and their time.

The other ranks are not there (`rank_step`), so that one GPU of 80 GB is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import estimate_figures
import rank_step

from . import Case, Found, Place, check

TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "vocab_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}
WITHIN = 0.05


def _cases(place: Place, layout: str) -> Iterator[Case]:
    for who in ("native", "ours"):
        run = functools.cache(functools.partial(_both, place, layout, who))
        yield f"{who}, peak", functools.partial(_peak, place, run)
        for what in ("kernels", "kernel_seconds"):
            yield f"{who}, {what}", functools.partial(_beside, run, what)


def _both(place: Place, layout: str, who: str) -> tuple[dict[str, float], dict[str, float]]:
    """What was measured, and what was estimated."""
    changes = TINY if place.dry else {}
    real = rank_step.isolated(who, layout, place.device.type, changes)
    run = {"ours": estimate_figures.ours, "native": estimate_figures.native}[who]
    step = estimate_figures.isolated(run, layout, **changes)
    return real, {
        "peak_bytes": step["peak"]["bytes"],
        "kernels": sum(step["kernels"].values()),
        "kernel_seconds": step["time"]["kernels"],
    }


def _peak(place: Place, run: Any) -> Found:
    """The allocator's over the simulated one."""
    real, estimated = (one["peak_bytes"] for one in run())
    ratio = real / estimated
    more = {"GiB": [round(x / 2**30, 2) for x in (real, estimated)], "within": WITHIN}
    return Found(place.dry or abs(ratio - 1) <= WITHIN, ratio, "of the simulated peak", more)


def _beside(run: Any, what: str) -> Found:
    """Shown, not judged: the estimate's constants are those of an H100's data sheet."""
    real, estimated = (one[what] for one in run())
    return Found(True, real / estimated, "of the estimate", {"both": [real, estimated]})


@check
def step_tp8(place: Place) -> Iterator[Case]:
    """A rank's step at tp=8, native transformers' and ours, beside the estimate."""
    yield from _cases(place, "tp8")


@check
def step_tp4_fsdp2(place: Place) -> Iterator[Case]:
    """A rank's step at tp=4, fsdp=2, native transformers' and ours, beside the estimate."""
    yield from _cases(place, "tp4_fsdp2")


@check
def step_tp2_fsdp4(place: Place) -> Iterator[Case]:
    """A rank's step at tp=2, fsdp=4, native transformers' and ours, beside the estimate."""
    yield from _cases(place, "tp2_fsdp4")


STEPS = (step_tp8.__name__, step_tp4_fsdp2.__name__, step_tp2_fsdp4.__name__)
