"""The laws: each compares what a dispatcher gives on this rank with what it must give.

T = tokens of a batch, H = hidden size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .experts import KitExperts, LinearExperts, ScalingExperts, SmoothExperts
from .setting import Result, Setting

__all__ = ["LAWS", "Law"]

EXACT: tuple[type[KitExperts], ...] = (ScalingExperts, LinearExperts)
# Rounding of the whole chain (two projections, sums over slots) with a margin of about 8.
BOUNDS = {torch.float64: 1e-13, torch.float32: 4e-6}

Errors = Iterator[str]


@dataclass(frozen=True)
class Law:
    """What must hold.

    Attributes:
        what: in words.
        errors: what is wrong on this rank. It calls the dispatcher, and nothing else that communicates.
        kinds: the experts that it is tried with.
        needs: capabilities without which a dispatcher cannot keep it.
    """

    what: str
    errors: Callable[[Setting], Errors]
    kinds: tuple[type[KitExperts], ...] = EXACT
    needs: frozenset[str] = frozenset({"gradients"})


def _output(setting: Setting) -> Errors:
    hidden, ids, weights, _ = setting.inputs()
    before = hidden.detach().clone(), ids.clone(), weights.detach().clone()
    output = setting.dispatcher(hidden, ids, weights)
    yield from _different("output", output.detach(), setting.expected().output, setting.dtype)
    names = "hidden states", "expert ids", "routing weights"
    for name, now, then in zip(names, (hidden, ids, weights), before, strict=True):
        if not torch.equal(now.detach(), then):
            yield f"the {name} that it was given were changed in place"


def _gradients(setting: Setting) -> Errors:
    found, expected = setting.run(), setting.expected()
    yield from _different_gradients(found, expected, setting.dtype)


def _idle_experts(setting: Setting) -> Errors:
    found, expected = setting.run(), setting.expected()
    for name, gradient in expected.gradients.items():
        if not name.startswith("expert parameter"):
            continue
        assert gradient is not None
        if (given := found.gradients[name]) is None:
            yield f"{name} has no gradient (None), where experts without a token need zeros"
            continue
        for index in range(setting.num_local_experts):
            if not gradient[index].any() and not (given[index] == 0).all():
                number = setting.place.rank * setting.num_local_experts + index
                yield f"{name}: the gradient of idle expert {number} is not exactly zero"


def _poisoned_memory(setting: Setting) -> Errors:
    with _poisoned():
        found = setting.run()
    expected = setting.expected()
    yield from _different("output", found.output, expected.output, setting.dtype)
    yield from _different_gradients(found, expected, setting.dtype)


def _backward_twice(setting: Setting) -> Errors:
    found, expected = setting.run(backwards=2), setting.expected()
    double = {name: None if g is None else 2 * g for name, g in expected.gradients.items()}
    yield from _different_gradients(found, Result(expected.output, double), setting.dtype)


def _deterministic(setting: Setting) -> Errors:
    first = setting.run()
    for number in (2, 3, 4):
        again = setting.run()
        yield from (
            f"run {number} is not run 1: {error}"
            for error in (
                *_different("output", again.output, first.output, setting.dtype),
                *_different_gradients(again, first, setting.dtype),
            )
        )


def _no_grad(setting: Setting) -> Errors:
    hidden, ids, weights, _ = setting.inputs()
    with torch.no_grad():
        output = setting.dispatcher(hidden, ids, weights)
    if output.requires_grad:
        yield "the output requires grad, under torch.no_grad"
    yield from _different("output", output.detach(), setting.expected().output, setting.dtype)


def _in_flight(setting: Setting) -> Errors:
    # Experts see both calls, so their gradients are the sum.
    expected = [setting.expected(*seeds) for seeds in ((2, 1), (1, 2))]
    for order, name in (((0, 1), "in their order"), ((1, 0), "the last first")):
        calls = [setting.inputs(seed) for seed in (1, 2)]
        setting.experts.zero_grad()
        outputs = [setting.dispatcher(hidden, ids, weights) for hidden, ids, weights, _ in calls]
        for number in order:
            setting.check_history(outputs[number])
            outputs[number].backward(calls[number][3])
        for number, (hidden, _, weights, _) in enumerate(calls):
            found = setting.result(outputs[number], hidden, weights)
            errors = (
                *_different("output", found.output, expected[number].output, setting.dtype),
                *_different_gradients(found, expected[number], setting.dtype),
            )
            yield from (f"call {number + 1} of 2, backwards {name}: {error}" for error in errors)


def _real_numbers(setting: Setting) -> Errors:
    found, expected, bound = setting.run(), setting.expected(), BOUNDS[setting.dtype]
    for name, value, reference in (
        ("output", found.output, expected.output),
        *((f"gradient of {n}", found.gradients[n], g) for n, g in expected.gradients.items()),
    ):
        assert reference is not None
        given = torch.zeros_like(reference) if value is None else value.detach().cpu().double()
        if given.shape != reference.shape:
            yield f"{name}: shape {list(given.shape)}, expected {list(reference.shape)}"
            continue
        error = (given - reference).norm().item() / (reference.norm().item() or 1.0)
        if not error <= bound:
            yield f"{name}: relative error {error:.3g}, the bound is {bound:g}"


LAWS: dict[str, Law] = {
    "output": Law(
        "the output equals the exact one bit for bit; inputs stay as they were",
        _output,
        needs=frozenset(),
    ),
    "gradients": Law(
        "the gradients of hidden states, routing weights and experts equal the exact ones bit for bit",
        _gradients,
    ),
    "idle_experts": Law(
        "experts without a token have gradients of exactly zero",
        _idle_experts,
        kinds=(LinearExperts,),
    ),
    "poisoned_memory": Law(
        "output and gradients are exact with NaN in all memory that nobody wrote",
        _poisoned_memory,
        kinds=(LinearExperts,),
    ),
    "backward_twice": Law(
        "a second backward through the same graph gives the double",
        _backward_twice,
        kinds=(LinearExperts,),
        needs=frozenset({"gradients", "retain_graph"}),
    ),
    "deterministic": Law(
        "runs on the same input give the same bits", _deterministic, (SmoothExperts,)
    ),
    "no_grad": Law(
        "the output is the same under torch.no_grad, and has no history",
        _no_grad,
        needs=frozenset(),
    ),
    "in_flight": Law(
        "two calls before their backwards do not disturb each other",
        _in_flight,
        kinds=(LinearExperts,),
        needs=frozenset({"gradients", "in_flight"}),
    ),
    "real_numbers": Law(
        "output and gradients of gated experts over real numbers are within rounding of float64",
        _real_numbers,
        kinds=(SmoothExperts,),
    ),
}
"""By name, the laws that `check` runs."""


def _different(name: str, given: Tensor, expected: Tensor, dtype: torch.dtype) -> Errors:
    """What is wrong with `given`, which must have `dtype` and equal `expected` bit for bit."""
    if given.dtype != dtype:
        yield f"{name}: dtype {given.dtype}, expected {dtype}"
    if given.shape != expected.shape:
        yield f"{name}: shape {list(given.shape)}, expected {list(expected.shape)}"
        return
    a, b = given.detach().cpu().double(), expected.cpu().double()
    wrong = ~((a == b) | (a.isnan() & b.isnan()))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        yield (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} values differ, by up to "
            f"{(a - b)[wrong].abs().max().item():.6g}; the first at {list(at)}: {a[at].item():.9g}, "
            f"expected {b[at].item():.9g}"
        )


def _different_gradients(found: Result, expected: Result, dtype: torch.dtype) -> Errors:
    for name, reference in expected.gradients.items():
        given = found.gradients[name]
        if given is None:  # the law of idle experts sees to those that must not be None
            if reference is not None and reference.any():
                yield f"gradient of {name}: there is none"
        elif reference is None:
            yield f"gradient of {name}: there is one, where there was none"
        else:
            yield from _different(f"gradient of {name}", given, reference, dtype)


@contextmanager
def _poisoned() -> Iterator[None]:
    """New memory is NaN (integers: the largest): torch fills it in deterministic mode."""
    utilities: Any = torch.utils.deterministic
    mode = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = utilities.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        utilities.fill_uninitialized_memory = True
        # Operators without a deterministic variant are not the subject.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn)
        utilities.fill_uninitialized_memory = fill
