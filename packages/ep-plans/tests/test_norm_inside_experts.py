"""A norm inside the experts: its gradient is summed over ranks of which some never run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from toy_decoder import Experts, Norm, Router, ToyConfig, build
from toy_equality import check_equal

from ep_mesh import DistributedConfig
from ep_testing import RankPool


class NormedExperts(Experts):
    """Normalizes each expert's output, once per expert that has rows."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.post_expert_norm = Norm(config.hidden_size)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            row, slot = torch.where(index == expert)
            gate, up = functional.linear(hidden[row], self.gate_up_proj[expert]).chunk(2, dim=-1)
            down = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
            down = self.post_expert_norm(down) * weights[row, slot, None]
            out = out.index_add(0, row, down)
        return out


class FewExperts(Router):
    """Chooses among the first experts only, which one rank of several holds."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(x, self.weight)
        weights, index = logits[:, :2].softmax(-1).topk(self.top_k, dim=-1)
        return logits, weights, index


def make(config: ToyConfig, *, idle: bool) -> nn.Module:
    model = build(config)
    generator = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        block = layer.mlp
        if not hasattr(block, "experts"):
            continue
        experts = NormedExperts(config).to(torch.float64)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator).double())
        block.experts = experts
        if idle:
            router = FewExperts(config).to(torch.float64)
            router.load_state_dict(block.gate.state_dict())
            block.gate = router
    return model


def run(rank: int, sizes: dict[str, Any], idle: bool) -> None:
    def build_normed(config: ToyConfig) -> nn.Module:
        return make(config, idle=idle)

    check_equal(ToyConfig(), DistributedConfig(**sizes), make=build_normed, size=2, micro=2)


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp_size": 4, "ep_size": 4},
        {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
        {"tp_size": 2, "fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
    ],
)
def test_every_rank_takes_part_in_the_norms_gradient(
    ranks: RankPool, sizes: dict[str, Any], idle: bool
) -> None:
    ranks.run(run, sizes, idle, world=4)
