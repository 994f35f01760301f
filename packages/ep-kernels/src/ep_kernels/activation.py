"""The activation between the two projections, scaled by the routing weight, and its gradients.

Shape letters: S slots, U width of the first projection, I intermediate size.

[Note: blocks of slots]
Several elementwise passes over [S, U] cost more in memory and in memory traffic than in arithmetic.
They are made over a block of slots at a time: on a CPU a block stays in the cache, so that also
float32 copies of 16-bit values cost little; on a GPU it is large enough to fill the device, and its
temporaries do not grow with S.

[Note: activations that can't be computed twice]
Backward computes the activation again, by autograd, from the first projection as it was. One that
draws random numbers (dropout) would draw others; one that works in place would overwrite what it is
to be computed from. So each is tried on one row of zeros: what draws goes by plain autograd, what
writes is given copies. The trial looks at the operators that run: it stops before one draws, so
that the state of no generator is read or changed, which on a GPU the host might have to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import triton_kernels
from ._compat import SILU_CLASSES, TorchDispatchMode
from .rows import accumulation_dtype
from .spec import ExpertsSpec

_CPU_BLOCK = 1 << 17  # elements: half a MiB in float32
_GPU_BLOCK = 1 << 24


def scaled_activation(
    spec: ExpertsSpec, pre: Tensor, weights: Tensor, inner: int, *, copies: bool
) -> Tensor:
    """`weights * activation(pre)`: the input of the second projection.

    Args:
        spec: tells the activation.
        pre: [S, U], the first projection.
        weights: [S], the routing weights.
        inner: I.
        copies: whether the activation is given copies, as one that works in place needs.

    Returns:
        [S, I] of the dtype of `pre`. In 16 bit the product is computed in float32 and rounded once.
    """
    out = pre.new_empty(pre.shape[0], inner)
    fast = is_silu_gated(spec)
    if fast and triton_kernels.takes(pre):
        from .triton_kernels import activation as kernels

        kernels.scaled_swiglu(pre, weights, out)
        return out
    for part, weight, to in blocks(pre.shape[1], pre, weights.unsqueeze(1), out):
        if fast:
            gate, up = part.to(accumulation_dtype(part.dtype)).chunk(2, dim=-1)
            hidden = nn.functional.silu(gate).mul_(up)
        else:
            hidden = activate(spec, part, copies=copies)
        torch.mul(hidden, weight, out=to)
    return out


def scaled_activation_backward(
    spec: ExpertsSpec,
    pre: Tensor,
    weights: Tensor,
    grad: Tensor,
    *,
    copies: bool,
    out: Tensor | None,
) -> Tensor:
    """The gradients of `scaled_activation`, which is computed again on the way.

    Args:
        spec: tells the activation.
        pre: [S, U], the first projection.
        weights: [S], the routing weights.
        grad: [S, I], the gradient of the scaled activation. Overwritten by the scaled activation
            itself, which the gradient of the second weight needs.
        copies: as for `scaled_activation`.
        out: [S, U], receives the gradient of `pre`; may be `pre`. None: it is not wanted.

    Returns:
        [S], the gradient of the weights, of the dtype that sums are kept in.
    """
    wide = accumulation_dtype(pre.dtype)
    weights_grad = pre.new_empty(pre.shape[0], dtype=wide)
    fast = is_silu_gated(spec)
    if fast and triton_kernels.takes(pre, grad):
        from .triton_kernels import activation as kernels

        kernels.scaled_swiglu_backward(pre, weights, grad, weights_grad, out)
        return weights_grad
    # `out` may be `pre`: each block is read before it is written.
    tensors = (pre, weights.unsqueeze(1), grad, weights_grad, pre if out is None else out)
    for part, weight, into, dot, to in blocks(pre.shape[1], *tensors):
        wanted = None if out is None else to
        if fast:
            _silu_gated_backward(part, weight.to(wide), into, dot, wanted)
        else:
            _any_backward(spec, part, weight.to(wide), into, dot, wanted, copies)
    return weights_grad


def _silu_gated_backward(
    pre: Tensor, weight: Tensor, grad: Tensor, dot: Tensor, out: Tensor | None
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
    spec: ExpertsSpec,
    pre: Tensor,
    weight: Tensor,
    grad: Tensor,
    dot: Tensor,
    out: Tensor | None,
    copies: bool,
) -> None:
    with torch.enable_grad():
        leaf = pre.detach().requires_grad_(out is not None)
        activated = activate(spec, leaf, copies=copies)
    hidden, received = activated.detach(), grad.to(weight.dtype)
    torch.sum(received * hidden, dim=-1, out=dot)
    received = (received * weight).to(activated.dtype)
    torch.mul(hidden, weight, out=grad)
    if out is not None:
        (gradient,) = torch.autograd.grad(activated, leaf, received)
        out.copy_(gradient)


def activate(spec: ExpertsSpec, pre: Tensor, *, copies: bool = False) -> Tensor:
    """The spec's activation in the dtype of `pre`, out of reach of autocast.

    Backward, where autocast is off, computes it again and must find the same values.
    """
    with torch.autocast(pre.device.type, enabled=False):
        return spec.activate(pre, copies=copies)


def is_silu_gated(spec: ExpertsSpec) -> bool:
    """Whether the activation is `silu(gate) * up`, the gates first: by far the most frequent one."""
    activation = spec.activation
    kind = type(activation)
    silu = activation in ("silu", nn.functional.silu) or (
        f"{kind.__module__}.{kind.__qualname__}" in SILU_CLASSES
    )
    return silu and spec.gated and spec.gate is None and not spec.interleaved


class Trial(NamedTuple):
    """What an activation does besides computing.

    Attributes:
        learns: it has parameters of its own that want a gradient.
        draws: it draws random numbers.
        writes: it may write to what it is applied to.
    """

    learns: bool
    draws: bool
    writes: bool


def try_activation(spec: ExpertsSpec, like: Tensor, width: int) -> Trial:
    """Try the activation on one row of `width` zeros, of the dtype and device of `like`.

    Not cached: a module may change between calls, by `train()` for one. Under torch.compile and for
    `is_silu_gated` nothing is tried: what the activation says of itself is believed.
    """
    if torch.compiler.is_compiling() or is_silu_gated(spec):
        writes = bool(getattr(spec.activation, "inplace", False))
        return Trial(learns=False, draws=False, writes=writes)
    row = like.detach().new_zeros(1, width)
    version = 0 if row.is_inference() else row._version  # inference tensors keep none
    watch = _Watch()
    try:
        with watch:
            out = activate(spec, row)
    except _DrawsError:
        pass
    if watch.draws:  # and what it would have done next is not known
        return Trial(learns=False, draws=True, writes=True)
    writes = not row.is_inference() and row._version != version
    return Trial(learns=out.requires_grad, draws=False, writes=writes)


class _DrawsError(BaseException):
    """Ends a trial. No `Exception`, which an activation might catch."""


class _Watch(TorchDispatchMode):
    """Stops at the first operator that draws random numbers, before it does."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.draws = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without it, an activation that is itself compiled would run as written ever after."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.draws = True
            raise _DrawsError
        return func(*args, **(kwargs or {}))


def fits_a_block(slots: int, width: int, device: torch.device) -> bool:
    """Whether passes over [S, U] are made in one."""
    return slots <= _slots_of_block(width, device)


def blocks(width: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of tensors of S slots, a block of slots at a time, for passes over [S, width]."""
    slots = _slots_of_block(width, tensors[0].device)
    return zip(*(tensor.split(slots) for tensor in tensors), strict=True)


def _slots_of_block(width: int, device: torch.device) -> int:
    elements = _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK
    return max(1, elements // max(1, width))
