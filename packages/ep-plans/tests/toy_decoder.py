"""A decoder with everything that plans speak of, in plain torch, built as released models are.

Attention with key-value heads and head norms, sinks, dense and expert layers, a router, a shared
expert, stacked experts, a head that may be tied, and configs that bring plans.

Shapes: B batch, S sequence, H hidden size, T = B * S tokens, K experts per token, E experts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.o_proj": "rowwise",
}
DENSE = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.mlp.shared_expert.gate_proj": "colwise",
    "layers.*.mlp.shared_expert.up_proj": "colwise",
    "layers.*.mlp.shared_expert.down_proj": "rowwise",
}
TP_EXPERTS = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}
TP_PLAN = ATTENTION | DENSE | TP_EXPERTS
SINKS = {"layers.*.self_attn": "local_params", "layers.*.self_attn.sinks": "colwise"}
EXPERT_WEIGHTS = {
    "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
    "layers.*.mlp.experts.down_proj": "grouped_gemm",
}
DISPATCH = EXPERT_WEIGHTS | {"layers.*.mlp.experts": "ep_dispatch_experts"}
MASKING = EXPERT_WEIGHTS | {
    "layers.*.mlp.gate": "ep_router",
    "layers.*.mlp.experts": "moe_tp_experts",
}
FSDP_PLAN = {
    "embed_tokens": "free_full_weight",
    "layers.*": "free_full_weight",
    "norm": "keep_full_weight",
}


@dataclass
class ToyConfig:
    """Sizes, and plans as a transformers config brings them."""

    vocab_size: int = 50
    hidden_size: int = 16
    intermediate_size: int = 20
    moe_intermediate_size: int = 12
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    head_dim: int = 4
    num_experts: int = 8
    num_experts_per_tok: int = 2
    first_dense: int = 1
    bias: bool = False
    sinks: bool = False
    tied: bool = False
    padding_idx: int | None = None
    model_type: str = "toy"
    base_model_tp_plan: dict[str, str] | None = field(default_factory=lambda: dict(TP_PLAN))
    base_model_ep_plan: dict[str, str] | None = field(default_factory=lambda: dict(DISPATCH))
    base_model_fsdp_plan: dict[str, str] | None = field(default_factory=lambda: dict(FSDP_PLAN))


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * normed).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        heads, kv = (
            count * config.head_dim
            for count in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=config.bias)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=config.bias)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=config.bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=config.bias)
        self.q_norm, self.k_norm = Norm(config.head_dim), Norm(config.head_dim)
        if config.sinks:
            self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, x: Tensor, position_embeddings: Tensor | None = None) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (
            p(x).view(B, S, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if position_embeddings is not None:
            q, k = q + position_embeddings, k - position_embeddings
        k, v = (t.repeat_interleave(self.num_key_value_groups, dim=2) for t in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k)
        ahead = torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
        if self.config.sinks:
            sinks = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(B, -1, S, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., :S]
        return self.o_proj(torch.einsum("bhst,bthd->bshd", weights, v).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ToyConfig, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden_size, intermediate, bias=config.bias)
        self.down_proj = nn.Linear(intermediate, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(x, self.weight.to(x.dtype))
        weights, index = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), index


class Experts(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        E, H, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * inner, H))
        self.down_proj = nn.Parameter(torch.zeros(E, H, inner))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            if expert == self.num_experts:
                continue
            row, slot = torch.where(index == expert)
            gate, up = functional.linear(hidden[row], self.gate_up_proj[expert]).chunk(2, dim=-1)
            down = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
            out = out.index_add(0, row, (down * weights[row, slot, None]).to(out.dtype))
        return out


class SparseBlock(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.gate, self.experts = Router(config), Experts(config)
        self.shared_expert = MLP(config, config.moe_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.view(-1, x.shape[-1])
        _, weights, index = self.gate(hidden)
        shared = self.shared_expert(hidden) * self.shared_expert_gate(hidden).sigmoid()
        return (self.experts(hidden, index, weights) + shared).view_as(x)


class Layer(nn.Module):
    def __init__(self, config: ToyConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        dense = index < config.first_dense
        self.mlp = MLP(config, config.intermediate_size) if dense else SparseBlock(config)
        self.input_layernorm = Norm(config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size)

    def forward(self, x: Tensor, position_embeddings: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings=position_embeddings)
        return x + self.mlp(self.post_attention_layernorm(x))


class Toy(nn.Module):
    base_model_prefix = "model"

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.padding_idx
        )
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size)
        self.checkpoint: str | None = None  # "reentrant" or "non-reentrant"

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        S, D = ids.shape[1], self.config.head_dim
        steps = torch.arange(S * D, device=ids.device, dtype=x.dtype).view(1, S, 1, D)
        positions = torch.sin(steps)
        for layer in self.layers:
            run = functools.partial(layer, position_embeddings=positions)
            if self.checkpoint is None:
                x = run(x)
            else:
                x = checkpoint(run, x, use_reentrant=self.checkpoint == "reentrant")
        return self.norm(x)


class ToyForCausalLM(nn.Module):
    base_model_prefix = "model"
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012 (as released classes have it)
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Toy(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.model(ids))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token loss of a batch [B, S]."""
    logits = model(ids).double()
    targets = ids.roll(-1, dims=1)  # the last token predicts the first: one token has a loss too
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(config: ToyConfig, dtype: torch.dtype = torch.float64) -> ToyForCausalLM:
    """Random weights, the same on every rank; routers spread, so that ties are far."""
    torch.manual_seed(0)
    model = ToyForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=1.0 if "gate.weight" in name else 0.3)
            if "norm" in name:
                parameter.add_(1.0)
    return model.to(dtype)
