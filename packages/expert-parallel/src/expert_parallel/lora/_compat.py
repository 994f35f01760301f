"""Private parts of PEFT that this package needs, in one place.

| what | why | seen in |
| --- | --- | --- |
| `lora.ParamWrapper.parameter_name`, `.num_experts`, `._did_swap_in_out_features` | which parameter an adapter of experts is for, and which way round | peft 0.21 |
| `get_peft_model_state_dict`'s names: the layer's path, with `base_layer` where wrappers nest | what its files hold | peft 0.21 |
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class PeftLayer:
    """One adapter that PEFT makes.

    Attributes:
        key: PEFT's path of the layer, `base_layer` included.
        parameter: the adapted parameter of the module below it.
        shape: the parameter's shape.
        shape_a: of `lora_A.weight`.
        shape_b: of `lora_B.weight`.
        rank: the rank of one expert's adapter.
        scale: what the product of the factors is multiplied with.
        linear: whether the module is a linear layer, not the owner of another parameter.
        flipped: whether a stacked weight is stored [E, in, out] to PEFT's mind.
    """

    key: str
    parameter: str
    shape: tuple[int, ...]
    shape_a: tuple[int, int]
    shape_b: tuple[int, int]
    rank: int
    scale: float
    linear: bool
    flipped: bool

    @property
    def module(self) -> str:
        """The path of the adapted module in the plain model."""
        return ".".join(part for part in self.key.split(".") if part != "base_layer")


def inject(config: Any, model: nn.Module) -> list[PeftLayer]:
    """Let PEFT put the adapters of `config` into `model`, which is changed, and tell which.

    `config` is changed too: PEFT translates targets that name the experts of older checkpoints.

    Raises:
        TypeError: PEFT made a layer of a kind that is not sharded here.
    """
    from peft import inject_adapter_in_model

    saved, config.modules_to_save = config.modules_to_save, None  # no adapters; names would change
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it warns of is checked and said by the caller
            inject_adapter_in_model(config, model)
    finally:
        config.modules_to_save = saved
    return list(_layers(model))


def _layers(model: nn.Module) -> Iterator[PeftLayer]:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import Linear, ParamWrapper

    for key, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        base: Any = layer.get_base_layer()
        if isinstance(layer, ParamWrapper):
            parameter = str(layer.parameter_name)
            shape = tuple(getattr(base, parameter).shape)
            flipped = len(shape) == 3 and not layer._did_swap_in_out_features
        elif isinstance(layer, Linear) and isinstance(base, nn.Linear):
            parameter, shape, flipped = "weight", tuple(base.weight.shape), False
        else:
            raise TypeError(
                f"{key}: adapters of {type(base).__name__} are not supported; those of nn.Linear, and of "
                "parameters given by target_parameters, are."
            )
        (name,) = layer.r
        yield PeftLayer(
            key,
            parameter,
            shape,
            tuple(layer.lora_A[name].weight.shape),
            tuple(layer.lora_B[name].weight.shape),
            int(layer.r[name]),
            float(layer.scaling[name]),
            not isinstance(layer, ParamWrapper),
            flipped,
        )
