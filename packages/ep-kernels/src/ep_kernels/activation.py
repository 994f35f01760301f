"""The activation between the two projections, scaled by the routing weight, and its gradients.

Shape letters: S slots, U width of the first projection, I intermediate size.

[Note: blocks of slots]
Several elementwise passes over [S, U] cost more in memory and in memory traffic than in arithmetic.
They are made over a block of slots at a time: on a CPU a block stays in the cache, so that also
float32 copies of 16-bit values cost little; on a GPU it is large enough to fill the device, and its
temporaries do not grow with S.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .rows import accumulation_dtype
from .spec import ExpertsSpec

_CPU_BLOCK = 1 << 17  # elements: half a MiB in float32
_GPU_BLOCK = 1 << 24


def scaled_activation(spec: ExpertsSpec, pre: Tensor, weights: Tensor, inner: int) -> Tensor:
    """`weights * activation(pre)`: the input of the second projection.

    Args:
        spec: tells the activation.
        pre: [S, U], the first projection.
        weights: [S], the routing weights.
        inner: I.

    Returns:
        [S, I] of the dtype of `pre`. In 16 bit the product is computed in float32 and rounded once.
    """
    out = pre.new_empty(pre.shape[0], inner)
    fast = is_silu_gated(spec)
    for part, weight, to in blocks(pre.shape[1], pre, weights.unsqueeze(1), out):
        if fast:
            gate, up = part.to(accumulation_dtype(part.dtype)).chunk(2, dim=-1)
            hidden = nn.functional.silu(gate).mul_(up)
        else:
            hidden = activate(spec, part)
        torch.mul(hidden, weight, out=to)
    return out


def scaled_activation_backward(
    spec: ExpertsSpec, pre: Tensor, weights: Tensor, grad: Tensor, *, out: Tensor | None
) -> Tensor:
    """The gradients of `scaled_activation`, which is computed again on the way.

    Args:
        spec: tells the activation.
        pre: [S, U], the first projection.
        weights: [S], the routing weights.
        grad: [S, I], the gradient of the scaled activation. Overwritten by the scaled activation
            itself, which the gradient of the second weight needs.
        out: [S, U], receives the gradient of `pre`; may be `pre`. None: it is not wanted.

    Returns:
        [S], the gradient of the weights, of the dtype that sums are kept in.
    """
    wide = accumulation_dtype(pre.dtype)
    weights_grad = pre.new_empty(pre.shape[0], dtype=wide)
    backward = _silu_gated_backward if is_silu_gated(spec) else _any_backward
    # `out` may be `pre`: each block is read before it is written.
    tensors = (pre, weights.unsqueeze(1), grad, weights_grad, pre if out is None else out)
    for part, weight, into, dot, to in blocks(pre.shape[1], *tensors):
        backward(spec, part, weight.to(wide), into, dot, None if out is None else to)
    return weights_grad


def _silu_gated_backward(
    spec: ExpertsSpec, pre: Tensor, weight: Tensor, grad: Tensor, dot: Tensor, out: Tensor | None
) -> None:
    wide = weight.dtype
    gate, up = pre.to(wide).chunk(2, dim=-1)
    received = grad.to(wide)
    activated = nn.functional.silu(gate)
    hidden = activated * up
    torch.sum(received * hidden, dim=-1, out=dot)
    received = received * weight
    torch.mul(hidden, weight, out=grad)
    if out is not None:
        gate_grad = torch.ops.aten.silu_backward(received * up, gate)
        to_gate, to_up = out.chunk(2, dim=-1)
        torch.mul(received, activated, out=to_up)
        to_gate.copy_(gate_grad)


def _any_backward(
    spec: ExpertsSpec, pre: Tensor, weight: Tensor, grad: Tensor, dot: Tensor, out: Tensor | None
) -> None:
    with torch.enable_grad():
        leaf = pre.detach().requires_grad_(out is not None)
        activated = activate(spec, leaf)
    hidden, received = activated.detach(), grad.to(weight.dtype)
    torch.sum(received * hidden, dim=-1, out=dot)
    received = (received * weight).to(activated.dtype)
    torch.mul(hidden, weight, out=grad)
    if out is not None:
        (gradient,) = torch.autograd.grad(activated, leaf, received)
        out.copy_(gradient)


def activate(spec: ExpertsSpec, pre: Tensor) -> Tensor:
    """The spec's activation in the dtype of `pre`, out of reach of autocast.

    Backward, where autocast is off, computes it again and must find the same values.
    """
    with torch.autocast(pre.device.type, enabled=False):
        return spec.activate(pre)


def is_silu_gated(spec: ExpertsSpec) -> bool:
    """Whether the activation is `silu(gate) * up`, the gates first: by far the most frequent one."""
    activation = spec.activation
    silu = activation in ("silu", nn.functional.silu) or type(activation) is nn.SiLU
    return silu and spec.gated and spec.gate is None and not spec.interleaved


def uses_parameters(spec: ExpertsSpec, like: Tensor, width: int) -> bool:
    """Whether the activation has parameters of its own that want a gradient (tried on one row)."""
    if not torch.is_grad_enabled() or is_silu_gated(spec):
        return False
    return activate(spec, like.detach().new_zeros(1, width)).requires_grad


def blocks(width: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of tensors of S slots, a block of slots at a time, for passes over [S, width]."""
    elements = _CPU_BLOCK if tensors[0].device.type == "cpu" else _GPU_BLOCK
    slots = max(1, elements // max(1, width))
    return zip(*(tensor.split(slots) for tensor in tensors), strict=True)
