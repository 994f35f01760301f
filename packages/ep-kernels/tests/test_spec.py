"""Laws of recognition: what is declared is understood, all else is told, and still computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ep_kernels import (
    ExpertsSpec,
    choose_backend,
    compacted_forward,
    module_experts_forward,
    why_not,
)

sys.path.insert(0, str(Path(__file__).parent))
from kernels_reference import Experts, as_on_a_gpu, error, reference


def test_facts_of_a_module() -> None:
    spec = ExpertsSpec.from_module(
        Experts(is_transposed=True, has_bias=True, is_concatenated=False)
    )
    assert spec is not None
    assert spec.weight_names() == [
        "gate_up_proj",
        "down_proj",
        "gate_up_proj_bias",
        "down_proj_bias",
    ]
    assert spec.transposed
    assert spec.interleaved
    assert spec.gate is not None
    plain = ExpertsSpec.from_module(Experts(has_gate=False))
    assert plain is not None
    assert (plain.up, plain.gated, plain.gate) == ("up_proj", False, None)


def test_default_gate_is_known_as_such() -> None:
    """Then a kernel may fuse activation and product."""

    def _default_apply_gate(self: nn.Module, x: Tensor) -> Tensor:
        raise AssertionError("not to be called")

    class Decorated(Experts):
        _apply_gate = _default_apply_gate

    spec = ExpertsSpec.from_module(Decorated())
    assert spec is not None
    assert spec.gate is None
    assert spec.activation is nn.functional.silu


def test_works_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert ExpertsSpec.from_module(Experts()) is not None


def undeclared(experts: Experts) -> Experts:
    del experts.is_transposed
    return experts


def no_activation(experts: Experts) -> Experts:
    del experts.act_fn
    return experts


def quantized(experts: Experts) -> Experts:
    data = torch.zeros(experts.down_proj.shape, dtype=torch.int8)
    experts.down_proj = nn.Parameter(data, requires_grad=False)
    return experts


def flat(experts: Experts) -> Experts:
    experts.down_proj = nn.Parameter(torch.zeros(3, 4))
    return experts


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (undeclared, "is_transposed"),
        (no_activation, "act_fn"),
        (quantized, "int8"),
        (flat, "2 dims"),
    ],
)
def test_what_is_not_understood_is_told(change: object, reason: str) -> None:
    experts = change(Experts())  # type: ignore[operator]
    assert ExpertsSpec.from_module(experts) is None
    assert reason in str(why_not(experts))


def test_an_unknown_activation_name_is_refused() -> None:
    with pytest.raises(ValueError, match="swish9"):
        ExpertsSpec(activation="swish9")
    with pytest.raises(ValueError, match="both are None"):
        ExpertsSpec(activation=None)


class Separate(nn.Module):
    """Experts of a shape of their own: one Linear each, all read only if they get rows."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.mlps = nn.ModuleList(
            nn.Linear(16, 16, dtype=torch.float64) for _ in range(num_experts)
        )

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert int(ids.max()) < self.num_experts
        out = torch.zeros_like(hidden)
        for e, mlp in enumerate(self.mlps):
            row, slot = torch.where(ids == e)
            if row.numel():
                out = out.index_add(0, row, mlp(hidden[row]) * weights[row, slot, None])
        return out


@pytest.mark.parametrize("skip_all", [False, True])
def test_a_foreign_module_honours_the_skip_id(skip_all: bool) -> None:
    torch.manual_seed(0)
    experts = Separate(4)
    assert why_not(experts)
    ids = torch.tensor([[0, 4], [4, 4], [2, 2], [0, 2]])
    if skip_all:
        ids.fill_(4)
    rows = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    out = module_experts_forward(experts)(rows, ids, weights)
    expected = torch.zeros(4, 16, dtype=torch.float64)
    for r, j in torch.nonzero(ids < 4).tolist():
        expected[r] += (weights[r, j] * experts.mlps[int(ids[r, j])](rows[r])).detach()
    assert error(out, expected) < 1e-14
    out.sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    assert rows.grad[1].abs().sum() == 0
    assert weights.grad[ids == 4].abs().sum() == 0
    for e, mlp in enumerate(experts.mlps):
        assert mlp.weight.grad is not None, "others wait for this gradient"
        assert bool(mlp.weight.grad.abs().sum()) == bool((ids == e).any())


def test_compacted_forward_equals_our_own() -> None:
    experts = Experts(has_bias=True)
    ids = torch.tensor([[0, 4], [4, 4], [2, 2], [0, 3]])
    rows, weights = torch.randn(4, 16, dtype=torch.float64), torch.rand(4, 2, dtype=torch.float64)
    out = compacted_forward(experts, 4)(rows, ids, weights)
    assert error(out, reference(experts, rows, ids, weights)) < 1e-14
    assert error(out, module_experts_forward(experts)(rows, ids, weights)) < 1e-14


def test_the_choice_of_a_backend_tells_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert choose_backend(cpu, torch.bfloat16, 16, 32).backend == "loop"
    assert "torch.bfloat16" in choose_backend(cpu, torch.bfloat16, 16, 32).reason
    as_on_a_gpu(monkeypatch)
    assert choose_backend(cpu, torch.bfloat16, 16, 32).backend == "grouped_mm"
    assert choose_backend(cpu, torch.float64, 16) == (
        "loop",
        "torch's grouped_mm does not take torch.float64",
    )
    assert "[12]" in choose_backend(cpu, torch.bfloat16, 16, 12).reason
    assert "meta" in choose_backend(torch.device("meta"), torch.bfloat16, 16).reason
