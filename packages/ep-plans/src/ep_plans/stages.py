"""Pipeline stages: which layers each holds, and a model of which the rest was taken away."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor, nn

from ep_mesh import PP_SCHEDULES, DistributedConfig
from ep_plans.patterns import is_below
from ep_plans.resolve import Plans
from ep_plans.sizes import experts_per_token
from ep_plans.splitting import StageParts, find_parts
from ep_plans.styles.base import num_experts_of


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


class TiedWeight(Passthrough):
    """The weight that embedding and head share, where the other one of them runs.

    The parameter stays under its name, so that files may hold it under either.

    Attributes:
        shell: the module, without its parameters.
    """

    shell: nn.Module

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__(replaced)
        self.weight = replaced.weight
        shell = copy.copy(replaced)
        shell._parameters = dict.fromkeys(replaced._parameters)
        vars(self)["shell"] = shell  # not a child


@dataclass(frozen=True)
class Pipeline:
    """What a rank knows of a model that was split.

    Attributes:
        stages: the stages of the model.
        parts: its parts.
        here: the stages that this rank holds.
        modules: the names of all modules of the whole model, children before their parents.
        tensors: the names in the state dict of the whole model, in its order.
    """

    stages: Stages
    parts: StageParts
    here: tuple[int, ...]
    modules: tuple[str, ...]
    tensors: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, stages: Stages, pp_rank: int) -> Self:
        """For a model that is still whole. Pure."""
        return cls(
            stages,
            find_parts(model),
            tuple(stages.of(pp_rank)),
            tuple(children_first(model)),
            tuple(model.state_dict(keep_vars=True)),
        )

    @property
    def is_first(self) -> bool:
        """Whether this rank runs the embedding."""
        return 0 in self.here

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the head."""
        return len(self.stages) - 1 in self.here

    def runs(self, name: str) -> bool:
        """Whether this rank runs the module, or the module of the parameter, of that name."""
        if is_below(name, [self.parts.layers]) and name != self.parts.layers:
            layer = int(name[len(self.parts.layers) + 1 :].partition(".")[0])
            return any(layer in self.stages.ranges[stage] for stage in self.here)
        if is_below(name, self.parts.first):
            return self.is_first
        return self.is_last or not is_below(name, self.parts.last)

    def stage_of(self, name: str) -> int:
        """The stage that runs the module, or the module of the parameter, of that name."""
        if is_below(name, [self.parts.layers]) and name != self.parts.layers:
            layer = int(name[len(self.parts.layers) + 1 :].partition(".")[0])
            return next(stage for stage, held in enumerate(self.stages.ranges) if layer in held)
        return 0 if is_below(name, self.parts.first) else len(self.stages) - 1

    def with_added(
        self, tensors: Mapping[str, Sequence[str]], modules: Mapping[str, Sequence[str]]
    ) -> Self:
        """With names that modules of any stage got below them since, by the name of that module."""
        ends = {name.rpartition(".")[0]: place for place, name in enumerate(self.tensors)}
        added = {ends[owner]: names for owner, names in tensors.items()}
        return replace(
            self,
            tensors=tuple(
                each
                for place, name in enumerate(self.tensors)
                for each in (name, *added.get(place, ()))
            ),
            modules=tuple(each for name in self.modules for each in (*modules.get(name, ()), name)),
        )

    def part_of(self, plans: Plans) -> Plans:
        """The rules for the modules that this rank runs."""
        tp, ep, fsdp = (
            {name: style for name, style in rules.items() if self.runs(name)}
            for rules in (plans.tp, plans.ep, plans.fsdp)
        )
        embedding, head = self.parts.embedding, self.parts.head
        if self.parts.tied and not self.is_first and self.is_last and embedding in plans.fsdp:
            # The plan gave the one unit of both to the embedding.
            fsdp[head] = plans.fsdp[embedding]
        return replace(plans, tp=tp, ep=ep, fsdp=fsdp)

    def tied_holder(self, model: nn.Module) -> tuple[TiedWeight, nn.Module] | None:
        """The holder of a tied weight that runs elsewhere, and the module here that uses it."""
        if not self.parts.tied or self.is_first == self.is_last:
            return None
        names = (self.parts.embedding, self.parts.head)
        holder, user = (model.get_submodule(n) for n in (names[::-1] if self.is_first else names))
        assert isinstance(holder, TiedWeight)
        return holder, user


def keep_stages(model: nn.Module, pipeline: Pipeline) -> None:
    """Take from `model`, in place, what this rank's stages don't hold."""
    parts = pipeline.parts
    for i in range(parts.count):
        name = f"{parts.layers}.{i}"
        if not pipeline.runs(name):
            _replace(model, name, functools.partial(Passthrough, index=i))
    for names, runs in ((parts.first, pipeline.is_first), (parts.last, pipeline.is_last)):
        for name in () if runs else names:
            tied = parts.tied and name in (parts.embedding, parts.head)
            held = tied and (pipeline.is_first or pipeline.is_last)
            _replace(model, name, TiedWeight if held else Passthrough)
    keys: Mapping[str, str] | None = getattr(model, "all_tied_weights_keys", None)
    if keys:
        here = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        kept = {a: b for a, b in keys.items() if a in here and b in here}
        model.all_tied_weights_keys = kept  # type: ignore[assignment]


def _replace(model: nn.Module, name: str, make: Callable[[nn.Module], nn.Module]) -> None:
    owner, _, leaf = name.rpartition(".")
    children = model.get_submodule(owner)._modules
    replaced = children[leaf]
    assert replaced is not None
    children[leaf] = make(replaced)


def children_first(module: nn.Module, name: str = "") -> Iterator[str]:
    """The names of a module's modules, children before their parents."""
    for child, part in module.named_children():
        yield from children_first(part, f"{name}.{child}" if name else child)
    yield name


def _count_tokens(cache: Any, index: int, hidden: Tensor) -> None:
    """Let a cache hear of the tokens of a layer that is elsewhere: keys and values of one zero.

    transformers takes keys without elements for no tokens. The cache of a linear attention, which has no
    length, hears that it was used.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        return
    layer = layers[index] if index < len(layers) else None
    if isinstance(used := getattr(layer, "has_previous_state", None), dict):
        used.update(dict.fromkeys(used, True))
    if layer is None or hasattr(layer, "get_seq_length"):
        zeros = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
        cache.update(zeros, zeros, index)


def _top_k(model: nn.Module) -> int:
    try:
        return experts_per_token(model)
    except ValueError:
        return 1


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
