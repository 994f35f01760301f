"""The shares of its peaks that a GPU at hand reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from .devices import Device, device_of


def calibrate(
    device: str | Device = "h100", *, size: int = 8192, on: torch.device | str = "cuda"
) -> Device:
    """The preset with the shares and launch time that are measured on the GPU at hand.

    Measured are a bf16 product, a copy, and the launch of small kernels from Python; links are as in
    the preset. (Run on a CPU alone so far, where it measures the CPU.)

    Args:
        device: the preset whose peaks the shares are of.
        size: rows and columns of the product; the copy moves as many bf16 elements.
        on: where it is measured.

    Costs about a second and `12 * size**2` bytes.
    """
    preset = device_of(device)
    a, b = (torch.ones(size, size, dtype=torch.bfloat16, device=on) for _ in range(2))
    small = torch.ones(16, device=on)
    out = torch.empty_like(a)
    product = _seconds(lambda: torch.mm(a, b, out=out), a.device, 10)
    copy = _seconds(lambda: out.copy_(a), a.device, 10)
    launch = _seconds(lambda: small.add_(1.0), a.device, 1000)
    return replace(
        preset,
        matmul_share=2.0 * size**3 / product / preset.flops_16bit,
        memory_share=2.0 * a.nbytes / copy / preset.memory_bandwidth,
        launch_seconds=launch,
    )


def _seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Of one call, when many follow each other."""
    for _ in range(3):
        run()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    _synchronize(device)
    return (time.perf_counter() - start) / times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
