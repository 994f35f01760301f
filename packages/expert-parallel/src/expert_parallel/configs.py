"""The forms in which a user may give the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from ep_mesh import DistributedConfig


def as_config(config: DistributedConfig | Mapping[str, Any] | Any) -> DistributedConfig:
    """Our config from ours, from a dict, or from native transformers' object of the same name.

    Raises:
        TypeError: it is none of these.
        ValueError: a rule of `DistributedConfig` is broken.
    """
    if isinstance(config, DistributedConfig):
        return config
    if isinstance(config, Mapping):
        return DistributedConfig.from_dict(config)
    if is_dataclass(config) and not isinstance(config, type):
        return DistributedConfig.from_dict(asdict(config))
    raise TypeError(
        "distributed_config must be a DistributedConfig or a dict of its fields, got "
        f"{type(config).__name__}."
    )
