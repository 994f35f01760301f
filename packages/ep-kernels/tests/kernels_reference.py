"""Experts modules as transformers lays them out, and the plainest way to compute them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden = num_experts, hidden
        self.has_gate, self.has_bias = has_gate, has_bias
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        self.has_post_expert_norm = has_post_expert_norm
        self.act_fn = nn.functional.silu
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
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
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
