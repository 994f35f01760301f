"""Sharded parameters seen as plain tensors, and gradients for parameters that no row used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's local part (gradients flow back to the DTensor); any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    local: Tensor = to_local()
    return local


@contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, the module and what is below it hold the local parts of their DTensor parameters."""
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None and hasattr(parameter, "to_local"):
                    swapped.append((child._parameters, name, parameter))
        for parameters, name, parameter in swapped:
            parameters[name] = local_tensor(parameter)
        yield
    finally:
        for parameters, name, parameter in swapped:
            parameters[name] = parameter


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(o.shape, o.dtype, o.device) for o in others]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad[1:]
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if need else None
            for need, (shape, dtype, device) in zip(needed, ctx.shapes, strict=True)
        ]
        return grads[0], *zeros


def touch(out: Tensor, *others: Tensor) -> Tensor:
    """`out`, through which each of `others` gets a gradient of exact zeros.

    A rank whose experts got no row needs it: its reverse exchange and its gradient reduction are
    waited for by others. A product with zero would do too, but 0 x Inf is NaN.
    """
    if not torch.is_grad_enabled() or not any(o.requires_grad for o in others):
        return out
    touched: Tensor = _Touch.apply(out, *others)
    return touched
