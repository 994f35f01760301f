"""A step of a pipeline, from a step of each of its places.

[Note: places and few layers]
Each place of the `pp` axis is simulated by its first rank, over all micro-batches, so that its memory holds
as many of them at a time as the schedule lets it. The step's memory is that of the fullest place, its
time that of the slowest, with the wait for the others (see `stages`). Of places in the middle with alike
layers the first is simulated, which holds most micro-batches at a time. Where a place holds one stage, few of
its layers are kept, as `sampling` does, and one layer for each other place.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from ep_plans import plan_stages
from ep_plans.stages import Stages
from expert_parallel.meta import build_on_meta

from .layers import find_layers, kinds_of_layers
from .sampling import extrapolated, renumbered, sampled_layers, simulate_sampled
from .simulate import Setting, Step, simulate


def step_of(setting: Setting) -> tuple[Step, bool]:
    """The step, from all layers or, if the setting says so, from a few; and whether it is extrapolated."""
    if setting.config.pp_size > 1:
        with warnings.catch_warnings():  # nothing changes what a stage hands on
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            return simulate_pipeline(setting)
    return simulate_sampled(setting) if setting.sampled else (simulate(setting), False)


def simulate_pipeline(
    setting: Setting, simulated: Callable[[Setting], Step] = simulate
) -> tuple[Step, bool]:
    """The step, and whether it is extrapolated."""
    model = build_on_meta(copy.deepcopy(setting.model))
    stages = plan_stages(model, setting.config)
    kinds, name = kinds_of_layers(model), find_layers(model)
    steps: dict[object, Step] = {}
    sampled = False
    ranks = setting.config.layout.group("pp", 0)
    for place, rank in enumerate(ranks):
        of_place = replace(setting, rank=rank)
        held = {layer for stage in stages.of(place) for layer in stages.ranges[stage]}
        own = [sorted(held & {*kind}) for kind in kinds]
        alike = None if place in (0, len(ranks) - 1) else tuple(map(len, own))
        if (key := alike or place) in steps:
            continue
        base, longer = sampled_layers([of_kind for of_kind in own if of_kind])
        alone = len(stages) == len(ranks)
        if not (setting.sampled and alone and name) or len(held) <= len(base) + len(longer):
            steps[key] = simulated(of_place)
            continue
        found = [
            _with_layers(of_place, stages, place, kept) for kept in (base, *(k for k, _ in longer))
        ]
        short, *long = [
            replace(step, places=renumbered(step.places, name, given.layers or ()))
            for given, step in ((given, simulated(given)) for given in found)
        ]
        steps[key] = extrapolated(short, list(zip(long, (n for _, n in longer), strict=True)))
        sampled = True
    return together(list(steps.values())), sampled


def together(places: Sequence[Step]) -> Step:
    """Memory of the fullest place, all else of the slowest."""
    fullest = max(places, key=lambda step: max(peak.total for peak in step.peaks.values()))
    slowest = max(places, key=lambda step: step.total)
    return replace(
        slowest,
        steady=fullest.steady,
        peaks=fullest.peaks,
        places=fullest.places,
        local_parameters=fullest.local_parameters,
    )


def _with_layers(setting: Setting, stages: Stages, place: int, kept: Sequence[int]) -> Setting:
    """These layers at this place, one at each other."""
    layers = [list(kept) if p == place else [held.start] for p, held in enumerate(stages.ranges)]
    config = replace(setting.config, pp_stages=[len(of_stage) for of_stage in layers])
    return replace(setting, config=config, layers=tuple(itertools.chain(*layers)))
