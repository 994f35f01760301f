"""Matrix products over rows grouped by expert, and the choice of who computes them.

Shape letters: E experts held here, R rows, A inner and B outer size of one product.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Backend = Literal["grouped_mm", "loop"]

# torch.nn.functional.grouped_mm takes these, on CPU and CUDA (torch 2.11 to 2.13).
_GROUPED_MM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes that each row of a grouped_mm operand must be a multiple of


class Choice(NamedTuple):
    """A backend and the reason that it was chosen."""

    backend: Backend
    reason: str


def choose_backend(device: torch.device, dtype: torch.dtype, *sizes: int) -> Choice:
    """Who computes products of `dtype` on `device` whose inner and outer sizes are `sizes`.

    `grouped_mm` (torch's) wherever it works: on CUDA it needs no host synchronization; on a CPU it
    is as fast as the loop in float32 and twice as fast in bfloat16. Else `loop`, one product per
    expert, which works for all and copies the offsets to the host once.
    """
    if device.type not in ("cpu", "cuda"):
        return Choice("loop", f"torch's grouped_mm has no kernel for {device.type}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return Choice("loop", "torch's grouped_mm needs a GPU of compute capability 8.0 or newer")
    if dtype not in _GROUPED_MM_DTYPES:
        return Choice("loop", f"torch's grouped_mm does not take {dtype}")
    odd = [size for size in sizes if size * dtype.itemsize % _ALIGNMENT]
    if odd:
        step = _ALIGNMENT // dtype.itemsize
        return Choice("loop", f"torch's grouped_mm needs sizes that are multiples of {step}: {odd}")
    return Choice("grouped_mm", "torch's grouped_mm takes this device, dtype and sizes")


class _ContiguousGradient(torch.autograd.Function):
    """Identity with a contiguous gradient: grouped_mm's backward refuses an expanded one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].contiguous()


def grouped_mm(rows: Tensor, weight: Tensor, *, offsets: Tensor) -> Tensor:
    """`rows` [R, A] times each expert's part of `weight` [E, A, B]: [R, B]. No host sync.

    Rows past `offsets[-1]` are left unwritten, here and in the gradient: the caller masks them.
    """
    out = torch.nn.functional.grouped_mm(rows.contiguous(), weight, offs=offsets)
    contiguous: Tensor = _ContiguousGradient.apply(out)
    return contiguous


def loop_mm(rows: Tensor, weight: Tensor, *, counts: list[int]) -> Tensor:
    """As `grouped_mm`, one product per expert that has rows; `counts` sums to R >= 1."""
    groups = zip(rows.split(counts), weight.unbind(0), strict=True)
    return torch.cat([group @ matrix for group, matrix in groups if group.shape[0]])


def counts_of(offsets: Tensor, num_rows: int) -> list[int]:
    """The number of rows of each expert. One host synchronization.

    Raises:
        ValueError: if the offsets fall or go past `num_rows`.
    """
    ends: list[int] = offsets.tolist()
    counts = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if any(count < 0 for count in counts) or (ends and ends[-1] > num_rows):
        raise ValueError(
            f"offsets {ends} must not fall and must stay within the {num_rows} rows: the offset of "
            "an expert is the end of its rows."
        )
    return counts
