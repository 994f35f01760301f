"""Small models of the families that every layout is tested with, made from configs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def qwen3_moe(**changes: object) -> PreTrainedConfig:
    return transformers.Qwen3MoeConfig(
        **SIZES
        | {
            "head_dim": 8,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        }
        | changes
    )


def gpt_oss(**changes: object) -> PreTrainedConfig:
    return transformers.GptOssConfig(
        **SIZES
        | {
            "head_dim": 8,
            "intermediate_size": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        | changes
    )


def mixtral(**changes: object) -> PreTrainedConfig:
    return transformers.MixtralConfig(
        **SIZES
        | {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2}
        | changes
    )


def deepseek_v3(**changes: object) -> PreTrainedConfig:
    return transformers.DeepseekV3Config(
        **SIZES
        | {
            "num_key_value_heads": 8,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
        }
        | changes
    )


def llama4(**changes: object) -> PreTrainedConfig:
    return transformers.Llama4TextConfig(
        **SIZES
        | {
            "head_dim": 8,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 32,
        }
        | changes
    )


def qwen2_moe(**changes: object) -> PreTrainedConfig:
    return transformers.Qwen2MoeConfig(
        **SIZES
        | {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        }
        | changes
    )


FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "mixtral": mixtral,
    "deepseek_v3": deepseek_v3,
    "llama4": llama4,
    "qwen2_moe": qwen2_moe,
}


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The causal LM of `config` with seeded random weights, routers spread so that ties are far."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = any(part in name for part in ("gate.weight", "router"))
            parameter.normal_(std=1.0 if wide else 0.2)
            if parameter.ndim == 1 and "norm" in name:
                parameter.add_(1.0)
    return model.to(dtype).train()
