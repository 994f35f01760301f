"""Plans for models that ship none or a poor one, by `model_type`.

A family is one entry: plans that replace the model's own, keys relative to its base model, and styles
that stand for others where somebody's own plan names those.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

# Llama 4's experts take every token, scaled by the router's score, once per expert. Its releases
# ship no EP plan, or one that masks attention heads too; ours routes the selected tokens only.
_LLAMA4_EP = {
    "layers.*.feed_forward.experts.gate_up_proj": "grouped_gemm",
    "layers.*.feed_forward.experts.down_proj": "grouped_gemm",
    "layers.*.feed_forward.experts": "ep_dispatch_llama4",
}

# Before transformers 5.24 the released plan named modules that the model does not have.
_ERNIE_VL_EP = {
    f"layers.*.mlp.{block}.experts{weight}": style
    for block in ("text_moe", "vision_moe")
    for weight, style in (
        (".gate_up_proj", "grouped_gemm"),
        (".down_proj", "grouped_gemm"),
        ("", "ep_dispatch_experts"),
    )
}

_FAMILIES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "llama4_text": {"ep_plan": _LLAMA4_EP},
    "ernie4_5_vl_moe_text": {"ep_plan": _ERNIE_VL_EP},
}

# Llama 4's blocks give their experts no routes, so the general styles have nothing to work on.
_STYLES: Mapping[str, Mapping[str, str]] = {
    "llama4_text": {
        "ep_dispatch_experts": "ep_dispatch_llama4",
        "moe_tp_experts": "ep_dispatch_llama4",
    },
}


def family_style(model: nn.Module, name: str, style: str) -> str:
    """The style that the module `name` gets on the expert axis where a plan says `style`."""
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        owner = model.get_submodule(".".join(parts[:end]))
        model_type = getattr(getattr(owner, "config", None), "model_type", None)
        if (ours := _STYLES.get(str(model_type), {}).get(style)) is not None:
            return ours
    return style


def family_plan(base_model: nn.Module, plan: str) -> dict[str, str] | None:
    """Our own `plan` ("tp_plan", "ep_plan" or "fsdp_plan") for a base model; None: keep its own."""
    if getattr(base_model, "base_model", None) is not base_model:
        return None
    model_type = getattr(getattr(base_model, "config", None), "model_type", None)
    ours = _FAMILIES.get(str(model_type), {}).get(plan)
    return None if ours is None else dict(ours)
