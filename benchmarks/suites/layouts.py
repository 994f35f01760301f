"""A training step of a small model on 8 ranks, in each layout and by each implementation."""

from __future__ import annotations

from typing import Any

from .programs import numbers

LAYOUTS = ["tp=8", "tp=4/fsdp=2", "tp=2/fsdp=4", "tp=1/fsdp=8"]
IMPLEMENTATIONS = ["all_to_all", "symmetric_memory", "all_reduce", "native"]

Found = dict[str, dict[str, dict[str, float]]]


def _over_native(found: dict[str, dict[str, float]], name: str, of: str) -> float:
    return found[name][of] / found["native"][of]


class Layouts:
    """Ours and native transformers' run in turns, so their ratio says more than either's time.

    asv knows one direction, lower is better: ratios and bytes are judged, tokens per second are shown.
    """

    params = (LAYOUTS, IMPLEMENTATIONS)
    param_names = ("layout", "implementation")
    timeout = 60
    version = "1"  # by hand: else a change of this file would drop the history

    def setup_cache(self) -> Found:
        return {layout: numbers("step.py", layout) for layout in LAYOUTS}

    setup_cache.timeout = 1800

    def setup(self, found: Found, layout: str, implementation: str) -> None:
        if implementation not in found[layout]:
            raise NotImplementedError  # not in this layout

    def track_tokens_per_s_per_gpu(self, found: Found, layout: str, name: str) -> float:
        """Unique tokens: a batch that a TP group shares counts once."""
        return found[layout][name]["unique_tokens"] / found[layout][name]["seconds"] / 8

    def track_own_tokens_per_s_per_gpu(self, found: Found, layout: str, name: str) -> float:
        """Each rank's own batch, also where others hold the same one."""
        return found[layout][name]["own_tokens"] / found[layout][name]["seconds"]

    def track_seconds_per_token(self, found: Found, layout: str, name: str) -> float:
        return 8 * found[layout][name]["seconds"] / found[layout][name]["unique_tokens"]

    def track_cpu_seconds_per_token(self, found: Found, layout: str, name: str) -> float:
        return found[layout][name]["cpu_seconds"] / found[layout][name]["unique_tokens"]

    def track_time_over_native(self, found: Found, layout: str, name: str) -> float:
        return _over_native(found[layout], name, "seconds")

    def track_cpu_over_native(self, found: Found, layout: str, name: str) -> float:
        return _over_native(found[layout], name, "cpu_seconds")

    def track_peak_memory_per_gpu(self, found: Found, layout: str, name: str) -> float:
        return found[layout][name]["peak_bytes"]

    track_tokens_per_s_per_gpu.unit = "tokens/s/GPU"
    track_own_tokens_per_s_per_gpu.unit = "tokens/s/GPU"
    track_seconds_per_token.unit = "s"
    track_cpu_seconds_per_token.unit = "s"
    track_time_over_native.unit = "ratio"
    track_cpu_over_native.unit = "ratio"
    track_peak_memory_per_gpu.unit = "bytes"


class Simulated:
    """A step of Qwen3-30B-A3B on 8 H100 that are not there (`expert_parallel.estimate`): no noise.

    A step's time is an estimate of what devices and links allow, so only its changes mean something.
    """

    params = (LAYOUTS, ["all_to_all", "native"])
    param_names = ("layout", "implementation")
    timeout = 60
    version = "1"

    def setup_cache(self) -> Found:
        return {layout: numbers("simulated.py", layout) for layout in LAYOUTS}

    setup_cache.timeout = 1800

    def setup(self, found: Found, layout: str, implementation: str) -> None:
        if implementation not in found[layout]:
            raise NotImplementedError  # no expert parallelism there

    def track_simulated_peak_memory(self, found: Found, layout: str, name: str) -> float:
        return found[layout][name]["peak_bytes"]

    def track_simulated_tokens_per_s_per_gpu(self, found: Found, layout: str, name: str) -> float:
        """Unique tokens: a batch that a TP group shares counts once."""
        return found[layout][name]["unique_tokens"] / found[layout][name]["seconds"] / 8

    def track_simulated_seconds_per_token(self, found: Found, layout: str, name: str) -> float:
        return 8 * found[layout][name]["seconds"] / found[layout][name]["unique_tokens"]

    def track_kernels_per_step(self, found: Found, layout: str, name: str) -> float:
        return found[layout][name]["kernels"]

    track_simulated_peak_memory.unit = "bytes"
    track_simulated_tokens_per_s_per_gpu.unit = "tokens/s/GPU"
    track_simulated_seconds_per_token.unit = "s"
    track_kernels_per_step.unit = "kernels"


class Dispatch:
    """One MoE layer on 8 ranks, forward and backward: what it sends, what it keeps, how long it takes."""

    params = ([8, 4, 2], ["all_to_all", "native"])
    param_names = ("ep", "implementation")
    timeout = 60
    version = "1"

    def setup_cache(self) -> dict[str, Any]:
        return numbers("layer.py")

    setup_cache.timeout = 900

    def track_bytes_per_layer(self, found: dict[str, Any], ep: int, name: str) -> float:
        return found[str(ep)][name]["sent_bytes"]

    def track_saved_bytes_per_token(self, found: dict[str, Any], ep: int, name: str) -> float:
        return found[str(ep)][name]["saved_bytes_per_token"]

    def track_time_over_native(self, found: dict[str, Any], ep: int, name: str) -> float:
        return _over_native(found[str(ep)], name, "seconds")

    def track_dispatch_over_native(self, found: dict[str, Any], ep: int, name: str) -> float:
        """Dispatch and combine alone: what a layer's time hides behind that of its experts."""
        return _over_native(found[str(ep)], name, "dispatch_seconds")

    track_bytes_per_layer.unit = "bytes"
    track_saved_bytes_per_token.unit = "bytes"
    track_time_over_native.unit = "ratio"
    track_dispatch_over_native.unit = "ratio"
