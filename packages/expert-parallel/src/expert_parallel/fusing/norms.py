"""RMS norms of a model run by `ep_kernels.rms_norm`."""

from __future__ import annotations

import copy
import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ep_kernels import rms_norm

from .inputs import may_fuse
from .trial import agrees, can_try, draw

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In which norms compute in float32, as `ep_kernels` does. Models do so in float64 too."""


def fuse_norms(model: nn.Module) -> list[nn.Module]:
    """Let the norms of `model` that are RMS norms run as one operator. In place.

    A call that the operator does not take (few values on a CPU, float64, a weight of another dtype than the
    input, DTensors, torch.compile, which fuses by itself) runs the module's own code.

    Returns:
        Those modules, whose own `forward` is found again once the one in their `__dict__` is deleted. None
        where tensors hold no values (FakeTensorMode), so that nothing can be tried.
    """
    if not can_try():
        return []
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
        normalizes = len(names) == 1 and width > 0 and _normalizes(module, width, own[names[0]])
        verdicts[likeness] = names[0] if normalizes else None
    return verdicts[likeness]


def _normalizes(module: nn.Module, width: int, eps: float) -> bool:
    """Whether the module's own forward gives what the operator does: rows whose sizes lie far apart."""

    def own(x: Tensor, weight: Tensor) -> Any:
        stand_in = copy.copy(module)
        object.__setattr__(stand_in, "_parameters", {"weight": weight})
        return stand_in.forward(x)

    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[0.3 * eps**0.5], [2 * eps**0.5], [1.0], [30.0]], device="cpu")
    rows, grad = draw(generator, 4, width) * sizes, draw(generator, 4, width)
    weight = draw(generator, width)
    return agrees(lambda x, w: rms_norm(x, w, eps), own, [rows, weight], [grad])


@functools.cache
def _fused_forward(own: Any, epsilon: str) -> Any:
    """A forward that runs as one operator what it can, and `own` otherwise."""

    @functools.wraps(own)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            x: Any = args[0]
            weight: Any = module.weight
            if may_fuse(x, weight) and x.dtype in _DTYPES and weight.shape == x.shape[-1:]:
                return rms_norm(x, weight, getattr(module, epsilon))
        return own(module, *args, **kwargs)

    return forward
