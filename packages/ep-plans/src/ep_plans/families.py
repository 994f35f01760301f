"""Plans for models that ship none or a poor one, by `model_type`.

A family is one entry: plans that replace the model's own, keys relative to its base model.
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

_FAMILIES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "llama4_text": {"ep_plan": _LLAMA4_EP},
}


def family_plan(base_model: nn.Module, plan: str) -> dict[str, str] | None:
    """Our own `plan` ("tp_plan", "ep_plan" or "fsdp_plan") for a base model; None: keep its own."""
    if getattr(base_model, "base_model", None) is not base_model:
        return None
    model_type = getattr(getattr(base_model, "config", None), "model_type", None)
    ours = _FAMILIES.get(str(model_type), {}).get(plan)
    return None if ours is None else dict(ours)
