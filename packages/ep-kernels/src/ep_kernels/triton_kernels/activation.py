"""SwiGLU scaled by the routing weight. Shape letters: S slots, I intermediate size.

Each kernel is one pass over memory: forward reads [S, 2I] and writes [S, I]; backward reads
[S, 2I] and [S, I], and writes as much.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import wide

_BLOCK = 1024  # elements of a slot that are handled at a time


@triton.jit
def _forward_kernel(
    pre, weights, out, inner, stride, tiles, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)  # products with a stride may pass 2^31
    slot = program // tiles
    column = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gates = pre + slot * stride + column
    gate = tl.load(gates, mask=inside, other=0).to(WIDE)
    up = tl.load(gates + inner, mask=inside, other=0).to(WIDE)
    hidden = gate * tl.sigmoid(gate) * up * tl.load(weights + slot).to(WIDE)
    tl.store(out + slot * inner + column, hidden.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    pre,
    weights,
    grad,
    dots,
    out,
    inner,
    pre_stride,
    grad_stride,
    out_stride,
    WANTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + slot).to(WIDE)
    dot = tl.zeros((BLOCK,), WIDE)
    for first in range(0, inner, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < inner
        gates = pre + slot * pre_stride + column
        gate = tl.load(gates, mask=inside, other=0).to(WIDE)
        up = tl.load(gates + inner, mask=inside, other=0).to(WIDE)
        into = grad + slot * grad_stride + column
        received = tl.load(into, mask=inside, other=0).to(WIDE)
        tl.debug_barrier()  # what is read is written to: every thread has read
        sigmoid = tl.sigmoid(gate)
        activated = gate * sigmoid
        dot += received * activated * up
        tl.store(into, (activated * up * weight).to(grad.dtype.element_ty), mask=inside)
        if WANTED:
            received *= weight
            gate_grad = received * up * sigmoid * (1 + gate - activated)
            to = out + slot * out_stride + column
            tl.store(to, gate_grad.to(out.dtype.element_ty), mask=inside)
            tl.store(to + inner, (received * activated).to(out.dtype.element_ty), mask=inside)
    tl.store(dots + slot, tl.sum(dot, axis=0))


def scaled_swiglu(pre: Tensor, weights: Tensor, out: Tensor) -> None:
    """`weights * silu(gate) * up`, rounded once.

    Args:
        pre: [S, 2I], the gates first; the elements of a row side by side.
        weights: [S].
        out: [S, I], contiguous.
    """
    slots, inner = out.shape
    if out.numel() == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(inner))
    tiles = triton.cdiv(inner, block)
    with torch.cuda.device_of(pre):
        _forward_kernel[(slots * tiles,)](
            pre,
            weights.contiguous(),
            out,
            inner,
            pre.stride(0),
            tiles,
            WIDE=wide(pre.dtype),
            BLOCK=block,
        )


def scaled_swiglu_backward(
    pre: Tensor, weights: Tensor, grad: Tensor, dots: Tensor, out: Tensor | None
) -> None:
    """The gradients of `scaled_swiglu`, which is computed again on the way.

    Args:
        pre: as in `scaled_swiglu`.
        weights: as in `scaled_swiglu`.
        grad: [S, I], the gradient received; overwritten by what `scaled_swiglu` gave.
        dots: [S], receives the gradient of the weights.
        out: [S, 2I], receives the gradient of `pre`, and may be `pre`. None: it is not wanted.
    """
    slots, inner = grad.shape
    if slots == 0:
        return
    to = pre if out is None else out
    with torch.cuda.device_of(pre):
        _backward_kernel[(slots,)](
            pre,
            weights.contiguous(),
            grad,
            dots,
            to,
            inner,
            pre.stride(0),
            grad.stride(0),
            to.stride(0),
            WANTED=out is not None,
            WIDE=wide(pre.dtype),
            BLOCK=min(_BLOCK, triton.next_power_of_2(max(1, inner))),
        )
