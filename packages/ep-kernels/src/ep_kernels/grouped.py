"""Matrix products over rows grouped by expert, and the choice of who computes them.

Shape letters: E experts held here, R rows, S slots, A and B sizes of one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import deep_gemm, triton_kernels
from .products import GroupedProducts, LoopProducts, Products

Backend = Literal["grouped_mm", "triton", "loop", "deep_gemm"]
BackendRequest = Literal["auto", Backend]

# torch.nn.functional.grouped_mm takes these, on CPU and CUDA (torch 2.11 to 2.13).
_GROUPED_MM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes that each row of a grouped_mm operand must be a multiple of


class Choice(NamedTuple):
    """A backend and the reason that it was chosen."""

    backend: Backend
    reason: str


def choose_backend(
    device: torch.device, dtype: torch.dtype, *sizes: int, backend: BackendRequest = "auto"
) -> Choice:
    """Who computes products of `dtype` on `device` whose inner and outer sizes are `sizes`.

    `auto` is `grouped_mm` (torch's) on CUDA wherever it works: it needs no host synchronization.
    Else `triton` (this package's kernels), which needs none either, for sizes that grouped_mm does not
    take. Else `loop`, one product per expert, which works for all and reads the offsets on the host. On a
    CPU that costs nothing, and the loop is as fast as grouped_mm, for weight gradients of many
    experts two to four times as fast; while torch.compile traces bfloat16, grouped_mm keeps the
    graph whole. `deep_gemm` is taken when asked for only: it compiles its kernels when they first
    run, with a CUDA toolkit, and pads each expert's rows.

    Raises:
        ValueError: the backend that is asked for is unknown or cannot compute this; it says why.
    """
    if backend != "auto":
        check_backend(backend)
        if refusal := _REFUSALS[backend](device, dtype, sizes):
            raise ValueError(_refused(backend, refusal))
        return Choice(backend, "it was asked for")
    if _offsets_are_at_hand(device):
        return Choice("loop", f"one product per expert is the fastest way for {dtype} on a CPU")
    if refusal := _grouped_mm_refusal(device, dtype, sizes):
        by_triton = _triton_refusal(device, dtype, sizes) is None
        return Choice("triton" if by_triton else "loop", refusal)
    return Choice("grouped_mm", "torch's grouped_mm takes this device, dtype and sizes")


def check_backend(backend: BackendRequest, device: torch.device | None = None) -> None:
    """Raise a ValueError if there is no such backend, or if it can't run on `device`."""
    if backend not in get_args(Backend) and backend != "auto":
        known = ", ".join(("auto", *get_args(Backend)))
        raise ValueError(f"backend={backend!r} is unknown; known are {known}.")
    if device is None or backend != "deep_gemm":
        return
    if refusal := deep_gemm.place_refusal(device):
        raise ValueError(_refused(backend, refusal))


def _refused(backend: Backend, refusal: str) -> str:
    return (
        f'the backend "{backend}" cannot compute these experts: {refusal}. "auto", the default, finds '
        "one that can."
    )


def _grouped_mm_refusal(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[int]
) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"torch's grouped_mm has no kernel for {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's grouped_mm needs a GPU of compute capability 8.0 or newer"
    if dtype not in _GROUPED_MM_DTYPES:
        return f"torch's grouped_mm does not take {dtype}"
    if torch.compiler.is_compiling() and dtype is not torch.bfloat16:
        return "torch.compile knows torch's grouped_mm in bfloat16 only"
    if odd := [size for size in sizes if size * dtype.itemsize % _ALIGNMENT]:
        step = _ALIGNMENT // dtype.itemsize
        return f"torch's grouped_mm needs sizes that are multiples of {step}: {odd}"
    return None


def _triton_refusal(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile can't trace the Triton products"
    return triton_kernels.products_refusal(device, dtype)


# What each backend says to products that it can't compute; None to others.
_REFUSALS: dict[Backend, Callable[[torch.device, torch.dtype, Sequence[int]], str | None]] = {
    "grouped_mm": _grouped_mm_refusal,
    "loop": lambda *_: None,
    "deep_gemm": deep_gemm.products_refusal,
    "triton": _triton_refusal,
}


def _offsets_are_at_hand(device: torch.device) -> bool:
    """Whether reading them on the host costs nothing."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


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


class _ProductsMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, products: Products) -> Tensor:
        need_rows, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if need_weight else None, weight if need_rows else None)
        ctx.products, ctx.like = products, (weight.mT.is_contiguous(), weight.dtype)
        return products.rows(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight = ctx.saved_tensors
        products, grad = ctx.products, grads[0].contiguous()
        swapped, dtype = ctx.like
        rows_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            rows_grad = products.rows(grad, weight.mT)
        if ctx.needs_input_grad[1] and swapped:  # so must be its gradient
            weight_grad = products.matrices(grad, rows, dtype).mT
        elif ctx.needs_input_grad[1]:
            weight_grad = products.matrices(rows, grad, dtype)
        return rows_grad, weight_grad, None


def products_mm(rows: Tensor, weight: Tensor, *, products: Products) -> Tensor:
    """As `grouped_mm`, by `products`. Differentiable once."""
    out: Tensor = _ProductsMM.apply(rows, weight, products)
    return out


def expert_of_slot(offsets: Tensor, slots: Tensor) -> Tensor:
    """The expert of each slot: [S], for `slots` of length S."""
    position = torch.arange(slots.shape[0], device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, position, right=True)


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


def products_of(backend: Backend, offsets: Tensor, num_slots: int) -> Products:
    """The products of `num_slots` slots by a backend. The loop's cost one host synchronization.

    Raises:
        ValueError: by the loop, if the offsets fall or don't end at `num_slots`.
    """
    if backend == "grouped_mm":
        return GroupedProducts(offsets)
    if backend == "deep_gemm":
        return deep_gemm.DeepGemmProducts(offsets, num_slots)
    if backend == "triton":
        from .triton_kernels.products import TritonProducts

        return TritonProducts(offsets, num_slots)
    counts = counts_of(offsets, num_slots)
    if sum(counts) != num_slots:
        raise ValueError(
            f"the last of offsets, {sum(counts)}, must be the number of slots, {num_slots}."
        )
    return LoopProducts(counts)
