"""Sharded parameters (DTensors) are computed with as their local parts, and get their gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ep_kernels import compacted_forward, module_experts_forward
from ep_testing import RankPool

sys.path.insert(0, str(Path(__file__).parent))
from kernels_reference import Experts, error, reference


def sharded(experts: nn.Module) -> nn.Module:
    """Its stacked weights cut over two ranks, the rest on both."""
    mesh = init_device_mesh("cpu", (2,))
    for module in experts.modules():
        for name, parameter in module._parameters.items():
            assert parameter is not None
            placement = Shard(0) if module is experts else Replicate()
            cut = distribute_tensor(parameter.detach(), mesh, [placement])
            module._parameters[name] = nn.Parameter(cut)
    return experts


def check(rank: int, own: bool) -> None:
    torch.manual_seed(0)
    whole = Experts(4, has_bias=True, has_post_expert_norm=True)
    torch.manual_seed(0)
    experts = sharded(Experts(4, has_bias=True, has_post_expert_norm=True))
    if own:
        forward = module_experts_forward(experts)
    else:

        def on_local(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            assert not any(isinstance(p, DTensor) for p in experts.parameters())
            return reference(experts, rows, ids, weights)  # type: ignore[arg-type]

        experts.num_experts = 2
        forward = compacted_forward(on_local, 2, experts)
    rows = torch.randn(5, 16, dtype=torch.float64)
    ids = torch.tensor([[0, 1], [2, 0], [1, 1], [2, 2], [0, 2]])  # 2 skips
    weights = torch.rand(5, 2, dtype=torch.float64)
    out = forward(rows, ids, weights)
    cotangent = torch.linspace(-9, 9, out.numel(), dtype=torch.float64).sin().view_as(out)
    out.backward(cotangent)
    expected = reference(
        whole, rows, ids.where(ids == 2, ids + 2 * rank).where(ids < 2, 4), weights
    )
    expected.backward(cotangent)
    assert error(out, expected) < 1e-14
    for name, parameter in experts.named_parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        right = whole.get_parameter(name).grad
        assert right is not None
        local = right if "norm" in name else right[2 * rank : 2 * rank + 2]
        assert error(parameter.grad.to_local(), local) < 1e-13, name


@pytest.mark.parametrize("own", [True, False])
def test_local_parts(ranks: RankPool, own: bool) -> None:
    ranks.run(check, own, world=2)
