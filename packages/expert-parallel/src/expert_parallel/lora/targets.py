"""What a LoRA configuration adapts: PEFT says, on an empty copy of the model.

So targets, ranks, scales and names in files are PEFT's own. What PEFT would skip without an error is
an error here.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ep_plans import parallel_state
from expert_parallel import _compat
from expert_parallel.lora._compat import PeftLayer, inject

# What a configuration may say; anything else must have its default.
_SUPPORTED = frozenset(
    [
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "init_lora_weights",
        "target_modules",
        "exclude_modules",
        "target_parameters",
        "modules_to_save",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "task_type",
        "inference_mode",
        "base_model_name_or_path",
        "revision",
        "auto_mapping",
        "peft_version",
        "peft_type",
    ]
)
_INITIAL = (True, False, "gaussian")
# By what names the projections of experts are asked for, in checkpoints with a tensor per expert too.
_ASKED_AS = {
    "gate_up_proj": ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3"),
    "down_proj": ("down_proj", "w2"),
    "up_proj": ("up_proj", "w1"),
}


@dataclass(frozen=True)
class Targets:
    """What a configuration trains, that of all pipeline stages.

    Attributes:
        layers: the adapters.
        saved: the modules that train whole (`modules_to_save`), and the shape of each of their tensors.
    """

    layers: list[PeftLayer]
    saved: dict[str, dict[str, tuple[int, ...]]]


def resolve_targets(model: PreTrainedModel, config: Any) -> Targets:
    """What `config` asks for.

    Its targets are translated in place, as PEFT does. Needs no memory for weights, and no communication.

    Raises:
        ValueError: a setting that isn't supported; a target that matches nothing; experts that were
            asked for and PEFT would skip; a weight that is quantized.
    """
    check_settings(config)
    asked = copy.copy(config.target_modules)
    skeleton = _skeleton(model)
    stacked = [name for name, p in _stacked_parameters(skeleton)]
    linear = [name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)]
    parameters = [name for name, _ in skeleton.named_parameters()]
    saved = _modules_to_save(skeleton, config.modules_to_save)
    try:
        layers = inject(config, skeleton)
    except ValueError as error:
        if "target" not in str(error).lower():
            raise
        raise ValueError(f"{error} {_choices(linear, stacked)}") from error
    _check_used(config, layers, linear, stacked, parameters)
    if not config.exclude_modules and config.layers_to_transform is None:  # the user left some out
        _check_experts(asked, layers, linear, stacked)
    _check_apart(layers, saved)
    state = parallel_state(model)
    pipeline = None if state is None else state.pipeline
    for layer in layers:
        if pipeline is None or pipeline.runs(layer.module):
            _check_weight(model, layer)
    return Targets(layers, saved)


def _modules_to_save(
    skeleton: nn.Module, asked: Sequence[str] | None
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The modules whose names end so, as PEFT reads it, and the tensors that they save."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    tied: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", None) or {}
    for end in asked or ():
        names = [name for name, _ in skeleton.named_modules() if name and name.endswith(end)]
        if not names:
            kinds = _short((name for name, _ in skeleton.named_modules() if name), 1)
            raise ValueError(
                f"modules_to_save={list(asked or ())}: no module's name ends with {end!r}; names end with "
                f"{[kind for kind in kinds if not kind.isdecimal()]}."
            )
        for name in names:
            state = skeleton.get_submodule(name).state_dict()
            tensors = {f"{name}.{key}": tuple(value.shape) for key, value in state.items()}
            if not tensors:
                raise ValueError(f"modules_to_save={end!r}: {name} has no weights.")
            shared = sorted(tensors.keys() & {*tied, *tied.values()})
            if shared:
                raise ValueError(
                    f"modules_to_save={end!r}: {shared[0]} is tied to another weight, which would train "
                    "with it and not be saved. Untie them (tie_word_embeddings=False) before training."
                )
            found[name] = tensors
    return {
        name: tensors
        for name, tensors in found.items()
        if not any(name.startswith(f"{other}.") for other in found)
    }


def _check_apart(layers: Sequence[PeftLayer], saved: Iterable[str]) -> None:
    """No module trains both whole and by an adapter."""
    for name in saved:
        for layer in layers:
            if layer.module == name or layer.module.startswith(f"{name}."):
                raise ValueError(
                    f"modules_to_save and the targets both name {layer.module}: train it whole, or by an "
                    "adapter."
                )


def check_settings(config: Any) -> None:
    """Refuse what the sharded adapters can't do.

    Raises:
        ValueError: names each setting.
        TypeError: it is no `peft.LoraConfig`.
    """
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise TypeError(f"add_lora takes a peft.LoraConfig, got {type(config).__name__}.")
    plain = LoraConfig()
    wrong = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if field.name not in _SUPPORTED
        and (getattr(config, field.name) or None) != (getattr(plain, field.name) or None)
    ]
    if config.init_lora_weights not in _INITIAL:
        wrong.append(f"init_lora_weights={config.init_lora_weights!r}")
    if wrong:
        raise ValueError(
            f"This LoraConfig has settings that sharded adapters don't support: {', '.join(wrong)}. "
            f"Leave them at their defaults; init_lora_weights may be one of {_INITIAL}."
        )


def _skeleton(model: PreTrainedModel) -> nn.Module:
    """The model's class on the meta device, nothing sharded or wrapped."""
    kind = next(
        each
        for each in type(model).__mro__
        if issubclass(each, PreTrainedModel) and not issubclass(each, FSDPModule)
    )
    with torch.device("meta"), _compat.quiet():
        return _compat.from_config(kind, copy.deepcopy(model.config))


def _stacked_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Fused expert weights: three dimensions, and not a convolution's."""
    return [
        (f"{path}.{name}", parameter)
        for path, module in model.named_modules()
        if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and "expert" in path
    ]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _short(names: Iterable[str], parts: int) -> list[str]:
    """Names without what differs from layer to layer, in order."""
    return list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))


def _choices(linear: Sequence[str], stacked: Sequence[str]) -> str:
    text = f"target_modules can be {_short(linear, 1)}"
    if stacked:
        text += f"; experts are adapted by target_parameters={_short(stacked, 3)}"
    return text + "."


def _check_used(
    config: Any,
    layers: Sequence[PeftLayer],
    linear: Sequence[str],
    stacked: Sequence[str],
    parameters: Sequence[str],
) -> None:
    """Every name of the configuration adapts something."""
    modules = [layer.module for layer in layers if layer.linear]
    owned = [f"{layer.module}.{layer.parameter}" for layer in layers if not layer.linear]
    listed = [] if isinstance(config.target_modules, str) else config.target_modules or ()
    unused = [t for t in sorted(listed) if not any(_matches(name, t) for name in modules)]
    lost = sorted(
        target
        for target in config.target_parameters or ()
        if not any(_matches(name, target) for name in owned)
    )
    if unused or lost:
        named = [f"target_modules {unused}"] * bool(unused) + [f"target_parameters {lost}"] * bool(
            lost
        )
        hidden = [t for t in unused if any(_matches(name, t) for name in parameters)]
        also = f" {hidden} are parameters: give them as target_parameters." if hidden else ""
        raise ValueError(
            f"{' and '.join(named)} match nothing that can be adapted.{also} {_choices(linear, stacked)}"
        )


def _check_experts(
    asked: Any, layers: Sequence[PeftLayer], linear: Sequence[str], stacked: Sequence[str]
) -> None:
    """Fused experts that the targets name are adapted; linear layers of that name too."""
    adapted = {f"{layer.module}.{layer.parameter}" for layer in layers}
    every = isinstance(asked, str) and asked.lower() == "all-linear"

    def asks(path: str, names: Sequence[str]) -> bool:
        if isinstance(asked, str):
            return every or any(re.fullmatch(asked, f"{path}.{name}") for name in names)
        return any(_matches(f"{path}.{name}", t) for t in asked or () for name in names)

    skipped = [
        name
        for name in stacked
        for path, _, leaf in [name.rpartition(".")]
        if name not in adapted and asks(path, _ASKED_AS.get(leaf, (leaf,)))
    ]
    if skipped:
        raise ValueError(
            f"target_modules={asked!r} asks for the experts too, but PEFT would skip {skipped[0]} and "
            f"{len(skipped) - 1} others: they are fused weights, no linear layers. Add "
            f"target_parameters={_short(skipped, 3)}, or name linear layers outside of the experts, of "
            f"{_short(linear, 2)}."
        )
    if every or not isinstance(asked, str):
        left = [
            name
            for name in linear
            if f"{name}.weight" not in adapted
            and (not name.endswith("lm_head") if every else asks(*_path_and_leaf(name)))
        ]
        if left:
            warnings.warn(
                f"PEFT takes these names for the experts' and leaves out {left}: it adapts fused experts "
                "or linear layers of one name, not both.",
                stacklevel=4,
            )


def _path_and_leaf(name: str) -> tuple[str, Sequence[str]]:
    path, _, leaf = name.rpartition(".")
    return path, (leaf,)


def _check_weight(model: nn.Module, layer: PeftLayer) -> None:
    """The weight is there, whole in shape, and not quantized."""
    module = model.get_submodule(layer.module)
    weight = module._parameters.get(layer.parameter)
    name = f"{layer.module}.{layer.parameter}"
    if weight is None or tuple(weight.shape) != layer.shape:
        found = "nothing" if weight is None else f"{tuple(weight.shape)}"
        raise ValueError(
            f"{name} should be a weight of shape {layer.shape}, as the config says, and the model has "
            f"{found}. Quantized or changed models can't be adapted; load it in 16 bit."
        )


def quantized_parameters(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of the weights in less than 16 bit; and of the fused experts', if none of these is.

    Quantized experts have scales beside them, which look like weights.
    """
    quantized = [name for name, p in model.named_parameters() if _is_narrow(p)]
    stacked = [name for name, _ in _stacked_parameters(model)]
    return quantized, stacked if set(stacked).isdisjoint(quantized) else []


def _is_narrow(tensor: Tensor) -> bool:
    """Whether values lie in less than 16 bit, also those inside a tensor that shows another dtype (torchao)."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inside = [getattr(tensor, name) for name in names]  # of a DTensor its mesh too
        return any(_is_narrow(each) for each in inside if isinstance(each, Tensor))
    return not tensor.is_floating_point() or tensor.element_size() < 2


def wide_experts(model: nn.Module) -> str:
    """The weights of fused experts, as patterns with dtype and bytes; "" if there are none, or narrower ones too."""
    found: dict[tuple[str, torch.dtype], list[int]] = {}
    for name, parameter in _stacked_parameters(model):
        if _is_narrow(parameter):
            return ""  # what is wide beside them are scales
        key = re.sub(r"\.\d+\.", ".*.", name), parameter.dtype
        found.setdefault(key, []).append(parameter.numel() * parameter.element_size())
    total = sum(sum(sizes) for sizes in found.values())
    each = [
        f"{name} ({len(sizes)} x {sizes[0]} bytes in {dtype})"
        for (name, dtype), sizes in found.items()
    ]
    return f"{', '.join(each)}, {total} bytes in all" if each else ""


def check_not_quantized(model: nn.Module) -> None:
    """Refuse a base model of which anything is quantized.

    Quantizers leave fused experts as they are (bitsandbytes), or give them scales that adapters
    don't know of, and say neither.

    Raises:
        ValueError: names a quantized weight and the fused ones that aren't, with their bytes.
    """
    quantized, whole = quantized_parameters(model)
    if quantized:
        left = f", while these are not: {wide_experts(model)}" if whole else ""
        raise ValueError(
            f"{quantized[0]} and {len(quantized) - 1} others are quantized{left}. Adapters are for "
            "weights in 16 or 32 bit: load the model without quantization, or dequantized."
        )
