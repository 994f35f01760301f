"""A model from what stands on the command line, checked and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

from ep_mesh import DistributedConfig
from ep_plans import plan_stages, resolve_plans
from expert_parallel.loading import told_unexported
from expert_parallel.meta import build_on_meta, read_config


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
        ValueError: there is none; where a folder has none, transformers makes one that knows no word.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer can be read from {name}: pass --tokenizer with a folder or name "
            f"({' '.join(str(error).split())})."
        ) from error
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"there is no tokenizer in {name}: pass --tokenizer with a folder or name."
        )
    return tokenizer


def check_weights(name: str) -> None:
    """Check that a local folder holds weights, and that a name is not that of a kind of model.

    Raises:
        ValueError: it does not.
    """
    path = Path(name)
    if told := told_unexported(path):
        raise ValueError(told)
    if not path.exists() and name.replace("-", "_") in CONFIG_MAPPING:
        raise ValueError(
            f"{name} is a model type, which has no weights; to train from random ones, pass --from-scratch "
            "and a --tokenizer."
        )
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
