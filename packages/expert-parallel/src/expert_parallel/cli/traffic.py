"""What a training step sends, by axis, from the plan alone.

[Note: what is counted]
Bytes that one rank sends in forward and backward of one batch of T tokens a data shard, where a ring
of P ranks sends `(P - 1) / P` of a tensor to gather or to reduce-scatter it, and twice that to
all-reduce it. A token goes to each other rank of its EP group that holds one of its experts once,
there and back, and so do the gradients: four passes. With experts chosen evenly, K of E without
repetition, a token needs experts of `P (1 - C(E - E/P, K) / C(E, K))` ranks, of which `(P - 1) / P`
are others. Not counted: layers that activation checkpointing runs again, routing tables, the norm.

Shapes: T tokens of a data shard, H hidden size, K experts per token, E experts of a layer, P ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from torch import nn

from ep_mesh import DistributedConfig
from ep_plans import ParameterSharding, Plans, num_experts_of
from ep_plans.sequence import moved_by_slices
from ep_plans.sizes import experts_per_token, hidden_size
from ep_plans.styles import FSDP_STYLES, STYLES

_Sent = defaultdict[tuple[str, str], float]


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends.

    Attributes:
        axis: the axis of the layout that they go over.
        what: the kind of communication.
        sent: bytes of a step.
    """

    axis: str
    what: str
    sent: float


def step_traffic(
    model: nn.Module,
    plans: Plans,
    shardings: dict[str, ParameterSharding],
    config: DistributedConfig,
    *,
    tokens: int,
    itemsize: int,
) -> list[Traffic]:
    """What a rank sends in a training step; see the note above.

    Args:
        model: on any device, not sharded.
        plans: its resolved plans.
        shardings: of `plan_parameters`.
        config: the sizes.
        tokens: T.
        itemsize: bytes of an element of a parameter and of a hidden state.

    Raises:
        ValueError: the model's config doesn't tell H, or with experts K.
    """
    sent = {
        **_activations(model, plans, config, tokens * itemsize),
        **_parameters(model, plans, shardings, config, itemsize),
    }
    order = ("tp", "ep", "fsdp", "fsdp_tp", "efsdp", "dp", "dp_replicate")
    return [
        Traffic(axis, what, number)
        for (axis, what), number in sorted(sent.items(), key=lambda item: order.index(item[0][0]))
        if number
    ]


def distinct_other_ranks(experts: int, ranks: int, slots: int) -> float:
    """Of how many other ranks a token needs experts, on average over even choices."""
    missed = math.comb(experts - experts // ranks, slots) / math.comb(experts, slots)
    return (ranks - 1) * (1 - missed)


def _activations(
    model: nn.Module, plans: Plans, config: DistributedConfig, token_bytes: int
) -> _Sent:
    sent: _Sent = defaultdict(float)
    if config.tp_size == config.ep_size == 1:
        return sent
    layout, modules = config.layout, dict(model.named_modules())
    hidden = hidden_size(model)
    slots = experts_per_token(model) if plans.experts else 0

    def add(axis: str, reduced: float, gathered: float) -> None:
        ring = token_bytes * (layout.size(axis) - 1) / layout.size(axis)
        sent[axis, "all-reduce"] += 2 * ring * reduced
        sent[axis, "all-gather"] += ring * gathered

    for axis, rules in (("tp", plans.tp), ("ep", plans.ep)):
        for name, style in rules.items():
            if name in modules:
                moved = STYLES[style].moved(model, name, hidden, slots)
                add(axis, moved.reduced, moved.gathered)
    slices = config.enable_sequence_parallel and config.tp_size > 1
    if slices:
        moved = moved_by_slices(model, plans, hidden)
        add("tp", moved.reduced, moved.gathered)
    for name in plans.experts:
        experts = num_experts_of(modules[name])
        if not STYLES[plans.ep[name]].dispatches or experts is None:
            continue
        if config.ep_implementation == "all_reduce":
            add("ep", 2 * hidden + slots, 0)
            continue
        if not slices:  # each TP rank dispatches its slice; outputs and gradients are gathered
            add("tp", 0, 2 * hidden + slots)
        ranks = distinct_other_ranks(experts, layout.ep, slots)
        rows = 4 * token_bytes / layout.tp * ranks * hidden
        sent["ep", "dispatch and combine"] += rows
    return sent


def _parameters(
    model: nn.Module,
    plans: Plans,
    shardings: dict[str, ParameterSharding],
    config: DistributedConfig,
    itemsize: int,
) -> _Sent:
    sent: _Sent = defaultdict(float)
    layout = config.layout
    gathered, reduced = (2, 4) if config.fsdp_mixed_precision else (itemsize, itemsize)
    for name, parameter in model.named_parameters():
        sharding = shardings[name]
        elements = replace(sharding, data_axis=None).local_numel(parameter.shape, layout, 0)

        def add(axis: str, what: str, size: float) -> None:
            sent[axis, what] += size * (layout.size(axis) - 1) / layout.size(axis)

        axis = sharding.data_axis
        if axis is not None:
            times = 2 if _is_resharded(name, plans) else 1
            add(axis, "all-gather of parameters", times * elements * gathered)
            add(axis, "reduce-scatter of gradients", elements * reduced)
            shard = elements / layout.size(axis)
            add("dp_replicate", "all-reduce of gradients", 2 * shard * reduced)
        if sharding.partial_over is not None and axis != "fsdp_tp":
            add(sharding.partial_over, "all-reduce of gradients", 2 * elements * itemsize)
        if sharding.mean_over is not None:
            add(sharding.mean_over, "all-reduce of gradients", 2 * elements * itemsize)
    return sent


def _is_resharded(name: str, plans: Plans) -> bool:
    """Whether the FSDP unit of a parameter frees it after forward, and gathers it again."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:end])
        if path in plans.experts:
            return True
        if path in plans.fsdp:
            return FSDP_STYLES[plans.fsdp[path]]
    return False  # the unit of the whole model is kept
