"""Adapters of fused experts as those of single ones, by the names of the family's checkpoints.

    E experts of a layer, N rank of an adapter

[Note: the checkpoint's own cut]
A fused weight [E, out, in] becomes the checkpoint's by cuts of its first two dimensions alone: an expert
each, the gate's rows and the up projection's. Of the product B A of an adapter these dimensions are B's
[E, out, N], so transformers' reverse conversion of B in place of the weight gives the names and the B of
each; their A is the expert's. A conversion that does anything else (a transposed weight, rows of gate and
up that alternate) does not give [rows, N] for each expert, and is refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expert_parallel import _compat
from expert_parallel.lazy import Constant, LazyTensor
from expert_parallel.lora._compat import PeftLayer

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def of_single_experts(
    model: PreTrainedModel,
    config: Any,
    layers: Sequence[PeftLayer],
    factors: Mapping[tuple[str, str], Any],
) -> tuple[dict[str, Tensor], Any]:
    """The factors by module of the family's checkpoints, and their configuration.

    Args:
        model: that the adapters are of.
        config: their `peft.LoraConfig`.
        layers: what PEFT adapts.
        factors: lazy, by PEFT's path and factor; [E, N, in] and [E, out, N] of fused experts.

    Returns:
        `lora_A` [R, in] and `lora_B` [out, R] by `{module}.{factor}.weight`, R the largest rank: others are
        filled up with zeros, which changes no product. The configuration has R and names modules only.

    Raises:
        ValueError: the family's checkpoints hold fused experts; adapters are scaled differently; modules
            train whole.
    """
    if config.modules_to_save:
        raise ValueError(
            f"Adapters per expert have no modules that train whole, and these have modules_to_save="
            f"{config.modules_to_save}: save them in PEFT's form."
        )
    rank = max(layer.rank for layer in layers)
    scales = {round(layer.scale, 12) for layer in layers}
    if len(scales) > 1:
        raise ValueError(
            f"Adapters per expert have one scale, and these are scaled by {sorted(scales)}: leave out "
            "alpha_pattern, or save them in PEFT's form."
        )
    found: dict[str, Tensor] = {}
    leaves: set[str] = set()
    for layer in layers:
        a, b = (factors[layer.key, factor] for factor in ("lora_A", "lora_B"))
        for name, rows in _cut(model, layer, b).items():
            expert = _EXPERT.search(name)
            own = a[int(expert[1])] if len(layer.shape) == 3 and expert else a
            module = name.removesuffix(".weight")
            found[f"{module}.lora_A.weight"] = _filled(own, rank, 0)
            found[f"{module}.lora_B.weight"] = _filled(rows, rank, 1)
            leaves.add(module.rpartition(".")[2])
    config = copy.deepcopy(config)
    alpha = layers[0].scale * rank
    config.r, config.lora_alpha = rank, int(alpha) if alpha.is_integer() else alpha
    config.use_rslora, config.rank_pattern, config.alpha_pattern = False, {}, {}
    config.target_modules, config.target_parameters = sorted(leaves), None
    # PEFT also adapts what has a target's name and no factors in the file; with a B of zeros that stays as it is.
    config.exclude_modules, config.init_lora_weights = None, True
    return found, config


def _cut(model: PreTrainedModel, layer: PeftLayer, b: Any) -> dict[str, Any]:
    """B in the parts that the checkpoint has of the weight, by the names of these."""
    weight = f"{layer.module}.{layer.parameter}"
    parts: dict[str, Any] = _compat.revert_weight_conversion(model, {weight: b})
    fused = len(layer.shape) == 3
    fits = sum(part.shape[0] for part in parts.values()) == b.shape[:-1].numel() and all(
        part.ndim == 2
        and part.shape[1] == layer.rank
        and name.endswith(".weight")
        and bool(_EXPERT.search(name)) == fused
        for name, part in parts.items()
    )
    if not fits or layer.flipped:
        raise ValueError(
            f"{weight} is fused in the checkpoints of {type(model).__name__} too, or cut in another way than by "
            "rows of an expert, so its adapter has no form per expert: save it in PEFT's form."
        )
    return parts


def _filled(factor: Any, rank: int, dim: int) -> Any:
    """With zeros up to `rank` along `dim`."""
    missing = rank - factor.shape[dim]
    if not missing:
        return factor
    size = list(factor.shape)
    size[dim] = missing
    return torch.cat([factor, LazyTensor(Constant(torch.zeros(size, dtype=factor.dtype)))], dim)
