"""Triton versions of what this package computes, for CUDA; triton is imported at the first use.

Launching one costs no host synchronization, and sizes that only the device knows stay there, so a
CUDA graph can capture it (after a first call, which compiles). Nothing is tuned by measuring: block
sizes follow from sizes and dtypes. Sums are made in float32 (float64 for float64) in an order that
is the same in every run.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PRODUCT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels take these: tensors on CUDA, of a float dtype, none of a subclass.

    A subclass (fake, sharded) may have no memory of its own. What torch.compile traces stays plain.
    """
    return (
        tensors[0].device.type == "cuda"
        and not torch.compiler.is_compiling()
        and all(type(t) in (Tensor, nn.Parameter) and t.dtype in _DTYPES for t in tensors)
        and refusal(tensors[0].device) is None
    )


def products_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the grouped products don't run on `device` in `dtype`; None if they do."""
    if dtype not in _PRODUCT_DTYPES:
        return f"the Triton products do not take {dtype}"
    return refusal(device)


@functools.cache
def refusal(device: torch.device) -> str | None:
    """Why Triton does not run on `device`; None if it does. Imports triton on CUDA."""
    if device.type != "cuda":
        return f"the Triton kernels are for CUDA, not for {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "triton needs a GPU of compute capability 8.0 or newer"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton can't be imported ({error}): pip install triton"
    return None
