"""The styles that plans name, and the registry for one's own."""

from __future__ import annotations

from ep_plans.styles.base import Context, Scope, Style
from ep_plans.styles.embedding import EmbeddingColwise, EmbeddingRowwise
from ep_plans.styles.experts import (
    DispatchExperts,
    GroupedGemm,
    MaskedRouter,
    SummedExperts,
)
from ep_plans.styles.linear import Colwise, MlaKeyValue, Rowwise
from ep_plans.styles.llama4 import DispatchLlama4
from ep_plans.styles.plain import (
    AllReduceOutput,
    IdentityExpert,
    LocalParameters,
    PartialGradients,
    Replicate,
    SequenceSlices,
)

__all__ = ["FSDP_STYLES", "STYLES", "Context", "Replicate", "Scope", "Style", "register_style"]

STYLES: dict[str, Style] = {
    "colwise": Colwise(),
    "colwise_rep": Colwise(gather_output=True),
    "colwise_gather_output": Colwise(gather_output=True),
    "rowwise": Rowwise(),
    "rowwise_rep": Rowwise(split_input=True),
    "rowwise_split_input": Rowwise(split_input=True),
    "packed_colwise": Colwise(packs=2),
    "packed_rowwise": Rowwise(packs=2),
    "embedding_rowwise": EmbeddingRowwise(),
    "embedding_colwise": EmbeddingColwise(),
    "sequence_parallel": SequenceSlices(),
    "replicated_with_grad_allreduce": PartialGradients(),
    "mla_kv_a_proj": MlaKeyValue(),
    "local_params": LocalParameters(),
    "all_reduce": AllReduceOutput(),
    "replicate": Replicate(),
    "moe_identity_expert": IdentityExpert(),
    "moe_tp_experts": SummedExperts(),
    "ep_router": MaskedRouter(),
    "ep_dispatch_experts": DispatchExperts(),
    "ep_dispatch_llama4": DispatchLlama4(),
    "grouped_gemm": GroupedGemm(),
}

# Whether a module frees its full weights after forward and gathers them again for backward.
FSDP_STYLES: dict[str, bool] = {"free_full_weight": True, "keep_full_weight": False}


def register_style(name: str, style: Style) -> None:
    """Make `style` available to plans under `name`.

    Raises:
        ValueError: the name is taken.
        TypeError: `style` is not a `Style` object.
    """
    if not isinstance(style, Style):
        raise TypeError(f"register_style({name!r}) expects a Style object, got {style!r}.")
    if name in STYLES:
        raise ValueError(f"The style {name!r} exists already; choose another name.")
    STYLES[name] = style
