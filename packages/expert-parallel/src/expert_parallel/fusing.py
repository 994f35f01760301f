"""Compute by one operator what a model composes of several: its RMS norms.

[Note: what is recognised]
A norm's code is not read but tried. Its own forward runs on a few rows whose sizes lie far apart, in
float32 and in bfloat16, with a random weight, and its output and gradients have to be those of
`ep_kernels.rms_norm` up to rounding. A weight of `1 + w`, a gate, dropped or detached terms and another
epsilon all fail, and such a module stays as it is. Nothing is changed but the `forward` of that one
object: other models of the process keep theirs.
"""

from __future__ import annotations

import copy
import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ep_kernels import rms_norm

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
"""Of a gradient's and an output's error: a few roundings of the dtype."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In which norms compute in float32, as `ep_kernels` does. Models do so in float64 too."""


def fuse_norms(model: nn.Module) -> list[nn.Module]:
    """Let the norms of `model` that are RMS norms run as one operator. In place.

    A call that the operator does not take (float64, a weight of another dtype than the input,
    DTensors, torch.compile, which fuses by itself) runs the module's own code.

    Returns:
        Those modules, whose own `forward` is found again once the one in their `__dict__` is deleted.
    """
    verdicts: dict[Any, str | None] = {}
    found = []
    for module in model.modules():
        if not _may_be_norm(module):
            continue
        epsilon = _recognise(module, verdicts)
        if epsilon is not None:
            run = _fused_forward(type(module).forward, epsilon)
            module.forward = MethodType(run, module)
            found.append(module)
    return found


def _may_be_norm(module: nn.Module) -> bool:
    """Whether it has one vector named weight and nothing else, and a forward of one input."""
    if isinstance(module, nn.RMSNorm) or "forward" in module.__dict__:
        return False
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or len(module._parameters) > 1:
        return False
    if module._buffers or module._modules:
        return False
    return len(inspect.signature(type(module).forward).parameters) == 2


def _recognise(module: nn.Module, verdicts: dict[Any, str | None]) -> str | None:
    """The name of the module's epsilon if it is an RMS norm. Modules that are alike are tried once."""
    own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    own.pop("training", None)
    width = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
    likeness = type(module), width, repr(sorted(own.items()))
    if likeness not in verdicts:
        names = [name for name in _EPSILONS if isinstance(own.get(name), float)]
        agrees = len(names) == 1 and width > 0 and _agrees(module, width, own[names[0]])
        verdicts[likeness] = names[0] if agrees else None
    return verdicts[likeness]


def _agrees(module: nn.Module, width: int, eps: float) -> bool:
    """Whether the module's own forward gives what the operator does, gradients included."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cpu", dtype=torch.float32)
    sizes = torch.tensor([[0.3 * eps**0.5], [2 * eps**0.5], [1.0], [30.0]], device="cpu")
    rows, grad, weight = draw(4, width) * sizes, draw(4, width), draw(width)
    for dtype, bound in _BOUNDS.items():
        stand_in = copy.copy(module)
        object.__setattr__(stand_in, "_parameters", {})
        stand_in.weight = nn.Parameter(weight.to(dtype))
        try:
            own = _tried(stand_in.forward, rows.to(dtype), stand_in.weight, grad.to(dtype))
        except Exception:  # noqa: BLE001 (whatever it needs, it is no plain norm)
            return False
        fused = _tried(
            lambda x, weight=stand_in.weight: rms_norm(x, weight, eps),
            rows.to(dtype),
            stand_in.weight,
            grad.to(dtype),
        )
        for mine, theirs in zip(fused, own, strict=True):
            if theirs is None or theirs.shape != mine.shape or theirs.dtype != mine.dtype:
                return False
            error = torch.linalg.vector_norm(mine.double() - theirs.double(), dim=-1)
            size = torch.linalg.vector_norm(mine.double(), dim=-1)
            if not bool((error <= bound * size).all()):
                return False
    return True


@torch.enable_grad()
def _tried(function: Any, rows: Tensor, weight: Tensor, grad: Tensor) -> list[Any]:
    """The output and the gradients of rows and weight."""
    leaf = rows.requires_grad_()
    out = function(leaf)
    return [out.detach(), *torch.autograd.grad(out, (leaf, weight), grad, allow_unused=True)]


@functools.cache
def _fused_forward(own: Any, epsilon: str) -> Any:
    """A forward that runs as one operator what it can, and `own` otherwise."""

    @functools.wraps(own)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
            x: Any = args[0]
            weight: Any = module.weight
            if _takes(x, weight):
                return rms_norm(x, weight, getattr(module, epsilon))
        return own(module, *args, **kwargs)

    return forward


def _takes(x: Any, weight: Any) -> bool:
    """Whether the operator takes these, as the module's own code would."""
    return (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and not isinstance(x, DTensor)
        and not isinstance(weight, DTensor)
        and x.dtype in _DTYPES
        and weight.dtype is x.dtype
        and weight.device == x.device
        and weight.shape == x.shape[-1:]
    )
