"""Stages are balanced, and a model is split only where its layers hand on hidden states alone."""

from __future__ import annotations

import copy
import itertools
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ep_mesh import DistributedConfig
from ep_plans import Pipeline, Stages
from ep_plans.splitting import find_parts
from ep_plans.stage_forward import stage_forward
from ep_plans.stages import keep_stages, layer_costs, place_stages, plan_stages, stage_ranges

HIDDEN, VOCABULARY = 6, 20


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=7),
    st.integers(1, 7),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_the_largest_cost_is_the_least_possible(
    costs: list[int], stages: int, first: int, last: int
) -> None:
    if stages > len(costs):
        with pytest.raises(ValueError, match=f"at most {len(costs)} stages"):
            stage_ranges(costs, stages)
        return

    def largest(ends: tuple[int, ...]) -> int:
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    found = stage_ranges(costs, stages, first=first, last=last)
    ends = (0, *(held.stop for held in found))
    assert [i for held in found for i in held] == [*range(len(costs))]
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    assert largest(ends) == min(largest((0, *cuts, len(costs))) for cuts in every)


def test_equal_layers_are_spread_evenly() -> None:
    assert [len(held) for held in stage_ranges([1.0] * 10, 4)] in ([3, 3, 2, 2], [2, 2, 3, 3])


def test_where_the_stages_lie() -> None:
    assert place_stages(2, 2, "1f1b") == (0, 1)
    assert place_stages(6, 3, "interleaved_1f1b") == (0, 1, 2, 0, 1, 2)
    assert place_stages(6, 3, "zero_bubble") == (0, 1, 2, 2, 1, 0)
    stages = Stages((range(1), range(1, 3), range(3, 4), range(4, 6)), (0, 1, 1, 0))
    assert stages.of(0) == [0, 3]
    assert stages.of(1) == [1, 2]
    assert [stages.holder(layer) for layer in range(6)] == [0, 1, 1, 1, 0, 0]


class Layer(nn.Module):
    def __init__(self, size: int = HIDDEN) -> None:
        super().__init__()
        self.inside = nn.Linear(HIDDEN, size)
        self.outside = nn.Linear(size, HIDDEN)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.outside(self.inside(hidden_states).tanh())


class Plain(nn.Module):
    """A model as those of transformers are, in its least form."""

    def __init__(self, sizes: tuple[int, ...] = (HIDDEN,) * 4, *, tied: bool = False) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(num_hidden_layers=len(sizes))
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer(size) for size in sizes])
        self.norm = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.lm_head(self.norm(hidden_states))


class WithState(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        before = hidden_states
        for layer in self.layers:
            hidden_states, before = layer(hidden_states + before), hidden_states
        return self.lm_head(self.norm(hidden_states))


class WithShared(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        keys: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            keys[i] = hidden_states = layer(hidden_states)
        return self.lm_head(self.norm(hidden_states))


class TwoLoops(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers[:1]:
            hidden_states = layer(hidden_states)
        for layer in self.layers[1:]:
            hidden_states = layer(hidden_states)
        return self.lm_head(self.norm(hidden_states))


class NormTwice(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_states = self.norm(self.embed_tokens(input_ids))
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.lm_head(self.norm(hidden_states))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (WithState, "hand on before beside"),
        (WithShared, "hand on keys beside"),
        (TwoLoops, "in 2 loops"),
        (NormTwice, "norm is used both before and after"),
    ],
)
def test_models_that_can_not_be_split(model: type[Plain], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_parts(model())


def test_layers_that_share_a_parameter() -> None:
    model = Plain()
    model.layers[3].inside = model.layers[1].inside
    with pytest.raises(ValueError, match=r"share a parameter, 1\.inside\.weight"):
        find_parts(model)


def test_a_parameter_outside_of_all_parts() -> None:
    model = Plain()
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="scale belongs to no layer"):
        find_parts(model)


def test_costs_and_what_is_balanced_by_them() -> None:
    layers, first, last = layer_costs(Plain((64, 6, 6, 6, 6)))
    assert layers[0] > 5 * layers[1] == 5 * layers[2]
    assert last > first, "a head multiplies, an embedding looks up"
    stages = plan_stages(Plain((64, 6, 6, 6, 6)), DistributedConfig(pp_size=2))
    assert stages.ranges == (range(1), range(1, 5))
    given_ = DistributedConfig(pp_size=2, pp_stages=[3, 1])
    assert plan_stages(Plain(), given_).ranges == (range(3), range(3, 4))


def test_stages_that_do_not_fit_the_layers() -> None:
    with pytest.raises(ValueError, match=r"makes 6 pipeline stages.*'1f1b', which needs fewer"):
        plan_stages(Plain(), DistributedConfig(pp_size=3, pp_schedule="interleaved_1f1b"))
    with pytest.raises(ValueError, match="has 5 layers together"):
        plan_stages(Plain(), DistributedConfig(pp_size=2, pp_stages=[3, 2]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_stages_one_after_the_other_are_the_model(schedule: str, tied: bool) -> None:
    torch.manual_seed(0)
    whole = Plain((6, 9, 3, 5), tied=tied).double()
    ids = torch.randint(VOCABULARY, (2, 5))
    whole(ids).square().sum().backward()
    stages = plan_stages(whole, DistributedConfig(pp_size=2, pp_schedule=schedule))
    models = [copy.deepcopy(whole) for _ in range(2)]
    pipelines = [Pipeline.of(model, stages, place) for place, model in enumerate(models)]
    for model, pipeline in zip(models, pipelines, strict=True):
        model.zero_grad()
        keep_stages(model, pipeline)
    passed: tuple[Tensor, ...] = (ids,)
    for number, place in enumerate(stages.ranks):
        stage = stage_forward(models[place], pipelines[place], number)
        own = {p for i in stages.ranges[number] for p in models[place].layers[i].parameters()}
        assert own <= {*stage.parameters()}
        answer = stage(*passed)
        passed = answer if isinstance(answer, tuple) else (answer,)
    passed[0].square().sum().backward()
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        held = [dict(model.named_parameters(remove_duplicate=False)).get(name) for model in models]
        parts = {id(p): p.grad for p in held if p is not None and p.grad is not None}
        torch.testing.assert_close(sum(parts.values()), parameter.grad, msg=name)
