"""Pipeline stages: which layers each holds, and a model of which the rest was taken away."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ep_mesh import PP_SCHEDULES, DistributedConfig
from ep_plans.splitting import StageParts, find_parts
from ep_plans.styles.base import num_experts_of

_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)


@dataclass(frozen=True)
class Stages:
    """The stages of a model, first to last; a rank may hold several.

    Attributes:
        ranges: the numbers of the layers of each stage.
        ranks: the place on the `pp` axis of the rank that holds each stage.
    """

    ranges: tuple[range, ...]
    ranks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ranges)

    def of(self, pp_rank: int) -> list[int]:
        """The stages that the ranks at this place of the `pp` axis hold, ascending."""
        return [stage for stage, rank in enumerate(self.ranks) if rank == pp_rank]

    def holder(self, layer: int) -> int:
        """The place on the `pp` axis that holds a layer."""
        return next(
            rank for rank, held in zip(self.ranks, self.ranges, strict=True) if layer in held
        )


def place_stages(count: int, pp_size: int, schedule: str) -> tuple[int, ...]:
    """Which place on the `pp` axis holds each of `count` stages.

    In a loop (stage i at i modulo pp) except for `"zero_bubble"`, whose second half runs back (a V),
    so that one rank holds the first and the last stage.
    """
    loop = list(range(pp_size))
    if schedule == "zero_bubble":
        return tuple(itertools.islice(itertools.cycle(loop + loop[::-1]), count))
    return tuple(itertools.islice(itertools.cycle(loop), count))


def stage_ranges(
    costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[range, ...]:
    """Contiguous ranges of layers whose largest cost is least; of those, the most even ones.

    Args:
        costs: of each layer.
        stages: how many ranges, each of a layer at least.
        first: the cost of what the first stage holds beside its layers (the embedding).
        last: of what the last one holds beside them (the head).

    Raises:
        ValueError: more stages than layers.
    """
    count = len(costs)
    if stages > count:
        raise ValueError(
            f"{count} layers can't make {stages} pipeline stages of at least one layer each: use at "
            f"most {count} stages."
        )
    sums = [0.0, *itertools.accumulate(costs)]
    # For each number of layers the best split into the stages so far: (largest, squares), starts.
    best: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {0: ((0.0, 0.0), ())}
    for stage in range(stages):
        extra = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        longer: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            options = []
            for start, ((largest, squares), starts) in best.items():
                if start < end:
                    cost = sums[end] - sums[start] + extra
                    options.append(((max(largest, cost), squares + cost**2), (*starts, start)))
            longer[end] = min(options)
        best = longer
    starts = best[count][1]
    return tuple(range(a, b) for a, b in itertools.pairwise((*starts, count)))


def plan_stages(model: nn.Module, config: DistributedConfig) -> Stages:
    """The stages of `model`: as `config.pp_stages` gives them, else balanced. Pure.

    Raises:
        ValueError: the model can't be split, it has fewer layers than there are stages, or
            `pp_stages` is of another number of layers.
    """
    parts = find_parts(model)
    count = config.pp_size * PP_SCHEDULES[config.pp_schedule]
    if parts.count < count:
        raise ValueError(
            f"pp_size={config.pp_size} with pp_schedule={config.pp_schedule!r} makes {count} pipeline "
            f"stages, but {type(model).__name__} has {parts.count} layers: use a smaller pp_size"
            + (", or pp_schedule='1f1b', which needs fewer." if count > config.pp_size else ".")
        )
    if config.pp_stages is None:
        layers, first, last = layer_costs(model, parts)
        ranges = stage_ranges(layers, count, first=first, last=last)
    else:
        if sum(config.pp_stages) != parts.count:
            raise ValueError(
                f"pp_stages={config.pp_stages} has {sum(config.pp_stages)} layers together, but "
                f"{type(model).__name__} has {parts.count}."
            )
        ends = [0, *itertools.accumulate(config.pp_stages)]
        ranges = tuple(range(a, b) for a, b in itertools.pairwise(ends))
    return Stages(ranges, place_stages(count, config.pp_size, config.pp_schedule))


def layer_costs(
    model: nn.Module, parts: StageParts | None = None
) -> tuple[list[float], float, float]:
    """What each layer costs, what runs before the layers, and what runs after them.

    A cost is a share of all parameter bytes plus a share of all multiplications per token, where
    only the experts that a token is routed to count. On any device, meta included.
    """
    parts = find_parts(model) if parts is None else parts
    top_k = _top_k(model)
    embeddings = {id(p) for p in model.get_submodule(parts.embedding).parameters()}
    layers = [model.get_submodule(f"{parts.layers}.{i}") for i in range(parts.count)]
    first = [model.get_submodule(name) for name in parts.first]
    last = [model.get_submodule(name) for name in parts.last]
    sizes = [
        (
            sum(_bytes(module) for module in group),
            sum(_multiplications(module, top_k) for module in group),
        )
        for group in (*([layer] for layer in layers), first, last)
    ]
    # An embedding is looked up, not multiplied; the head that shares it multiplies.
    at, looked_up = sizes[-2], sum(p.numel() for p in _parameters(first) if id(p) in embeddings)
    sizes[-2] = (at[0], at[1] - looked_up)
    total_bytes = sum(size[0] for size in sizes) or 1
    total_work = sum(size[1] for size in sizes) or 1.0
    costs = [held / total_bytes + work / total_work for held, work in sizes]
    return costs[:-2], costs[-2], costs[-1]


class Passthrough(nn.Module):
    """Stands for a module that another stage holds: gives back what it is given first.

    Plain attributes of the module (its layer type) stay, since the model's forward may read them.

    Args:
        replaced: the module.
        index: the number of the layer, if it is one: a cache then hears how many tokens passed.
    """

    def __init__(self, replaced: nn.Module, index: int | None = None) -> None:
        super().__init__()
        plain = (str, int, float, bool, type(None))
        own = vars(self).keys()
        for name, value in vars(replaced).items():
            if name not in own and isinstance(value, plain):
                setattr(self, name, value)
        self.index = index

    def forward(self, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Give back the first argument."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if self.index is not None and cache is not None:
            _count_tokens(cache, self.index, hidden_states)
        return hidden_states


class TiedEmbedding(Passthrough):
    """The embedding's weight on the last stage, where the head that shares it runs."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__(replaced)
        self.weight = replaced.weight


def keep_stages(model: nn.Module, stages: Stages, pp_rank: int) -> StageParts:
    """Take from `model`, in place, what the ranks at a place of the `pp` axis don't hold.

    Returns:
        The parts of the whole model.
    """
    parts = find_parts(model)
    held = stages.of(pp_rank)
    mine = {layer for stage in held for layer in stages.ranges[stage]}
    for i in range(parts.count):
        if i not in mine:
            _replace(model, f"{parts.layers}.{i}", i)
    if 0 not in held:
        for name in parts.first:
            tied = parts.tied and name == parts.embedding and len(stages) - 1 in held
            embedding = model.get_submodule(name)
            _replace(model, name, with_=TiedEmbedding(embedding) if tied else None)
    if len(stages) - 1 not in held:
        for name in parts.last:
            _replace(model, name)
    keys: Mapping[str, str] | None = getattr(model, "all_tied_weights_keys", None)
    if keys:
        here = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        kept = {a: b for a, b in keys.items() if a in here and b in here}
        model.all_tied_weights_keys = kept  # type: ignore[assignment]
    return parts


def _replace(
    model: nn.Module, name: str, index: int | None = None, with_: nn.Module | None = None
) -> None:
    owner, _, leaf = name.rpartition(".")
    children = model.get_submodule(owner)._modules
    replaced = children[leaf]
    assert replaced is not None
    children[leaf] = Passthrough(replaced, index) if with_ is None else with_


def _count_tokens(cache: Any, index: int, hidden: Tensor) -> None:
    """Let a cache hear of the tokens of a layer that is elsewhere: keys without features."""
    layers = getattr(cache, "layers", None)
    if layers is None or (index < len(layers) and not hasattr(layers[index], "get_seq_length")):
        return
    nothing = hidden.new_empty(hidden.shape[0], 1, hidden.shape[1], 0)
    cache.update(nothing, nothing, index)


def _top_k(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    values = (getattr(text, name, None) for name in _TOP_K)
    return next((value for value in values if isinstance(value, int) and value > 0), 1)


def _parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters()]


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _multiplications(module: nn.Module, top_k: int) -> float:
    """Per token, of matrix products; of stacked experts `top_k` of them."""
    total = 0.0
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if parameter.ndim == 3 and (experts := num_experts_of(part)):
                total += parameter.numel() * min(top_k / experts, 1.0)
            elif parameter.ndim >= 2:
                total += parameter.numel()
    return total
