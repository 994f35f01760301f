"""The experts of a layer, forward and backward, beside their grouped products alone.

R rows of width H, K experts per row of E, all on this rank.
"""

from __future__ import annotations

from dataclasses import replace

import moe_layer
import pytest
import torch

from ep_kernels import module_experts_forward

SIZES = replace(moe_layer.SMALL, experts=8, top_k=2)
R, K, E = 512, SIZES.top_k, SIZES.experts


@pytest.fixture
def given():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = torch.rand(R, E).topk(K).indices
    rows = torch.randn(R, SIZES.hidden, requires_grad=True)
    return rows, ids, torch.rand(R, K, requires_grad=True)


@pytest.mark.benchmark(group="experts, forward and backward")
@pytest.mark.parametrize("recompute", ["none", "gate_up"])
def test_experts(benchmark, given, recompute):
    experts = moe_layer.experts_module(SIZES, 1)
    forward = module_experts_forward(experts, recompute=recompute)

    def step() -> torch.Tensor:
        experts.zero_grad()
        out = forward(*given)
        out.backward(torch.ones_like(out))
        return out

    out = benchmark(step)
    assert torch.allclose(out.double(), plain(experts, *given), atol=1e-4)


def plain(
    experts: torch.nn.Module, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum over each row's experts, one expert after the other, in float64."""
    first, second = (p.detach().double() for p in (experts.gate_up_proj, experts.down_proj))
    x, total = rows.detach().double(), torch.zeros(R, SIZES.hidden, dtype=torch.float64)
    for expert in range(E):
        gate, up = (x @ first[expert].T).chunk(2, dim=-1)
        weight = (weights.detach().double() * (ids == expert)).sum(1, keepdim=True)
        total += weight * ((torch.nn.functional.silu(gate) * up) @ second[expert].T)
    return total


@pytest.mark.benchmark(group="experts, forward and backward")
def test_products_alone(benchmark, given):
    counts = torch.bincount(given[1].flatten(), minlength=E)
    benchmark(moe_layer.gemms(SIZES, counts.cumsum(0).int()))
