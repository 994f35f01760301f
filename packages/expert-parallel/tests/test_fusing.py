"""Norms run as one operator where that is what they compute, and as they are elsewhere."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

import expert_parallel.fusing
from expert_parallel.fusing import fuse_norms


class Detached(Qwen3MoeRMSNorm):
    """The same values, other gradients."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * scale)


class Gated(Qwen3MoeRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x)


class OtherEpsilon(Qwen3MoeRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.variance_epsilon)
        return self.weight * (x * scale)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the operator is called with."""
    seen: list[Any] = []
    inner = expert_parallel.fusing.rms_norm

    def watched(*args: Any) -> Tensor:
        seen.append(args)
        return inner(*args)

    monkeypatch.setattr(expert_parallel.fusing, "rms_norm", watched)
    return seen


@pytest.mark.parametrize("kind", [Qwen3MoeRMSNorm, GptOssRMSNorm, Llama4TextRMSNorm])
def test_recognised(kind: Any, calls: list[Any]) -> None:
    plain, changed = kind(24, eps=1e-5), kind(24, eps=1e-5)
    assert fuse_norms(changed) == [changed]
    calls.clear()
    results = []
    for module in (plain, changed):
        nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
        x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = module(x)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, module.weight.grad))
    assert len(calls) == 1
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "module",
    [
        Gemma3RMSNorm(8),
        Qwen3NextRMSNorm(8),
        nn.LayerNorm(8, bias=False),
        nn.RMSNorm(8),
        nn.Linear(8, 8, bias=False),
        Detached(8),
        Gated(8),
        OtherEpsilon(8),
    ],
    ids=lambda module: type(module).__name__,
)
def test_left_alone(module: nn.Module) -> None:
    assert fuse_norms(module) == []
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("x", "change"),
    [
        (torch.ones(2, 8).double(), torch.float64),  # which the model computes in float32
        (torch.ones(2, 8).bfloat16(), torch.float32),  # which makes float32 of it
    ],
)
def test_own_code_for_other_dtypes(x: Tensor, change: torch.dtype, calls: list[Any]) -> None:
    module = Qwen3MoeRMSNorm(8).to(change)
    expected = module(x)
    fuse_norms(module)
    calls.clear()
    assert torch.equal(module(x), expected)
    assert module(x).dtype == expected.dtype
    assert torch.equal(module(hidden_states=x), expected)
    assert not calls


def test_compile_sees_the_own_code(calls: list[Any]) -> None:
    module, x = Qwen3MoeRMSNorm(8), torch.randn(2, 8)
    fuse_norms(module)
    calls.clear()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    assert len(calls) == 1  # of the module that is not compiled


def test_a_copy_reads_its_own_weight() -> None:
    module = Qwen3MoeRMSNorm(8)
    fuse_norms(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            other.weight.mul_(2)
        x = torch.randn(3, 8)
        torch.testing.assert_close(other(x), 2 * module(x))


def test_no_other_object_changes() -> None:
    other, before = Qwen3MoeRMSNorm(8), Qwen3MoeRMSNorm.forward
    fuse_norms(nn.Sequential(Qwen3MoeRMSNorm(8)))
    assert "forward" not in vars(other)
    assert Qwen3MoeRMSNorm.forward is before
