"""A step of a deep model from steps of a few of its layers.

[Note: what is linear in the number of layers]
Layers of one kind run the same operators. So bytes, kernels, FLOPs, collectives and, in a steady state, time
grow by the same amount with each further layer of a kind. The base keeps the first and the last layer of
each kind; for each kind one more step has one layer more in between. Peaks are followed by place (a module,
in a phase), each place's memory grows linearly, and the largest place of the whole model is its peak.

L = layers of the model, G = kinds of layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from expert_parallel.meta import build_on_meta

from .layers import find_layers, kinds_of_layers
from .memory import Peak
from .simulate import Setting, Step, simulate
from .timeline import Timeline

_COUNTED = ("steady", "sent", "calls", "flops", "seconds", "moved", "kernels")
_CLOCKS = ("busy", "waited_for_link", "waited_for_host", "carried", "launches")


def sampled_layers(kinds: Sequence[Sequence[int]]) -> tuple[list[int], list[tuple[list[int], int]]]:
    """Which layers the base keeps; and for each kind with more: those of its longer step, and its layers left out."""
    base = sorted({number for kind in kinds for number in (kind[0], kind[-1])})
    longer = [
        (sorted([*base, kind[len(kind) // 2]]), len(kind) - 2) for kind in kinds if len(kind) > 2
    ]
    return base, longer


def simulate_sampled(
    setting: Setting, simulated: Callable[[Setting], Step] = simulate
) -> tuple[Step, bool]:
    """The step, and whether it is extrapolated; see the note above. Simulates 1 + G steps of 2 to 3 layers a kind.

    Models of few layers, or whose list of layers is not found, are simulated whole.
    """
    model = build_on_meta(copy.deepcopy(setting.model))
    kinds = kinds_of_layers(model)
    base, longer = sampled_layers(kinds)
    name = find_layers(model)
    if name is None or sum(map(len, kinds)) <= len(base) + len(longer):
        return simulated(setting), False

    def run(kept: list[int]) -> Step:
        step = simulated(replace(setting, layers=tuple(kept)))
        return replace(step, places=renumbered(step.places, name, kept))

    short = run(base)
    return extrapolated(short, [(run(kept), number) for kept, number in longer]), True


def extrapolated(base: Step, longer: Sequence[tuple[Step, int]]) -> Step:
    """`base` and, of each longer step, so many times what it has more."""

    def line(value: Callable[[Step], float]) -> float:
        return value(base) + sum(n * (value(step) - value(base)) for step, n in longer)

    def counted(value: Callable[[Step], Mapping[Any, float]]) -> dict[Any, Any]:
        keys = dict.fromkeys(key for step in (base, *(s for s, _ in longer)) for key in value(step))
        whole = all(isinstance(n, int) for n in value(base).values())
        found = {key: line(lambda step: value(step).get(key, 0)) for key in keys}  # noqa: B023
        return {key: round(n) for key, n in found.items()} if whole else found

    places: dict[tuple[str, str], Peak] = {}
    for key in base.places:
        if all(key in step.places for step, _ in longer):
            kinds = counted(lambda step: step.places[key].by_kind)  # noqa: B023
            places[key] = Peak(sum(kinds.values()), kinds, *key)
    peaks: dict[str, Peak] = {}
    for (phase, _), peak in places.items():
        if phase not in peaks or peak.total > peaks[phase].total:
            peaks[phase] = peak
    timeline = None
    if base.timeline is not None:
        timeline = Timeline(base.timeline.device)
        for name in _CLOCKS:
            setattr(timeline, name, line(lambda step: getattr(step.timeline, name)))  # noqa: B023
        timeline.launches = round(timeline.launches)
    whole = {
        name: counted(lambda step: getattr(step, name))  # noqa: B023
        for name in _COUNTED
    }
    assert set(whole) <= {field.name for field in fields(Step)}
    return Step(
        **whole,
        peaks=peaks,
        places=places,
        parameters=base.parameters,
        local_parameters=round(line(lambda step: step.local_parameters)),
        host_reads=round(line(lambda step: step.host_reads)),
        timeline=timeline,
        total=line(lambda step: step.total),
        bubble=line(lambda step: step.bubble),
    )


def renumbered(
    places: Mapping[tuple[str, str], Peak], layers: str, kept: Sequence[int]
) -> dict[tuple[str, str], Peak]:
    """Places with the numbers that the layers have in the whole model."""
    found = {}
    for (phase, place), peak in places.items():
        if place.startswith(f"{layers}."):
            number, dot, rest = place[len(layers) + 1 :].partition(".")
            place = f"{layers}.{kept[int(number)]}{dot}{rest}"
        found[phase, place] = replace(peak, place=place)
    return found
