"""Factors of a cut weight: the parts' products are the weight's parts, and gradients the whole's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import Cut, ParameterSharding
from ep_plans.low_rank import (
    factor_shardings,
    gradient_reduction,
    reduce_gradients,
    transposed_sharding,
)
from ep_plans.sharding import cut_tensor
from ep_testing.pool import RankPool


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("packs", [1, 2])
def test_the_parts_multiply_to_the_part(dim: int, packs: int) -> None:
    left, right = torch.randn(4, 12, 3), torch.randn(4, 3, 8)
    cut = Cut("tp", dim, packs)
    shardings = factor_shardings(ParameterSharding(cut, "fsdp"), 3)
    for index in range(2):
        parts = [
            x if s.cut is None else cut_tensor(x, s.cut.dim, 2, index, s.cut.packs)
            for x, s in zip((left, right), shardings, strict=True)
        ]
        torch.testing.assert_close(
            parts[0] @ parts[1], cut_tensor(left @ right, dim, 2, index, packs)
        )
    whole = [s for s in shardings if s.cut is None]
    assert [s.partial_over for s in whole] == ([] if dim == 0 else ["tp"])
    assert all(s.data_axis is None for s in shardings)


def test_a_transposed_factor_is_cut_along_the_same() -> None:
    for dim in (0, 1, 2):
        sharding = ParameterSharding(Cut("tp", dim, 2))
        x = torch.randn(4, 4, 4)
        turned = transposed_sharding(sharding, 3).cut
        assert turned is not None
        assert torch.equal(cut_tensor(x.mT, turned.dim, 2, 1, 2), cut_tensor(x, dim, 2, 1, 2).mT)
    whole = ParameterSharding()
    assert transposed_sharding(whole, 2) == whole
    with pytest.raises(ValueError, match="2 or more dimensions, got 1"):
        factor_shardings(whole, 1)


def reduced(rank: int) -> list[Tensor]:
    """Gradients of three factors, of which one is used on one rank alone, and one nowhere."""
    mesh = ParallelMesh(DistributedConfig(tp_size=2, fsdp_size=2, ep_size=2).layout)
    shardings = [
        ParameterSharding(partial_over="tp", mean_over="dp"),
        ParameterSharding(Cut("ep", 0), mean_over="dp"),
        ParameterSharding(mean_over="dp"),
    ]
    reductions = [gradient_reduction(sharding, mesh) for sharding in shardings]
    leaves = [torch.ones(2, 3, requires_grad=True) for _ in shardings]
    first, second, _ = reduce_gradients(leaves, reductions)
    total = (first * 10.0**rank).sum()
    if rank == 0:
        total = total + second.mT.contiguous().sum()
    total.backward()
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None and grad.is_contiguous() for grad in grads)
    with torch.no_grad():
        assert reduce_gradients(leaves, reductions) == tuple(leaves)
    return grads  # type: ignore[return-value]


def test_gradients_are_reduced_together(ranks: RankPool) -> None:
    answers = ranks.run(reduced, world=4)
    for rank, (partial, expert, unused) in enumerate(answers):
        assert torch.equal(partial, torch.full((2, 3), 1111 / 2))  # summed over TP, mean over two
        same_experts = rank in (0, 2)  # efsdp: ranks at the same place of a pair
        assert torch.equal(expert, torch.full((2, 3), 0.5 if same_experts else 0.0))
        assert torch.equal(unused, torch.zeros(2, 3))
