"""Whether a function computes what an operator does: both are run on a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
"""Of the relative error of a row of an output or a gradient: a few roundings of the dtype."""


def can_try() -> bool:
    """Whether tensors that are made now hold values; those of a FakeTensorMode don't."""
    return type(torch.empty(0, device="cpu")) is Tensor


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers in float32 on the CPU, whatever the defaults are."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def agrees(
    operator: Callable[..., Any],
    own: Callable[..., Any],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    constants: Sequence[Tensor] = (),
) -> bool:
    """Whether `own` gives what `operator` does, row by row, in float32 and in bfloat16.

    Gradient mode, inference mode, autocast and the default device of the caller don't matter;
    tensors have to hold values (`can_try`).

    Args:
        operator: a function of the inputs and the constants, which gives a tensor or several.
        own: a function of the same.
        inputs: float32 on the CPU; their gradients are compared too.
        grads: of each output.
        constants: passed after the inputs.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        for dtype, bound in _BOUNDS.items():
            given = [[x.to(dtype, copy=True) for x in part] for part in (inputs, constants, grads)]
            expected = _outputs_and_gradients(operator, *given)
            try:
                found = _outputs_and_gradients(own, *given)
            except Exception:  # noqa: BLE001 (it takes something else)
                return False
            if len(found) != len(expected) or not all(
                map(_is_close, found, expected, [bound] * len(found))
            ):
                return False
    return True


def _outputs_and_gradients(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, *constants)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    into = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    return [*(each.detach() for each in outputs), *into]


def _is_close(found: Tensor | None, expected: Tensor | None, bound: float) -> bool:
    if found is None or expected is None:
        return False
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return False
    error = torch.linalg.vector_norm(found.double() - expected.double(), dim=-1)
    return bool((error <= bound * torch.linalg.vector_norm(expected.double(), dim=-1)).all())
