"""What `ep plan` tells of pipeline stages."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

from rich.console import Console
from torch import nn

from ep_mesh import DistributedConfig
from ep_plans import ParameterSharding, Pipeline, Plans, plan_parameters, plan_stages, resolve_plans
from ep_plans.sizes import hidden_size
from ep_plans.stages import keep_stages
from expert_parallel.cli.traffic import Traffic

Held = tuple[nn.Module, Plans, dict[str, ParameterSharding]]


def heaviest_part(
    model: nn.Module, config: DistributedConfig, weight: Callable[[Held], float]
) -> Held:
    """What the ranks of one place on the `pp` axis hold, with the largest `weight`; all without stages."""
    plans = resolve_plans(model, config)
    shardings = plan_parameters(model, plans, config)
    if config.pp_size == 1:
        return model, plans, shardings
    stages = plan_stages(model, config)
    parts = []
    for place in range(config.pp_size):
        pipeline = Pipeline.of(model, stages, place)
        part = copy.deepcopy(model)
        keep_stages(part, pipeline)
        here = {name for name, _ in part.named_parameters(remove_duplicate=False)}
        own = {name: sharding for name, sharding in shardings.items() if name in here}
        parts.append((part, pipeline.part_of(plans), own))
    return max(parts, key=weight)


def show_stages(out: Console, model: nn.Module, config: DistributedConfig) -> None:
    """Print which layers each stage has, and where it is."""
    if config.pp_size == 1:
        return
    stages = plan_stages(model, config)
    per_stage = config.layout.world_size // config.pp_size
    out.print(f"{len(stages)} stages, schedule {config.pp_schedule}:")
    for number, (held, place) in enumerate(zip(stages.ranges, stages.ranks, strict=True)):
        extra = (", embedding" if number == 0 else "") + (
            ", head" if number == len(stages) - 1 else ""
        )
        ranks = f"{place * per_stage} to {(place + 1) * per_stage - 1}"
        out.print(f"stage {number}: layers {held.start} to {held.stop - 1}{extra}; ranks {ranks}")
    out.print()


def stage_traffic(
    model: nn.Module, config: DistributedConfig, *, tokens: int, itemsize: int
) -> list[Traffic]:
    """The hidden states that a rank hands on and their gradients that it hands back in a step.

    Each of T tokens' H numbers, for each stage of the rank that has a next one and a stage before:
    the most that a rank has.
    """
    if config.pp_size == 1:
        return []
    stages = plan_stages(model, config)
    ranks = stages.ranks
    sends = [0] * config.pp_size
    for here, following in itertools.pairwise(ranks):
        if here != following:
            sends[here] += 1
            sends[following] += 1
    size = tokens * hidden_size(model) * itemsize
    return [Traffic("pp", "hidden states and gradients", float(max(sends) * size))]
