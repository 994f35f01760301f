"""A model's config from a name, and the model of a config without memory for its weights."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from expert_parallel import _compat

_HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModel",
)


def read_config(name: str) -> PreTrainedConfig:
    """The config of a local folder, a `config.json`, a model type (its defaults), or a hub model.

    Raises:
        ValueError: it is none of these; the nearest model types are named.
    """
    path = Path(name)
    if path.exists():
        if path.is_dir() and not (path / "config.json").is_file():
            raise ValueError(f"the folder {name} has no config.json.")
        return _from_pretrained(name)
    known = transformers.CONFIG_MAPPING
    if "/" not in name:
        key = name.replace("-", "_")
        if key in known:
            config: PreTrainedConfig = known[key]()
            return config
        near = difflib.get_close_matches(key, list(known), n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"{name!r} is no local file or folder and no model type.{hint}")
    owner, _, rest = name.partition("/")
    if owner in ("", ".", "..", "~") or not rest or "/" in rest:  # no name of a hub
        raise ValueError(f"there is no file or folder {name}.")
    try:
        return _from_pretrained(name)
    except Exception as error:
        raise ValueError(
            f"{name!r} is no local file or folder, and its config can't be read from the hub: "
            f"{' '.join(str(error).split())}"
        ) from error


def _from_pretrained(name: str) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(name)
    return config


def build_on_meta(config: PreTrainedConfig) -> nn.Module:
    """The model of a config without memory for its weights, with its head if it has one.

    Raises:
        ValueError: transformers has no model for this config.
    """
    with torch.device("meta"):
        for name in getattr(config, "architectures", None) or ():
            architecture = getattr(transformers, name, None)
            if architecture is not None:
                return _tied(_compat.from_config(architecture, config))
        for head in _HEADS:
            auto = getattr(transformers, head)
            if _compat.auto_class_knows(auto, config):
                return _tied(auto.from_config(config))
    raise ValueError(
        f"transformers {transformers.__version__} has no model for a {type(config).__name__} "
        f"(model_type {config.model_type!r})."
    )


def _tied(model: Any) -> nn.Module:
    model.tie_weights()
    found: nn.Module = model
    return found
