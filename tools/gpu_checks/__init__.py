"""Checks for a machine with a GPU: a registry, and how one check is run.

A check is a function that is given a `Place` and yields cases: a name, and a function that measures and
gives back what it `Found`, or raises `Skip`. `tools/gpu_check.py` is the command.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """Where checks run: a GPU, or, to try the checks themselves, the CPU with tiny sizes."""

    device: torch.device

    @property
    def dry(self) -> bool:
        """Whether nothing is measured in earnest."""
        return self.device.type != "cuda"

    def need_cuda(self) -> None:
        """Raise a `Skip` on a CPU."""
        if self.dry:
            raise Skip("needs CUDA")


@dataclass(frozen=True)
class Found:
    """What a case gave."""

    ok: bool
    value: float
    unit: str
    more: dict[str, Any] = field(default_factory=dict)


class Skip(Exception):
    """A case that cannot run here, and why."""


Case = tuple[str, Callable[[], Found]]
Check = Callable[[Place], Iterator[Case]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check by its name."""
    CHECKS[function.__name__] = function
    return function


def at_most(value: float, bound: float, unit: str, **more: Any) -> Found:
    """A value with an upper bound. NaN fails."""
    return Found(value <= bound, value, unit, more | {"at_most": bound})


def worst(errors: Iterable[float]) -> float:
    """The largest, or NaN if any is that."""
    found = list(errors)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def run(name: str, place: Place) -> Iterator[dict[str, Any]]:
    """The lines of a check, one for each of its cases. A case that fails does not end it."""
    cases = CHECKS[name](place)
    while True:
        start = time.perf_counter()
        try:
            case, measure = next(cases)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001
            yield _line(name, start, error)
            return
        try:
            result: Found | Exception = measure()
        except Exception as error:  # noqa: BLE001
            result = error
        yield _line(f"{name}: {case}", start, result)


def _line(name: str, start: float, result: Found | Exception) -> dict[str, Any]:
    line: dict[str, Any] = {"name": name}
    if isinstance(result, Found):
        value = float(f"{result.value:.4g}")
        line |= {"ok": result.ok, "value": value, "unit": result.unit} | result.more
    elif isinstance(result, Skip):
        line |= {"ok": None, "skipped": str(result)}
    else:
        where = traceback.extract_tb(result.__traceback__)[-1]
        text = f"{type(result).__name__}: {result}"
        line |= {"ok": False, "error": text[-2000:], "at": f"{where.filename}:{where.lineno}"}
    return line | {"seconds": round(time.perf_counter() - start, 2)}
