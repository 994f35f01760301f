"""Layouts under every supported transformers: older ones ship expert plans that mask routes."""

from __future__ import annotations

from typing import Any

import transformers


def dispatching(**layout: Any) -> dict[str, Any]:
    """A layout in which tokens move, also where the shipped plan would mask (5.17)."""
    shipped = transformers.Qwen3MoeConfig().base_model_ep_plan or {}
    if layout.get("ep_size", 1) > 1 and "ep_dispatch_experts" not in shipped.values():
        layout["ep_plan"] = {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
    return layout


def name_of(layout: dict[str, Any]) -> str:
    """The sizes, as a test's name."""
    return "-".join(
        f"{key.removesuffix('_size')}{size}" for key, size in layout.items() if key != "ep_plan"
    )
