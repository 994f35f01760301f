"""Sizes that configs of different families keep under different names."""

from __future__ import annotations

from typing import Any

from torch import nn

_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SLOTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "num_selected_experts",
    "top_k",
)


def text_config(model: nn.Module) -> Any:
    """The config of the model's text part; None if the model has no config."""
    settings: Any = getattr(model, "config", None)
    return settings.get_text_config() if hasattr(settings, "get_text_config") else settings


def hidden_size(model: nn.Module) -> int:
    """H.

    Raises:
        ValueError: the model's config doesn't tell it.
    """
    return _number_of(model, _HIDDEN, "The hidden size")


def num_experts(model: nn.Module) -> int:
    """E.

    Raises:
        ValueError: the model's config doesn't tell it.
    """
    return _number_of(model, _EXPERTS, "The number of experts")


def experts_per_token(model: nn.Module) -> int:
    """K.

    Raises:
        ValueError: the model's config doesn't tell it.
    """
    return _number_of(model, _SLOTS, "The experts per token")


def _number_of(model: nn.Module, names: tuple[str, ...], what: str) -> int:
    config = text_config(model)
    for name in names:
        if isinstance(number := getattr(config, name, None), int):
            return number
    raise ValueError(
        f"{what} of {type(model).__name__} is not known: its config has none of {', '.join(names)}."
    )
