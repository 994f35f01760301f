"""A model from what stands on the command line: a folder, a config file, a model type, a hub name."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from ep_mesh import DistributedConfig
from ep_plans import plan_stages, resolve_plans
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


def check_plan(config: PreTrainedConfig, layout: DistributedConfig) -> nn.Module:
    """Build the model on the meta device and check that a layout fits it.

    Raises:
        ValueError: a rule is broken.
    """
    model = build_on_meta(config)
    resolve_plans(model, layout)
    if layout.pp_size > 1:
        plan_stages(model, layout)
    return model


def load_tokenizer(name: str, **settings: Any) -> Any:
    """The tokenizer of a folder or hub name.

    Raises:
        ValueError: there is none: transformers then makes one that knows no word.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, **settings)
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"there is no tokenizer in {name}: pass --tokenizer with a folder or name."
        )
    return tokenizer


def check_weights(name: str) -> None:
    """Check that a local folder holds weights.

    Raises:
        ValueError: it does not.
    """
    path = Path(name)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise ValueError(
            f"the folder {name} holds no weights (*.safetensors); to train from random ones, pass "
            "--from-scratch."
        )


def load(
    name: str,
    layout: DistributedConfig,
    dtype: torch.dtype | str,
    *,
    from_scratch: bool = False,
    seed: int = 0,
) -> Any:
    """The causal language model of a folder or hub name, sharded; every rank must call.

    Args:
        name: where it is; with `from_scratch` a model type will do.
        layout: how to shard it.
        dtype: of its parameters; `"auto"`: as saved, or as its config says.
        from_scratch: with random weights, the same in every layout. The whole model is in each
            rank's memory until it is sharded.
        seed: of the random weights.
    """
    from expert_parallel.auto import AutoModelForCausalLM
    from expert_parallel.parallel import parallelize

    if not from_scratch:
        return AutoModelForCausalLM.from_pretrained(name, distributed_config=layout, dtype=dtype)
    config = read_config(name)
    if isinstance(dtype, str):
        dtype = getattr(config, "dtype", None) or torch.float32
    torch.manual_seed(seed)
    return parallelize(AutoModelForCausalLM.from_config(config, dtype=dtype), layout)
