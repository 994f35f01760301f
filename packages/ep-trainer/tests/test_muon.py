"""Muon of one process; in layouts it is tested in `integration_tests`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ep_trainer import Muon
from ep_trainer.muon import hidden_matrices, orthogonalize

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def by_singular_values(matrix: Tensor) -> Tensor:
    """The iteration, of which each singular value goes through the polynomial on its own."""
    a, b, c = COEFFICIENTS
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ vh


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 4), (3, 6, 6)])
def test_the_iteration_is_its_polynomial_of_the_singular_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape, dtype=torch.float64)
    found = orthogonalize(matrices, COEFFICIENTS, steps=5, eps=1e-7)
    stack = matrices if matrices.ndim == 3 else matrices[None]
    wanted = torch.stack([by_singular_values(matrix) for matrix in stack]).view(shape)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    zeros = orthogonalize(torch.zeros(shape), COEFFICIENTS, steps=5, eps=1e-7)
    assert not zeros.any(), "the update of an expert without tokens is zero, not NaN"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_a_matrix_moves_as_with_torchs_muon(adjust: str) -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(24, 16, bias=False), nn.Linear(24, 16, bias=False)
    other.load_state_dict(model.state_dict())
    start = model.weight.detach().clone()
    ours = Muon(model, lr=0.02, adjust_lr_fn=adjust)
    torchs = torch.optim.Muon(other.parameters(), lr=0.02, adjust_lr_fn=adjust)
    for _ in range(3):
        rows = torch.randn(8, 24)
        for each, optimizer in ((model, ours), (other, torchs)):
            each.zero_grad()
            each(rows).square().sum().backward()
            optimizer.step()
    moved, wanted = model.weight.detach() - start, other.weight.detach() - start
    # Both iterate in bfloat16, which would show another order of roundings at once.
    assert float((moved - wanted).norm() / wanted.norm()) < 1e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(12, 8)
        self.gate = nn.Linear(8, 4, bias=False)
        self.shared_expert_gate = nn.Linear(8, 1)
        self.gate_proj = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.experts = nn.Module()
        self.experts.down_proj = nn.Parameter(torch.zeros(4, 8, 6))
        self.experts.down_proj_bias = nn.Parameter(torch.zeros(4, 8))
        self.lm_head = nn.Linear(8, 12, bias=False)


def test_hidden_matrices_are_muons_and_the_rest_is_adamws() -> None:
    model = Block()
    assert hidden_matrices(model) == ["gate_proj.weight", "experts.down_proj"]
    optimizer = Muon(model, adam=["gate_proj"])
    of = {p: g for g in optimizer.param_groups for p in g["params"]}
    assert of.keys() == set(model.parameters())
    named = dict(model.named_parameters())
    assert {n for n, p in named.items() if of[p]["is_muon"]} == {"experts.down_proj"}
    decayed = {n for n, p in named.items() if of[p]["weight_decay"] > 0}
    assert decayed.isdisjoint({"norm.weight", "gate_proj.bias", "experts.down_proj_bias"})


def test_state_is_loaded_into_another_muon() -> None:
    torch.manual_seed(0)
    one, two = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3))
    rows = torch.randn(5, 4)
    first = Muon(one)
    one(rows).sum().backward()
    first.step()
    two.load_state_dict(one.state_dict())
    second = Muon(two)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, optimizer in ((one, first), (two, second)):
        model.zero_grad()
        model(rows).square().sum().backward()
        optimizer.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="match_rms_adamw"):
        Muon(nn.Linear(2, 2), adjust_lr_fn="spectral")
    with pytest.raises(ValueError, match="momentum"):
        Muon(nn.Linear(2, 2), momentum=1.0)
