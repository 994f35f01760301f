"""Norm and clipping over several meshes, against torch's own on one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_decoder import ToyConfig, build, loss_of
from toy_equality import relative_error, token_ids

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import clip_grad_norm_, full_tensor, grad_norm, parallelize
from ep_testing.pool import RankPool

NORMS = [1.0, 2.0, 3.0, math.inf]
LAYOUTS: list[dict[str, Any]] = [
    {"tp_size": 2, "fsdp_size": 4, "ep_size": 4},
    {"tp_size": 8, "ep_size": 8},
    {"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 4, "fsdp_over_tp": False},
    {"tp_size": 8, "fsdp_over_tp": False},  # plain tensors beside DTensors
]


def with_gradients(sizes: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """One process' model and the sharded one, after a backward."""
    toy, config = ToyConfig(num_key_value_heads=4), DistributedConfig(**sizes)
    ids = token_ids(config, toy.vocab_size, 2, 5, 1)[0]
    expected = build(toy)
    torch.stack([loss_of(expected, part) for part in ids]).mean().backward()
    mesh = ParallelMesh(config.layout)
    model = parallelize(build(toy), mesh, config)
    loss_of(model, ids[mesh.layout.batch_of(mesh.rank)]).backward()
    return expected, model


def compare(rank: int, sizes: dict[str, Any]) -> None:
    expected, model = with_gradients(sizes)
    before = {name: p.grad.clone() for name, p in expected.named_parameters()}
    local_before = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm_2 = torch.nn.utils.get_total_norm(before.values())
    for norm_type in NORMS:
        norm = torch.nn.utils.get_total_norm(before.values(), norm_type)
        assert relative_error(grad_norm(model.parameters(), norm_type), norm) < 1e-13, norm_type
        for bound in (0.5 * float(norm), 2 * float(norm)):
            for name, p in expected.named_parameters():
                p.grad.copy_(before[name])
                model.get_parameter(name).grad.copy_(local_before[name])
            torch.nn.utils.clip_grad_norm_(expected.parameters(), bound, norm_type)
            found = clip_grad_norm_(model.parameters(), bound, norm_type)
            assert relative_error(found, norm) < 1e-13
            for name, p in expected.named_parameters():
                clipped = full_tensor(model.get_parameter(name).grad)
                scale = 1e-4 * before[name].norm().item()
                assert relative_error(clipped, p.grad, scale) < 1e-12, (norm_type, name)
    # torch's own works as well, where each norm is another mesh's.
    for foreach in (False, True):
        for name, p in model.named_parameters():
            p.grad.copy_(local_before[name])
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        assert relative_error(full_tensor(found), norm_2) < 1e-13
        assert relative_error(grad_norm(model.parameters()), torch.tensor(0.5)) < 1e-5
    for name, p in model.named_parameters():
        p.grad.copy_(local_before[name])
    for name, p in expected.named_parameters():
        p.grad.copy_(before[name])
    head = grad_norm(model.lm_head.weight)  # one tensor is a list of one
    assert relative_error(head, expected.lm_head.weight.grad.norm()) < 1e-12


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: ",".join(map(str, sizes.values())))
def test_norms_and_clipping_equal_torchs(ranks: RankPool, sizes: dict[str, Any]) -> None:
    ranks.run(compare, sizes)


def spoil(rank: int, value: float, spoiled: int, norm_type: float) -> tuple[float, str, int]:
    """One rank's part of one gradient is not finite."""
    _, model = with_gradients({"tp_size": 2, "fsdp_size": 4, "ep_size": 4})
    grads = [p.grad.to_local() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    place = next(at for at, grad in enumerate(grads) if grad.numel())
    if rank == spoiled:
        grads[place].view(-1)[0] = value
    before = [grad.clone() for grad in grads]
    norm = grad_norm(model.parameters(), norm_type)
    with pytest.raises(RuntimeError, match="error_if_nonfinite") as error:
        clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
    assert f"{names[place]}, on rank {spoiled})" in str(error.value)
    with pytest.raises(RuntimeError, match=rf"parameter {place} of shape \[.*on rank {spoiled}\)"):
        clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
    with_witness = grad_norm(model, norm_type, witness=torch.ones(2))
    assert str(with_witness) == str(norm)
    unchanged = sum(
        torch.equal(g.nan_to_num(), b.nan_to_num()) for g, b in zip(grads, before, strict=True)
    )
    return float(norm), str(error.value), len(grads) - unchanged


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_verdict_about_a_norm_that_is_not_finite(
    ranks: RankPool, value: float, norm_type: float
) -> None:
    for spoiled in (0, 5):
        found = ranks.run(spoil, value, spoiled, norm_type)
        norms = [norm for norm, _, _ in found]
        assert len({str(norm) for norm in norms}) == 1, norms
        assert math.isnan(norms[0]) if math.isnan(value) else norms[0] == math.inf
        assert {changed for _, _, changed in found} == {0}, "raised after changing gradients"
        assert "of order" in found[0][1]


def odd_ones(rank: int) -> None:
    mesh = ParallelMesh(DistributedConfig(tp_size=2).layout)
    for norm_type in (2.0, math.inf):  # a loss that is not finite on one rank
        loss = torch.tensor([1.0, math.inf if rank == 1 else 1.0])
        assert math.isnan(grad_norm([], norm_type, witness=loss))
        assert float(grad_norm([], norm_type, witness=torch.ones(2))) == 0.0
    assert float(grad_norm([])) == 0.0
    frozen = nn.Parameter(torch.ones(3))
    assert float(clip_grad_norm_([frozen], 1.0)) == 0.0
    half = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    half.grad = torch.full_like(half, 300.0)
    norm = grad_norm(half)
    assert norm.dtype is torch.float32
    assert float(norm) == pytest.approx(600.0)  # bfloat16 of 360000 would be rounded
    clip_grad_norm_(half, 1.0)
    assert half.grad.dtype is torch.bfloat16
    many = [nn.Parameter(torch.ones(1)) for _ in range(30)]
    for big in many:
        big.grad = torch.full_like(big, 1.5e19)
    assert float(grad_norm(many)) == pytest.approx(1.5e19 * 30**0.5)  # squares beyond float32
    with pytest.raises(ValueError, match="norm_type must be positive"):
        grad_norm([big], 0.0)
    with pytest.raises(ValueError, match="norm_type must be positive"):
        grad_norm([big], math.nan)
    assert mesh.size("tp") == 2


def test_half_types_large_norms_and_no_gradients(ranks: RankPool) -> None:
    ranks.run(odd_ones, world=2)


class _Kernels(TorchDispatchMode):
    """Counts what makes or changes a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.aten.promote_types.default
        return func(*args, **kwargs or {})


def test_few_kernels_for_many_gradients() -> None:
    """As many for a hundred as for ten of the same dtypes; some are empty."""
    counts = []
    for number in (10, 100):
        parameters = [
            nn.Parameter(torch.ones(at % 3, dtype=dtype))
            for at in range(number)
            for dtype in (torch.float32, torch.bfloat16)
        ]
        for parameter in parameters:
            parameter.grad = 2 * torch.ones_like(parameter)
        with _Kernels() as kernels:
            norm = clip_grad_norm_(parameters, 1.0)
        elements = sum(parameter.numel() for parameter in parameters)
        assert float(norm) == pytest.approx(2 * elements**0.5)
        counts.append(kernels.count)
    assert counts[0] == counts[1]
    assert float(grad_norm([nn.Parameter(torch.ones(0))])) == 0.0


def test_one_process_without_process_groups() -> None:
    model = nn.Linear(3, 2).double()
    model(torch.ones(4, 3, dtype=torch.float64)).square().sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert float(grad_norm(model.parameters())) == pytest.approx(float(expected), rel=1e-14)
