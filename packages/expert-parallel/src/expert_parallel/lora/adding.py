"""`add_lora`: a sharded model gets adapters that are sharded with it."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ep_mesh.world import gathered, world_size
from ep_plans import ParallelState, ParameterSharding, parallel_state
from ep_plans.parallelize import note_parameters
from expert_parallel._compat import holds_adapters
from expert_parallel.agreement import all_or_none
from expert_parallel.initializing import shared_seed
from expert_parallel.lora._compat import PeftLayer
from expert_parallel.lora.modules import CHILD, FACTORS, Adapter, install
from expert_parallel.lora.targets import Targets, check_not_quantized, resolve_targets

_STATE = "_ep_lora"

ModelT = TypeVar("ModelT", bound=PreTrainedModel)
Values = Callable[[PeftLayer, str], Tensor]
"""Gives the whole value of the factor "lora_A" or "lora_B" of a layer, as `Adapter` holds it."""


@dataclass(frozen=True)
class LoraState:
    """What `add_lora` did.

    Attributes:
        config: the `peft.LoraConfig`, its targets as PEFT translated them.
        targets: what trains.
    """

    config: Any
    targets: Targets


def lora_state(model: nn.Module) -> LoraState | None:
    """What `add_lora` did to `model`; None if it was not called."""
    return model.__dict__.get(_STATE)


def adapters_of(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """The adapters of a model, with their paths."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield name, module


def saved_tensors(model: nn.Module, targets: Targets) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the modules that train whole, those that are here, with their names."""
    state = parallel_state(model)
    pipeline = None if state is None else state.pipeline
    for path in targets.saved:
        if pipeline is None or pipeline.runs(path):
            held: Mapping[str, Tensor] = model.get_submodule(path).state_dict(keep_vars=True)
            yield from ((f"{path}.{key}", value) for key, value in held.items())


def add_lora(
    model: ModelT, config: Any, *, dtype: torch.dtype | None = None, seed: int | None = None
) -> ModelT:
    """Freeze `model` and add the adapters that a `peft.LoraConfig` asks for; every rank must call.

    Call it after the model was sharded (`from_pretrained`, `parallelize`), or with one that isn't. An
    adapter is sharded with its weight: over TP the factor that meets the cut dimension, over EP both
    with their experts. Over FSDP's axes they are whole. `save_pretrained` then writes the adapters
    alone, as `peft` does, and `peft.PeftModel.from_pretrained` loads them.

    Args:
        model: a transformers model.
        config: which weights (PEFT's rules; experts by `target_parameters`, or by the names that PEFT
            translates to that), rank, scale, dropout (without TP), `modules_to_save`, which train whole
            and as they are sharded. DoRA, biases and initial values that need the weights are not
            supported.
        dtype: of the adapters; None: the weights' own, or float32 where that has 16 bits.
        seed: of the initial values; None: one that rank 0 draws. The values don't depend on the layout.

    Returns:
        The same model. Adapters and `modules_to_save` are all that trains.

    Raises:
        ValueError: a target that matches nothing, or experts that PEFT would skip silently; a setting
            that is not supported; a quantized model; the model has adapters. Nothing is changed then.
        ImportError: `peft` is not installed.

    Costs a small all-gather, host memory for the whole of one factor at a time, and in each backward
    one all-reduce of the factors' gradients per adapted module and data axis (also between
    accumulated micro-batches). Experts that `ep_kernels` runs multiply their rows with the factors, in
    products of their own, and keep for backward what plain autograd does (the input, first projection
    and hidden activation of each row); where other code runs them (TP without EP, an
    `experts_implementation`) the product of the factors is made whole, one weight-sized tensor per
    weight and layer, kept for backward. Method: Hu et al., LoRA (2021).
    """
    with all_or_none("Adding adapters"):
        state, targets, config = _resolved(model, config)
    _check_agreement(config, targets, dtype)
    if seed is None:
        seed = shared_seed()
    return add_adapters(model, state, targets, config, dtype, _initial_values(config, seed))


def load_lora(
    model: ModelT,
    directory: str | os.PathLike[str],
    *,
    trainable: bool = False,
    dtype: torch.dtype | None = None,
) -> ModelT:
    """Add the adapters of a directory that `peft` or `save_pretrained` wrote; every rank must call.

    Args:
        model: as for `add_lora`.
        directory: with `adapter_config.json` and `adapter_model.safetensors`.
        trainable: whether they shall train.
        dtype: as for `add_lora`.

    Raises:
        ValueError: as `add_lora`; the file lacks an adapter, has others or of other shapes.
        OSError: a file is missing or broken.
    """
    from expert_parallel.lora.files import AdapterFile

    with all_or_none("Reading adapters"):
        file = AdapterFile(directory)
        state, targets, config = _resolved(model, file.config)
        file.check(targets)
    _check_agreement(config, targets, dtype)
    with all_or_none("Reading adapters"):
        add_adapters(model, state, targets, config, dtype, file.value)
        for name, tensor in saved_tensors(model, targets):
            file.fill(name, tensor)
    if not trainable:
        model.requires_grad_(False)
    return model


def _resolved(model: nn.Module, config: Any) -> tuple[ParallelState | None, Targets, Any]:
    """Check, and let PEFT say what is adapted; nothing is changed."""
    try:
        import peft as _peft  # noqa: F401
    except ImportError as error:
        raise ImportError("Adapters need peft: pip install 'peft>=0.21'.") from error
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"add_lora takes a transformers model, got {type(model).__name__}. A PeftModel has its "
            "adapters already: give the model that it wraps, before wrapping."
        )
    if lora_state(model) is not None or holds_adapters(model):
        raise ValueError("This model holds adapters already; load it anew to add others.")
    state = parallel_state(model)
    if state is None and world_size() > 1:
        raise ValueError(
            f"The model is not sharded, but {world_size()} processes run: shard it first "
            "(from_pretrained with distributed_config, or parallelize), then add adapters."
        )
    check_not_quantized(model)
    config = copy.deepcopy(config)
    targets = resolve_targets(model, config)
    if config.lora_dropout and state is not None and state.config.tp_size > 1:
        raise ValueError(
            f"lora_dropout={config.lora_dropout} with tp_size={state.config.tp_size}: the ranks of a TP "
            "group would each drop others. Use lora_dropout=0, or tp_size=1."
        )
    return state, targets, config


def _check_agreement(config: Any, targets: Targets, dtype: torch.dtype | None) -> None:
    """Every rank asks for the same adapters."""
    mine = json.dumps(
        [repr(targets), config.lora_dropout, str(config.init_lora_weights), str(dtype)]
    )
    if len(set(gathered(mine))) > 1:
        raise ValueError(
            "The ranks ask for different adapters; give every rank the same LoraConfig."
        )


def add_adapters(
    model: ModelT,
    state: ParallelState | None,
    targets: Targets,
    config: Any,
    dtype: torch.dtype | None,
    values: Values,
) -> ModelT:
    """Freeze the model but for what trains whole, make the adapters and install them."""
    from expert_parallel.parallel import install_saving

    model.requires_grad_(False)
    for _, tensor in saved_tensors(model, targets):
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_()
    mesh = None if state is None else state.mesh
    pipeline = None if state is None else state.pipeline
    by_module: dict[str, list[PeftLayer]] = {}
    for layer in targets.layers:
        by_module.setdefault(layer.module, []).append(layer)
    added: dict[str, ParameterSharding] = {}
    for path, wanted in by_module.items():
        if pipeline is not None and not pipeline.runs(path):
            continue
        module = model.get_submodule(path)
        adapters = {}
        for layer in wanted:
            name = f"{path}.{layer.parameter}"
            sharding = ParameterSharding() if state is None else state.shardings[name]
            weight: Tensor = getattr(module, layer.parameter)
            kind = dtype or torch.promote_types(weight.dtype, torch.float32)
            device = torch.device("cpu") if isinstance(weight, DTensor) or mesh else weight.device
            a, b = (values(layer, factor).to(device, kind) for factor in FACTORS)
            adapter = Adapter(layer, mesh, sharding, (a, b), config.lora_dropout)
            adapter.train(model.training)
            adapters[layer.parameter] = adapter
            for factor, placed in adapter.shardings.items():
                added[f"{path}.{CHILD}.{layer.parameter}.{factor}"] = placed
        on_experts_axis = state is not None and path in state.plans.experts
        install(module, adapters, on_experts_axis=on_experts_axis)
    if pipeline is not None:
        pipeline = pipeline.with_added(*_added_names(by_module))
    note_parameters(model, added, pipeline)
    model.__dict__[_STATE] = LoraState(config, targets)
    install_saving(model)
    return model


def _added_names(
    by_module: Mapping[str, Sequence[PeftLayer]],
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The tensors and the modules, children first, that adapted modules get, by the name of those."""
    tensors: dict[str, list[str]] = {}
    modules: dict[str, list[str]] = {}
    for path, layers in by_module.items():
        own = [f"{path}.{CHILD}.{layer.parameter}" for layer in layers]
        tensors[path] = [f"{name}.{factor}" for name in own for factor in FACTORS]
        modules[path] = [each for name in own for each in (f"{name}.dropout", name)]
        modules[path].append(f"{path}.{CHILD}")
    return tensors, modules


def _initial_values(config: Any, seed: int) -> Values:
    """PEFT's initial values, drawn anew for each factor, so that they don't depend on the layout."""

    def value(layer: PeftLayer, factor: str) -> Tensor:
        text = f"{layer.key}.{factor}"
        own = int.from_bytes(text.encode(), "little") % (2**61 - 1)
        generator = torch.Generator().manual_seed((seed + own) % 2**63)
        shape = layer.shape_a if factor == "lora_A" else layer.shape_b
        drawn = torch.empty(shape)
        if factor == "lora_B" and config.init_lora_weights is not False:
            drawn.zero_()
        elif config.init_lora_weights == "gaussian":
            drawn.normal_(std=1 / layer.rank, generator=generator)
        else:
            bound = 1 / math.sqrt(shape[1])
            drawn.uniform_(-bound, bound, generator=generator)
        return unpacked(drawn, layer, factor)

    return value


def unpacked(stored: Tensor, layer: PeftLayer, factor: str) -> Tensor:
    """From a factor as PEFT stores it to [E, N, in] or [E, out, N]; of one matrix as it is.

    PEFT stores A of experts as [E * N, in], an expert's rows together, and B as [out, N * E],
    experts innermost.
    """
    if len(layer.shape) == 2:
        return stored
    experts = layer.shape[0]
    if factor == "lora_A":
        return stored.view(experts, layer.rank, stored.shape[1])
    return stored.view(stored.shape[0], layer.rank, experts).permute(2, 0, 1)


def packed(factor_value: Tensor, layer: PeftLayer, factor: str) -> Tensor:
    """The inverse of `unpacked`."""
    if len(layer.shape) == 2:
        return factor_value
    if factor == "lora_A":
        return factor_value.view(layer.shape_a)
    whole = factor_value.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
    return whole.view(layer.shape_b)
