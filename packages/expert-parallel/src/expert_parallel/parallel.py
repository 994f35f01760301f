"""Shard a model that is built, or on the meta device, and give it the methods that go with it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeVar, get_args

from torch import nn
from transformers import PreTrainedModel

import ep_plans
from ep_dispatch import ExpertsForward
from ep_dispatch.implementation import MEGAMOE
from ep_kernels import BackendRequest, Recompute, compacted_forward, module_experts_forward
from ep_mesh import DistributedConfig, ParallelMesh
from expert_parallel.configs import as_config
from expert_parallel.fusing import fuse
from expert_parallel.generation import generate
from expert_parallel.lora.adding import lora_state
from expert_parallel.lora.targets import quantized_parameters, wide_experts
from expert_parallel.saving import save_pretrained

_SAVE_DEFAULTS = {
    "state_dict": None,
    "push_to_hub": False,
    "token": None,
    "save_peft_format": True,
    "distributed_checkpoint": False,
    "safe_serialization": True,
    "save_function": None,
}

ModelT = TypeVar("ModelT", bound=nn.Module)


def parallelize(
    model: ModelT,
    config: DistributedConfig | Mapping[str, Any] | Any,
    *,
    experts_recompute: Recompute = "none",
    ep_options: Mapping[str, Any] | None = None,
    experts_backend: BackendRequest = "auto",
    fused_operators: bool = True,
) -> ModelT:
    """Shard `model` in place over the running processes; every rank must call.

    Starts `torch.distributed` if nobody did. A built model must hold the same values on every
    rank (the same seed, or the same file); each keeps its part, on its own device, to which no
    more than that part is moved. Parameters on the meta device stay there: `initialize` gives
    them values, or `load_state_dict` does.

    Args:
        model: any module; a transformers model brings its plans.
        config: a `DistributedConfig`, a dict of its fields, or native transformers' object.
        experts_recompute: `"gate_up"` keeps only the received rows of each MoE layer for backward
            and computes the experts' first projection again; `"none"` keeps that too. Of 8 in 128
            experts over 8 ranks, in bf16 with H=2048, I=768: 22 against 46 KiB a token and layer.
            Experts that no EP plan dispatches are not concerned.
        ep_options: further settings of the `ep_implementation`, the same on all ranks. Those of
            "all_to_all" (and "auto", for the calls that it runs): `num_chunks`, `max_rows`,
            `wire_dtype`, see `ep_dispatch.AllToAll`.
        experts_backend: who computes the matrix products of the experts that an EP plan dispatches:
            `"deep_gemm"`, `"triton"`, `"grouped_mm"`, `"loop"`, or what `ep_kernels.choose_backend`
            finds best (`"auto"`). What it can't compute is an error.
        fused_operators: run RMS norms (`ep_kernels.rms_norm`, which keeps only its input for backward) and
            rotary embeddings (`ep_kernels.apply_rotary`) as one operator each: the same but for
            rounding. Those of another formula stay as they are.

    Returns:
        The same model; `save_pretrained` and `generate` of a transformers model now work for
        all ranks together.

    Raises:
        ValueError: the config does not fit the model, the number of processes or this machine, or
            the model is quantized but for its experts; nothing is cut or moved then.

    Costs one small all-gather.
    """
    resolved = as_config(config)
    mesh = ParallelMesh(resolved.layout)
    shard_model(
        model,
        mesh,
        resolved,
        own_experts=True,
        recompute=experts_recompute,
        backend=experts_backend,
        ep_options=ep_options,
        fused_operators=fused_operators,
    )
    return model


def shard_model(
    model: nn.Module,
    mesh: ParallelMesh,
    config: DistributedConfig,
    *,
    own_experts: bool,
    recompute: Recompute = "none",
    ep_options: Mapping[str, Any] | None = None,
    backend: BackendRequest = "auto",
    fused_operators: bool = True,
) -> None:
    """Apply the plans of `config` and install the methods.

    Args:
        model: built or on the meta device.
        mesh: the meshes of the config's layout.
        config: what to do.
        own_experts: compute experts by `ep_kernels` where it understands them; else by the
            module's own forward, whose implementation the model's config names.
        recompute: what `ep_kernels` computes again in backward.
        ep_options: further settings of the implementation.
        backend: who computes the products of `ep_kernels`.
        fused_operators: run RMS norms and rotary embeddings as one operator each.
    """
    if lora_state(model) is not None:
        raise ValueError("This model holds adapters: shard it first, then add_lora.")
    quantized, whole = quantized_parameters(model)
    if quantized and whole:
        raise ValueError(
            f"{quantized[0]} and {len(quantized) - 1} others are quantized, while the experts, the larger "
            f"part, are not: {wide_experts(model)}. Quantizers leave fused experts as they are. Load the "
            "model without quantization."
        )
    if recompute not in get_args(Recompute):
        raise ValueError(
            f"experts_recompute={recompute!r} is unknown; known are {', '.join(get_args(Recompute))}."
        )
    if backend not in get_args(BackendRequest):
        known = ", ".join(get_args(BackendRequest))
        raise ValueError(f"experts_backend={backend!r} is unknown; known are {known}.")
    if backend != "auto" and config.ep_size == 1:
        raise ValueError(
            f'experts_backend="{backend}" is for experts that an EP plan dispatches, got ep_size=1; '
            "set ep_size, or leave it out."
        )
    if backend != "auto" and config.ep_implementation == MEGAMOE:
        raise ValueError(
            f'ep_implementation="{MEGAMOE}" computes the experts itself, but '
            f'experts_backend="{backend}". Leave one of them out.'
        )
    make: Callable[[nn.Module], ExpertsForward] = _module_forward
    if own_experts:
        make = functools.partial(module_experts_forward, recompute=recompute, backend=backend)
    fused = fuse(model) if fused_operators else []
    try:
        ep_plans.parallelize(model, mesh, config, experts_forward=make, ep_options=ep_options)
    except BaseException:
        for module in fused:
            module.__dict__.pop("forward", None)
        raise
    if isinstance(model, PreTrainedModel):
        install_saving(model)
        if model.can_generate():
            object.__setattr__(model, "generate", MethodType(generate, model))


def install_saving(model: PreTrainedModel) -> None:
    """Let `model.save_pretrained` be ours."""
    # On the object: FSDP2 and PEFT change or wrap the class.
    object.__setattr__(model, "save_pretrained", MethodType(_save_method, model))


def _save_method(
    model: PreTrainedModel, save_directory: str | os.PathLike[str], **kwargs: Any
) -> None:
    """`save_pretrained` under the arguments of transformers' method."""
    understood = ("max_shard_size", "variant", "save_original_format")
    ours = {name: kwargs.pop(name) for name in understood if name in kwargs}
    # Which rank writes is settled here; whose values to write too.
    for name, plain in _SAVE_DEFAULTS.items():
        value = kwargs.pop(name, plain)
        if value is not plain and value != plain:
            raise ValueError(f"save_pretrained of a sharded model does not take {name}={value!r}.")
    kwargs.pop("is_main_process", None)
    if kwargs:
        raise TypeError(f"save_pretrained got unexpected arguments: {', '.join(kwargs)}.")
    save_pretrained(model, save_directory, **ours)


def _module_forward(experts: nn.Module) -> ExpertsForward:
    def count() -> int:
        number = experts.num_experts
        assert isinstance(number, int), "parallelize sets the local number of experts"
        return number

    return compacted_forward(experts.forward, count, experts)
