"""Released plans that leave something out: the gradients are right all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from toy_decoder import ATTENTION, DENSE, TP_PLAN, Norm, ToyConfig, build
from toy_equality import check_equal

from ep_mesh import DistributedConfig
from ep_testing.pool import RankPool

WITHOUT_NORMS = {key: style for key, style in ATTENTION.items() if "norm" not in key}
LAYOUT = {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}


class NormedEmbedding(nn.Embedding):
    """Inkling's embedding, which normalizes what it looks up."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.embed_norm = Norm(sizes[1])

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed_norm(super().forward(ids))


class StackedShared(nn.Module):
    """Inkling's shared experts: bare stacked parameters, the sum of all, scaled by a second input."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.zeros(2, inner, hidden))
        self.down_proj = nn.Parameter(torch.zeros(2, hidden, inner))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        up = functional.silu(torch.einsum("th,eih->eti", x, self.up_proj)) * scale
        return torch.einsum("eti,ehi->th", up, self.down_proj)


class Shared(nn.Module):
    """A block whose shared experts take the hidden states and a scale computed of them."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.scale = nn.Linear(config.hidden_size, 1)
        self.shared_experts = StackedShared(config.hidden_size, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared_experts(x.flatten(0, 1), self.scale(x).sigmoid().flatten(0, 1)).view_as(
            x
        )


class ShortConvolution(nn.Module):
    """A linear attention's convolution, whose weight its caller reads, and keeps in float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(hidden, hidden, 3, groups=hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        padded = functional.pad(x.mT.to(weight.dtype), (2, 0))
        return functional.conv1d(padded, weight, groups=weight.shape[0]).mT.to(x.dtype)


def randomized(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.double()


def normed_embedding(toy: ToyConfig) -> nn.Module:
    model = build(toy)
    model.model.embed_tokens = NormedEmbedding(toy.vocab_size, toy.hidden_size)
    return randomized(model)


def stacked_shared(toy: ToyConfig) -> nn.Module:
    model = build(toy)
    model.model.layers[0].mlp = Shared(toy)
    return randomized(model)


def short_convolution(toy: ToyConfig) -> nn.Module:
    model = build(toy)
    model.model.layers[0].mlp = ShortConvolution(toy.hidden_size)
    model = randomized(model)
    model.model.layers[0].mlp.float()
    return model


STACKED = {
    "layers.*.mlp.shared_experts.up_proj": "colwise",
    "layers.*.mlp.shared_experts.down_proj": "rowwise",
    "layers.*.mlp.shared_experts": "all_reduce",
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no rule for head norms": ({"base_model_tp_plan": WITHOUT_NORMS | DENSE}, {}),
    "copied heads, no rule for head norms": (
        {"base_model_tp_plan": WITHOUT_NORMS | DENSE, "num_key_value_heads": 1},
        {},
    ),
    "the output projection alone": (
        {"base_model_tp_plan": {"layers.*.self_attn.o_proj": "rowwise"}, "bias": True},
        {},
    ),
    "an embedding with a norm": ({}, {"make": normed_embedding}),
    "bare shared experts": ({"base_model_tp_plan": TP_PLAN | STACKED}, {"make": stacked_shared}),
    "a float32 convolution read by its caller": (
        {},
        {"make": short_convolution, "tolerance": 1e-6},
    ),
    "tied": ({"tied": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(ranks: RankPool, case: str) -> None:
    toy, options = CASES[case]

    def run(rank: int) -> None:
        check_equal(ToyConfig(**toy), DistributedConfig(**LAYOUT), **options)

    ranks.run(run, world=4)
