"""A tiny random model of each MoE family that the installed transformers has an EP plan for.

`family_names()` finds the families: the configuration classes that bring a `base_model_ep_plan`,
and Llama 4's, for which `ep_plans` brings one.
`build(name)` makes one: 2 to 4 layers of every kind the family has, 8 experts, top 2, some ten
thousand parameters, all of them random, biases and norms included, so that a gradient that gets
lost or scaled shows.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

EXPERTS, TOP_K, VOCABULARY, LENGTH = 8, 2, 96, 16

# What a size is called in one family or another; a family takes those that it has.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "moe_hidden_size": 16,
    "router_hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "d_rel": 4,
    "rel_extent": 16,
    "max_position_embeddings": 64,
    "model_max_length": 64,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "output_router_logits": False,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "use_cache": False,
    # experts
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "top_k_experts": TOP_K,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "share_expert_dim": 16,
    "dense_intermediate_size": 48,
    "mlp_only_layers": [],
    # latent attention, indexers
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "index_kpool": 4,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    # linear attention, state spaces
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "use_mamba_kernels": False,
    "block_size": 8,
    # residual streams
    "hc_mult": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "loop_gate_rank": 8,
    "gated_norm_rank": 8,
    # extra predictions
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
}

# Where the sizes above don't make a family's smallest model.
_SPARSE = ["dense", "sparse"]
_ERNIE_VL = {
    "moe_intermediate_size": [16, 8],
    "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e4},
}
_OWN: dict[str, dict[str, Any]] = {
    "DeepseekOcr2TextConfig": {"mlp_layer_types": _SPARSE},
    "DeepseekV4Config": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "DiffusionGemmaTextConfig": {"global_head_dim": 16},
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "Dots3NoteVisionConfig": {
        "mlp_layer_types": _SPARSE,
        "patch_size": 4,
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
    },
    "Ernie4_5_VLMoeTextConfig": _ERNIE_VL,
    "Ernie4_5_VL_MoeTextConfig": _ERNIE_VL,
    "Gemma4TextConfig": {"enable_moe_block": True, "global_head_dim": 16},
    "Glm4vMoeTextConfig": {
        "rope_parameters": {
            "mrope_section": [2, 1, 1],
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
        }
    },
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0},
    "HYV4VLTextConfig": {
        "rope_parameters": {"mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 1e4}
    },
    "Inkling2LoopTextConfig": {
        "num_hidden_layers": 3,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 3,
    },
    "Llama4TextConfig": {
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 16,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 32,
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "PhimoeConfig": {"router_jitter_noise": 0.01},  # without it no router learns
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 16},
    "Step3p7TextConfig": {"pad_token_id": 0},
    "UnlimitedOcrTextConfig": {"num_key_value_heads": 4},
    "ZayaConfig": {"num_experts_per_tok": 1},
}


# They hold weights in float32 whose gradients are small sums of large terms.
_FLOAT32_WEIGHTS = ("HYV4VLTextConfig", "Inkling2LoopTextConfig", "Inkling2TextConfig")

# What a user of the family should know.
_ERNIE_VL_NOTE = (
    "All ranks' batches must hold images, or none may: the experts for images are called only where "
    "there are some, and the others would wait for them."
)
NOTES: dict[str, str] = {
    "Ernie4_5_VLMoeTextConfig": _ERNIE_VL_NOTE,
    "Ernie4_5_VL_MoeTextConfig": f"An old name of Ernie4_5_VLMoeTextConfig. {_ERNIE_VL_NOTE}",
    "Inkling2LoopTextConfig": "Compared in float32, which its routers compute in whatever it is in.",
    "Inkling2TextConfig": "Compared in float32, which its routers compute in whatever it is in.",
    "Llama4TextConfig": "transformers has no EP plan of it; ours sends the selected tokens only.",
    "PhimoeConfig": "Compared in evaluation mode: in training its routers draw random numbers.",
    "Step3p7TextConfig": "Its experts don't declare their layout, so they run by their own code.",
}


@dataclass(frozen=True)
class Family:
    """One tiny model and what it is run on.

    Attributes:
        name: the configuration class's name.
        model: the model, on the CPU; in float64, so that what is wrong stands out.
    """

    name: str
    model: transformers.PreTrainedModel

    @property
    def tolerance(self) -> float:
        """The relative error that the order of sums explains.

        Float64 models have parts that compute in float32 on purpose, so 1e-5 and not 1e-12.
        """
        return 1e-4 if self.name in _FLOAT32_WEIGHTS else 1e-5

    def set_mode(self) -> None:
        """Training mode, but for Phimoe: its router then draws numbers that differ by rank."""
        self.model.train(self.name != "PhimoeConfig")

    def inputs(self, batch: int, size: int = 2) -> dict[str, Any]:
        """The arguments of the forward for the batch of that number."""
        generator = torch.Generator().manual_seed(batch)
        if self.name == "Dots3NoteVisionConfig":
            patches = size * LENGTH  # of 4 x 4 pixels; each image is 4 x 4 patches
            pixels = torch.randn(patches, 3 * 4 * 4, generator=generator)
            return {
                "pixel_values": pixels.to(self.model.dtype),
                "grid_thw": torch.tensor([[1, 4, 4]] * size),
            }
        ids = torch.randint(3, VOCABULARY, (size, LENGTH), generator=generator)
        if self.name == "Qwen3OmniMoeTalkerTextConfig":  # its tokens are embedded by another model
            embeddings = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(0))
            return {"inputs_embeds": embeddings[ids].to(self.model.dtype)}
        if self.name.startswith("Ernie4_5_VL"):  # has experts of their own for text and for images
            return {"input_ids": ids, "moe_mm_token_type_ids": (ids > VOCABULARY // 2).int()}
        if self.model.get_output_embeddings() is not None:
            return {"input_ids": ids, "labels": ids}
        if hasattr(self.model, "score"):
            return {"input_ids": ids, "labels": ids % self.model.config.num_labels}
        return {"input_ids": ids}

    def loss(self, inputs: dict[str, Any]) -> Tensor:
        """The model's own loss, or of a model that has none a fixed function of its output."""
        output = self.model(**inputs)
        if "labels" in inputs:
            return output.loss
        hidden = output.last_hidden_state
        if self.name == "Dots3NoteVisionConfig":  # what follows the last hidden state is used too
            hidden = torch.cat([hidden, output.pooler_output])
        wave = torch.arange(hidden.shape[-1] * hidden.shape[-2], dtype=torch.float32).cos()
        return (hidden - wave.view(hidden.shape[-2:])).square().mean()


def build(name: str) -> Family:
    """The family's tiny model, with the same random weights each time.

    Raises:
        LookupError: if the installed transformers has no model class for the configuration.
    """
    config = tiny_config(name)
    torch.manual_seed(0)
    model = model_class(type(config))._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "experts" in part:  # some models leave these uninitialised
                parameter.zero_()
            router = part.endswith("gate.weight") or "router" in part
            parameter.add_(torch.randn_like(parameter), alpha=1.0 if router else 0.15)
        for part, buffer in model.named_buffers():
            if part.endswith(("correction_bias", "expert_bias")):  # they choose, they don't weigh
                buffer.add_(torch.randn_like(buffer), alpha=0.1)
    # Their routers are float32 whatever the model is.
    dtype = torch.float32 if name.startswith("Inkling2") else torch.float64
    family = Family(name, model.to(dtype))
    family.set_mode()
    return family


# Dense models that inherit the plan of a family with experts, in transformers 5.17.
_WITHOUT_EXPERTS = ("YoutuConfig",)


@cache
def family_configs() -> dict[str, type[Any]]:
    """The configuration classes that bring an EP plan, by name."""
    found: dict[str, type[Any]] = {}
    for file in sorted(Path(transformers.__path__[0], "models").glob("*/configuration_*.py")):
        if "base_model_ep_plan" not in file.read_text():
            continue  # importing all 500 would take some ten seconds
        name = f"transformers.models.{file.parent.name}.{file.stem}"
        for key, value in vars(importlib.import_module(name)).items():
            if (
                inspect.isclass(value)
                and issubclass(value, transformers.PreTrainedConfig)
                and value.__module__ == name
                and getattr(value, "base_model_ep_plan", None)
                and key not in _WITHOUT_EXPERTS
            ):
                found[key] = value
    found["Llama4TextConfig"] = transformers.Llama4TextConfig
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def family_names() -> list[str]:
    """The names of the families, as of their configuration classes."""
    return list(family_configs())


def model_class(config_class: type[Any]) -> type[Any]:
    """The causal language model of a family, else the smallest model that holds the experts."""
    parent = config_class.__mro__[1]
    if getattr(parent, "base_model_ep_plan", None) and parent.__module__ == config_class.__module__:
        return model_class(parent)  # this is an old name of it
    modeling = config_class.__module__.replace("configuration_", "modeling_")
    classes: list[Any] = []
    if importlib.util.find_spec(modeling):
        classes = [
            value
            for value in vars(importlib.import_module(modeling)).values()
            if inspect.isclass(value)
            and issubclass(value, transformers.PreTrainedModel)
            and getattr(value, "config_class", None) is config_class
        ]
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if config_class in mapping:
            classes.append(mapping[config_class])
    for suffix in ("ForCausalLM", "ForTokenClassification", "Model"):
        for candidate in classes:
            if candidate.__name__.endswith(suffix) and "PreTrained" not in candidate.__name__:
                return candidate
    raise LookupError(f"transformers has no model class of {config_class.__name__}")


def tiny_config(name: str) -> transformers.PreTrainedConfig:
    """The configuration of the family's tiny model."""
    config_class = family_configs()[name]
    default = config_class()
    own = dict(_OWN.get(name, {}))
    mapped: dict[str, str] = config_class.attribute_map or {}
    fields = _fields(config_class)
    values = {key: value for key, value in _SIZES.items() if key in fields}
    values = {key: value for key, value in values.items() if mapped.get(key) not in values}
    kinds = {
        key: own.pop(key, None) or _distinct(getattr(default, key, None))
        for key in ("layer_types", "mlp_layer_types", "layers_block_type")
        if key in fields and (key in own or isinstance(getattr(default, key, None), list))
    }
    if "kv_lora_rank" in fields:  # latent attention: one key head per query head
        values["num_key_value_heads"] = values["num_attention_heads"]
    layers = own.pop("num_hidden_layers", None) or max(2, *(len(k) for k in kinds.values()), 2)
    values["num_hidden_layers"] = layers
    for key, some in kinds.items():
        values[key] = (some + [some[-1]] * layers)[:layers]
    values |= own
    return config_class(**values)


def _fields(config_class: type[Any]) -> set[str]:
    return {
        *getattr(config_class, "__dataclass_fields__", {}),
        *inspect.signature(config_class.__init__).parameters,
    }


def _distinct(values: Iterable[Any] | None) -> list[Any]:
    return list(dict.fromkeys(values or []))
