"""Experts modules as transformers lays them out, and the plainest way to compute them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ep_kernels

KINDS = {
    "gated": {},
    "ungated": {"has_gate": False},
    "transposed": {"is_transposed": True},
    "biased": {"has_bias": True},
    "ungated biased": {"has_gate": False, "has_bias": True},
    "gpt-oss": {"is_transposed": True, "has_bias": True, "is_concatenated": False},
    "interleaved": {"is_concatenated": False},
    "gelu": {"activation": "gelu"},
    "post norm": {"has_post_expert_norm": True},
}
# Bounds: float32 sums of about 24 products; half types round each of three results once. Gradients
# may have three times as much: their chain is twice as long, and a norm's subtracts means.
BOUNDS = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}


class Experts(nn.Module):
    """An experts module that declares its layout by the attributes transformers sets."""

    def __init__(
        self,
        num_experts: int = 4,
        hidden: int = 16,
        intermediate: int = 24,
        *,
        has_gate: bool = True,
        has_bias: bool = False,
        is_transposed: bool = False,
        is_concatenated: bool = True,
        has_post_expert_norm: bool = False,
        activation: str = "silu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden = num_experts, hidden
        self.has_gate, self.has_bias = has_gate, has_bias
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        self.has_post_expert_norm = has_post_expert_norm
        self.activation, self.act_fn = activation, getattr(nn.functional, activation)
        width = intermediate * (2 if has_gate else 1)
        up = "gate_up_proj" if has_gate else "up_proj"
        self.up = up

        def weight(out: int, inner: int) -> nn.Parameter:
            shape = (num_experts, inner, out) if is_transposed else (num_experts, out, inner)
            return nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype) / inner**0.5)

        setattr(self, up, weight(width, hidden))
        self.down_proj = weight(hidden, intermediate)
        if has_bias:
            bias = torch.randn(num_experts, width, dtype=torch.float64).to(dtype)
            setattr(self, f"{up}_bias", nn.Parameter(bias))
            self.down_proj_bias = nn.Parameter(torch.randn(num_experts, hidden).to(dtype))
        if has_post_expert_norm:
            self.post_expert_norm = nn.LayerNorm(hidden, eps=1e-6, dtype=dtype)
            nn.init.ones_(self.post_expert_norm.bias)  # a norm that maps zero to something else
        if has_gate and not is_concatenated:
            self._apply_gate = self._interleaved_gate

    def _interleaved_gate(self, x: Tensor) -> Tensor:
        gate, up = x[..., ::2], x[..., 1::2]
        return (up + 1) * gate.clamp(max=2.0) * torch.sigmoid(gate)

    def expert(self, e: int, x: Tensor) -> Tensor:
        """One expert's MLP on [R, H], the plain way."""

        def linear(x: Tensor, name: str) -> Tensor:
            matrix = getattr(self, name)[e]
            x = x @ (matrix if self.is_transposed else matrix.T)
            return x + getattr(self, f"{name}_bias")[e] if self.has_bias else x

        x = linear(x, self.up)
        if not self.has_gate:
            x = self.act_fn(x)
        elif self.is_concatenated:
            gate, up = x.chunk(2, dim=-1)
            x = self.act_fn(gate) * up
        else:
            x = self._interleaved_gate(x)
        x = linear(x, "down_proj")
        return self.post_expert_norm(x) if self.has_post_expert_norm else x

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Its own forward, which knows of no id that skips a slot."""
        assert int(ids.max()) < self.num_experts
        return reference(self, hidden, ids, weights)


def reference(experts: Experts, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over slots, slot by slot; an id equal to the number of experts is skipped."""
    total = []
    for r in range(rows.shape[0]):
        out = torch.zeros_like(rows[r])
        for j in range(ids.shape[1]):
            e = int(ids[r, j])
            if e < experts.num_experts:
                out = out + weights[r, j] * experts.expert(e, rows[r : r + 1])[0]
        total.append(out)
    return torch.stack(total) if total else rows * 0


def as_float64(experts: Experts) -> Experts:
    """The same experts, of the same values, in float64."""
    flags = (
        "has_gate",
        "has_bias",
        "is_transposed",
        "is_concatenated",
        "has_post_expert_norm",
        "activation",
    )
    inner = experts.down_proj.shape[1 if experts.is_transposed else 2]
    twin = Experts(
        experts.num_experts,
        experts.hidden,
        inner,
        **{flag: getattr(experts, flag) for flag in flags},
    )
    twin.load_state_dict(experts.state_dict())
    return twin


def error(out: Tensor, ref: Tensor) -> float:
    """‖out - ref‖ / ‖ref‖, or ‖out‖ where the reference is zero."""
    out, ref = out.detach().double(), ref.detach().double()
    difference = (out - ref).norm()
    return float(difference / ref.norm()) if ref.norm() else float(difference)


def grouped_reference(
    experts: Experts, rows: Tensor, row_of_slot: Tensor, weights: Tensor, offsets: Tensor
) -> Tensor:
    """The weighted sum over a row's slots, expert by expert."""
    out, start = torch.zeros_like(rows), 0
    for e, end in enumerate(offsets.tolist()):
        index, weight = row_of_slot[start:end], weights[start:end]
        if end > start:
            out = out.index_add(0, index, weight[:, None] * experts.expert(e, rows[index]))
        start = end
    return out


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not read offsets, nor how many slots are valid: grouped_mm where it works."""
    monkeypatch.setattr(ep_kernels.module, "_compacts", lambda *_: False)
    monkeypatch.setattr(ep_kernels.grouped, "_offsets_are_at_hand", lambda _: False)


def gradients(
    forward: object, experts: nn.Module, rows: Tensor, index: Tensor, weights: Tensor, *rest: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and every gradient, for a cotangent that differs from row to row."""
    rows, weights = rows.detach().requires_grad_(), weights.detach().requires_grad_()
    for parameter in experts.parameters():
        parameter.grad = None
    out = forward(rows, index, weights, *rest)  # type: ignore[operator]
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    out.backward(cotangent.to(out))
    grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
    grads |= {"rows": rows.grad, "weights": weights.grad}
    missing = [name for name, grad in grads.items() if grad is None]
    assert not missing, f"no gradient: {missing}"
    return out.detach(), grads  # type: ignore[return-value]


def plain_gradients(
    plain: object, twin: Experts, rows: Tensor, index: Tensor, weights: Tensor, *rest: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `gradients`, in float64; what no row reaches has the gradient zero."""

    def padded(rows: Tensor, index: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        nothing = sum((p * 0).sum() for p in twin.parameters()) + (weights * 0).sum()
        return plain(twin, rows, index, weights, *rest) + rows * 0 + nothing  # type: ignore[operator]

    return gradients(padded, twin, rows.double(), index, weights.double(), *rest)


def rotary_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embeddings of the first values of each head of x [B, N, S, D], as models write it."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    low, high = part.chunk(2, dim=-1)
    turned = part * cos.unsqueeze(1) + torch.cat([-high, low], dim=-1) * sin.unsqueeze(1)
    return torch.cat([turned, rest], dim=-1)
