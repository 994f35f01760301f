"""Checks of a call's inputs, each of which gives back what is wrong, as a sentence, or None.

Who raises it, and when, is the implementation's business, since all ranks of a group must reach the
same verdict.

T = tokens of this rank, H = hidden size, K = experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DTYPES", "ids_problem", "inputs_problem", "routing_problem"]

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that hidden states and routing weights may have."""


def _name(x: object) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
    return type(x).__name__


def routing_problem(top_k_index: object, top_k_weights: object) -> str | None:
    """What is wrong with the shapes, dtypes or devices of the routing, [T, K] each."""
    if not (isinstance(top_k_index, Tensor) and isinstance(top_k_weights, Tensor)):
        return (
            "top_k_index and top_k_weights must be tensors [T, K], got "
            f"{_name(top_k_index)} and {_name(top_k_weights)}."
        )
    if top_k_index.ndim != 2 or top_k_index.shape[1] == 0:
        return (
            f"top_k_index must be [T, K] with K >= 1 (one row of expert ids per token), got "
            f"{_name(top_k_index)}; flatten batch and sequence into one dimension first."
        )
    if top_k_index.dtype not in (torch.int64, torch.int32):
        return (
            f"top_k_index must hold int64 or int32 expert ids, got {_name(top_k_index)}; pass the "
            "indices of torch.topk, not its values."
        )
    if top_k_weights.shape != top_k_index.shape:
        return (
            f"top_k_weights must have the shape of top_k_index, {list(top_k_index.shape)}, got "
            f"{_name(top_k_weights)}; gather the scores of the chosen experts first."
        )
    if top_k_weights.dtype not in DTYPES:
        return f"top_k_weights must be float64, float32, float16 or bfloat16, got {_name(top_k_weights)}."
    if top_k_weights.device != top_k_index.device:
        return (
            f"top_k_index and top_k_weights must be on one device, got {_name(top_k_index)} and "
            f"{_name(top_k_weights)}."
        )
    return None


def inputs_problem(hidden: object, top_k_index: object, top_k_weights: object) -> str | None:
    """What is wrong with the inputs of one call: hidden states [T, H] and their routing, [T, K] each."""
    if not isinstance(hidden, Tensor) or hidden.ndim != 2 or hidden.dtype not in DTYPES:
        return (
            f"hidden_states must be [T, H] in float64, float32, float16 or bfloat16, got {_name(hidden)}"
            "; flatten batch and sequence into one dimension first (`x.view(-1, x.shape[-1])`)."
        )
    if problem := routing_problem(top_k_index, top_k_weights):
        return problem
    assert isinstance(top_k_index, Tensor)
    if hidden.shape[0] != top_k_index.shape[0]:
        return (
            f"hidden_states and top_k_index must have one row per token, got {_name(hidden)} and "
            f"{_name(top_k_index)}."
        )
    if hidden.device != top_k_index.device:
        return (
            f"hidden_states and top_k_index must be on one device, got {_name(hidden)} and "
            f"{_name(top_k_index)}."
        )
    return None


def ids_problem(top_k_index: Tensor, num_experts: int) -> str:
    """The sentence for expert ids out of range. Reads the ids: a host synchronization on a device."""
    low, high = top_k_index.min().item(), top_k_index.max().item()
    return (
        f"top_k_index must hold global expert ids 0 to {num_experts - 1} (or -1 to skip a slot), got "
        f"ids from {low} to {high}; ids must count all experts of the layer, not those of one rank."
    )
