"""Norms and rotary embeddings run as one operator where that is what they compute; else as they are."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4 import modeling_glm4
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from expert_parallel.fusing import fuse, fuse_norms, fuse_rotary, inputs, norms
from expert_parallel.fusing import rotary as rotary_module


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


@pytest.fixture(autouse=True)
def small_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "SMALL", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the operator is called with."""
    seen: list[Any] = []
    inner = norms.rms_norm

    def watched(*args: Any) -> Tensor:
        seen.append(args)
        return inner(*args)

    monkeypatch.setattr(norms, "rms_norm", watched)
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


def test_few_values_on_a_cpu_go_through_the_own_code(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "SMALL", 32)
    module = Qwen3MoeRMSNorm(8)
    fuse_norms(module)
    calls.clear()
    module(torch.randn(3, 8))
    assert not calls
    module(torch.randn(4, 8))
    assert len(calls) == 1


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


SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def loss_and_gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_computes_what_it_did(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another one of the same class is not touched."""
    plain = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, experts_implementation="eager")).to(dtype)
    changed, ids = copy.deepcopy(plain), torch.randint(0, 32, (2, 7))
    assert len(fuse(changed)) == 9 + 2
    monkeypatch.setattr(modeling_qwen3_moe, "rotate_half", None)  # which plain models need
    with pytest.raises(TypeError):
        plain(input_ids=ids)
    found = loss_and_gradients(changed, ids)
    monkeypatch.undo()
    torch.testing.assert_close(found, loss_and_gradients(plain, ids))


def attention_of(rotary: Any) -> nn.Module:
    """Attention whose forward calls the rotation that its module has."""

    def forward(self: nn.Module, *args: Any) -> Any:
        return apply_rotary_pos_emb(*args)  # type: ignore[name-defined]  # noqa: F821

    names = {"apply_rotary_pos_emb": rotary}
    own = type(forward)(forward.__code__, names, "forward")
    return type("Attention", (nn.Module,), {"forward": own})()


@pytest.mark.parametrize(
    ("rotary", "widths"),
    [
        (modeling_qwen3_moe.apply_rotary_pos_emb, {8: True}),
        (modeling_glm4_moe.apply_rotary_pos_emb, {8: True, 4: True}),  # of the first part too
        (modeling_glm4.apply_rotary_pos_emb, {8: False, 4: False}),  # of pairs of neighbours
    ],
    ids=["halves", "part", "pairs"],
)
def test_rotations(rotary: Any, widths: dict[int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    attention, calls = attention_of(rotary), list[Any]()
    inner = rotary_module.apply_rotary
    fuse_rotary(attention)

    def watched(*args: Any) -> Tensor:
        calls.append(args)
        return inner(*args)

    monkeypatch.setattr(rotary_module, "apply_rotary", watched)
    for width, fused in widths.items():
        query, key, cos, sin = (
            torch.randn(2, n, 5, w) if n else torch.randn(2, 5, w)
            for n, w in ((4, 8), (2, 8), (0, width), (0, width))
        )
        calls.clear()
        torch.testing.assert_close(attention(query, key, cos, sin), rotary(query, key, cos, sin))
        assert bool(calls) == fused
        calls.clear()
        in_float64 = query, key, cos.double(), sin.double()
        assert torch.equal(attention(*in_float64)[0], rotary(*in_float64)[0])
        assert not calls


def halves(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([high * torch.full((1,), -1.0, dtype=x.dtype), low], -1)


def rotation() -> Any:
    """A new function, which nobody has tried."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + halves(q) * sin, k * cos + halves(k) * sin

    return rotate


@pytest.mark.parametrize(
    ("mode", "tried"),
    [
        (torch.inference_mode, True),
        (torch.no_grad, True),
        (lambda: torch.device("meta"), True),
        (lambda: torch.autocast("cpu", torch.bfloat16), True),
        (FakeTensorMode, False),
    ],
    ids=["inference", "no_grad", "meta", "autocast", "fake"],
)
def test_where_it_is_tried_decides_nothing(mode: Any, tried: bool) -> None:
    """What can't be found out now is found out later."""
    attention, norm = attention_of(rotation()), Qwen3MoeRMSNorm(8)
    with mode():
        assert fuse_norms(norm) == ([norm] if tried else [])
        assert fuse_rotary(attention) == ([attention] if tried else [])
    if not tried:
        assert fuse_norms(norm) == [norm]
        assert fuse_rotary(attention) == [attention]


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "scaled"])
def test_what_replaces_a_global_later_is_heard(name: str) -> None:
    def forward(self: nn.Module, *args: Any) -> Any:
        return scaled(*apply_rotary_pos_emb(*args))  # type: ignore[name-defined]  # noqa: F821

    own: dict[str, Any] = {"apply_rotary_pos_emb": rotation(), "scaled": lambda q, k: (q, k)}
    attention = type("A", (nn.Module,), {"forward": type(forward)(forward.__code__, own)})()
    args = [torch.randn(2, *shape) for shape in ((4, 5, 8), (1, 5, 8), (5, 8), (5, 8))]
    expected = attention(*args)
    assert fuse_rotary(attention) == [attention]
    torch.testing.assert_close(attention(*args), expected)
    own[name] = lambda *args: "replaced"
    if name == "scaled":
        assert attention(*args) == "replaced"
    else:
        own["scaled"] = lambda *found: "".join(found)
        assert attention(*args) == "replaced"
