"""Time and memory of a layer with the sizes of Qwen3-30B-A3B on one GPU, in bfloat16.

T = tokens, H = hidden size, I = intermediate size, K = experts per token, S = T * K slots.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import moe_layer
import torch

from ep_dispatch import AllReduce, AllToAll, EPImplementation
from ep_kernels import module_experts_forward

from . import Case, Found, Place, Skip, check
from .experts import TORCH_BACKENDS, backends, need_backend

Work = Callable[[], object]
TOKENS = 16384


def sizes(place: Place) -> moe_layer.Sizes:
    """Of the layer, and its tokens."""
    if place.dry:
        return moe_layer.Sizes(32, 16, 4, 2, 8, torch.bfloat16)
    return replace(moe_layer.QWEN3_30B, tokens=TOKENS)


def seconds(place: Place, work: Work, repeats: int = 15) -> float:
    """The median time of some work on the device, after a warm-up."""
    if place.dry:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    for _ in range(3):
        work()
    events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(repeats)]
    for start_event, end_event in events:
        start_event.record()
        work()
        end_event.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events) / 1000


class Layers:
    """Experts, inputs, and what is compared: transformers' own experts, and ours in several ways."""

    def __init__(self, place: Place) -> None:
        self.place, self.sizes = place, sizes(place)
        try:
            with torch.device(place.device):
                self.experts = moe_layer.experts_module(self.sizes, 1)
        except ImportError as error:
            raise Skip(f"transformers: {error}") from error
        given = moe_layer.inputs(0, self.sizes)
        self.given = tuple(x.detach().to(place.device) for x in given)
        for x in (self.given[0], self.given[2]):
            x.requires_grad_()

    def theirs(self) -> moe_layer.Layer:
        """Transformers' experts with grouped_mm."""
        return self.experts  # type: ignore[return-value]

    def ours(
        self, cls: type[EPImplementation] = AllToAll, backend: Any = "auto", **options: Any
    ) -> moe_layer.Layer:
        """A layer of ours on one rank."""
        need_backend(self.experts, backend)
        forward = module_experts_forward(self.experts, backend=backend, **options)
        return cls(forward, num_local_experts=self.sizes.experts, experts=self.experts)

    def step(self, layer: moe_layer.Layer, backward: bool) -> Work:
        """A forward, or a forward with its backward."""
        if backward:
            return lambda: moe_layer.step(self.experts, layer, self.given)

        def forward() -> None:
            with torch.no_grad():
                layer(*self.given[:3])

        return forward

    def dense(self, backward: bool) -> Work:
        """Dense products of as many multiplications as the experts': one expert takes all S slots."""
        s = self.sizes
        slots, options = s.tokens * s.top_k, {"dtype": s.dtype, "device": self.place.device}
        x, pre, h = (
            torch.randn(slots, n, **options) for n in (s.hidden, 2 * s.intermediate, s.intermediate)
        )
        up, down = (
            torch.randn(n, m, **options)
            for n, m in ((s.hidden, 2 * s.intermediate), (s.intermediate, s.hidden))
        )

        def run() -> None:
            torch.mm(x, up)
            torch.mm(h, down)
            if backward:
                torch.mm(x, down.t())
                torch.mm(h.t(), x)
                torch.mm(pre, up.t())
                torch.mm(x.t(), pre)

        return run

    def flops(self, backward: bool) -> float:
        """Of the matrix products."""
        s = self.sizes
        return (3 if backward else 1) * 2 * 3 * s.tokens * s.top_k * s.hidden * s.intermediate


def _matrix_flops(place: Place, size: int) -> float:
    """What the device multiplies in a second at best: one large product."""
    options: Any = {"dtype": torch.bfloat16, "device": place.device}
    a, b = torch.randn(size, size, **options), torch.randn(size, size, **options)
    return 2 * size**3 / seconds(place, lambda: torch.mm(a, b))


def _ways() -> Iterator[tuple[str, type[EPImplementation], str]]:
    yield "all_to_all", AllToAll, "auto"
    yield "all_reduce", AllReduce, "auto"
    for backend in backends():
        if backend not in ("auto", *TORCH_BACKENDS):
            yield f"all_to_all, {backend}", AllToAll, backend


@check
def layer_speed(place: Place) -> Iterator[Case]:
    """Times of a layer: over transformers' experts, of a dense GEMM, and of what the chip multiplies."""
    layers = Layers(place)
    size = 64 if place.dry else 8192
    ceiling = _matrix_flops(place, size)
    yield (
        f"a bf16 product of {size} cubed",
        lambda: Found(True, ceiling / 1e12, "TFLOP/s", {"conditions": str(layers.sizes)}),
    )
    for backward in (False, True):
        what = "forward and backward" if backward else "forward"
        theirs = seconds(place, layers.step(layers.theirs(), backward))
        dense = seconds(place, layers.dense(backward))
        for name, cls, backend in _ways():
            measure = functools.partial(
                _speed, layers, cls, backend, backward, theirs, dense, ceiling
            )
            yield f"{name}, {what}", measure


def _speed(
    layers: Layers,
    cls: type[EPImplementation],
    backend: str,
    backward: bool,
    theirs: float,
    dense: float,
    ceiling: float,
) -> Found:
    ours = seconds(layers.place, layers.step(layers.ours(cls, backend), backward))
    speedup = theirs / ours
    return Found(
        layers.place.dry or speedup >= 1,
        speedup,
        "times as fast as transformers' grouped_mm experts",
        {
            "milliseconds": [round(1000 * t, 3) for t in (theirs, ours, dense)],
            "of_dense_gemm": round(dense / ours, 3),
            "of_ceiling": round(layers.flops(backward) / ours / ceiling, 3),
        },
    )


@check
def layer_memory(place: Place) -> Iterator[Case]:
    """The peak of a forward and backward over what was there, ours by that of transformers' experts."""
    for recompute in ("none", "gate_up"):
        yield f"recompute={recompute}", functools.partial(_memory, place, recompute)


def _memory(place: Place, recompute: str) -> Found:
    place.need_cuda()
    layers = Layers(place)
    theirs = _peak(layers, layers.theirs())
    ours = _peak(layers, layers.ours(recompute=recompute))
    more = {"MB": [round(x / 1e6) for x in (theirs, ours)]}
    return Found(ours <= theirs, ours / theirs, "of transformers' peak", more)


def _peak(layers: Layers, layer: moe_layer.Layer) -> int:
    step = layers.step(layer, True)
    step()
    for x in (*layers.given, *layers.experts.parameters()):
        x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
