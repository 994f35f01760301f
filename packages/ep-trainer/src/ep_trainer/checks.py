"""What a run on a sharded model cannot do is said when the trainer is built, not hours later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from ep_plans import parallel_state

_NEEDS_WHOLE_MATRICES = ("adafactor", "adalomo", "apollo", "galore", "lomo")


def check_model(model: nn.Module) -> None:
    """Refuse a model that nobody sharded on several ranks.

    Raises:
        ValueError: every rank would train a copy of its own.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"the model ({type(model).__name__}) is not sharded, but {dist.get_world_size()} "
            "processes run: load it with expert_parallel.AutoModelForCausalLM.from_pretrained("
            "..., distributed_config=...) or shard it with expert_parallel.parallelize(model, "
            "config)."
        )


def check_model_init(model: nn.Module | None) -> None:
    """Refuse models that transformers makes anew, which are not those that the layout was learnt from.

    Raises:
        ValueError: `model_init` gives a sharded model, or several processes run.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several or (model is not None and parallel_state(model) is not None):
        raise ValueError(
            "model_init (and so hyperparameter_search) does not work with a sharded model: give the model "
            "itself, and make a trainer for each trial."
        )


def check_arguments(args: TrainingArguments) -> None:
    """Refuse the arguments that don't go with a sharded model.

    Raises:
        ValueError: names each argument, why it doesn't work and what does.
    """
    problems = list(_problems(args))
    if problems:
        raise ValueError(
            "these TrainingArguments do not work with a sharded model:\n  - "
            + "\n  - ".join(problems)
        )


def check_saves(model: nn.Module) -> None:
    """Refuse to save through transformers' own `save_pretrained`, which sees one rank's shards.

    Raises:
        ValueError: the model has no `save_pretrained` that gathers.
    """
    own = getattr(getattr(model, "save_pretrained", None), "__func__", None)
    if own is PreTrainedModel.save_pretrained:
        raise ValueError(
            "the model's save_pretrained is transformers' own and would write one rank's shards: "
            "shard the model with expert_parallel (from_pretrained or parallelize), which gives it "
            'one that gathers; or pass save_strategy="no" and don\'t call save_model.'
        )


def _problems(args: TrainingArguments) -> Iterator[str]:
    loader: Any = args.accelerator_config
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if getattr(args, name) < 1:
            yield f"{name}={getattr(args, name)}: the samples of a data shard, 1 or more"
    if args.gradient_accumulation_steps < 1:
        yield f"gradient_accumulation_steps={args.gradient_accumulation_steps}: 1 (none) or more"
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        if getattr(args, name):
            yield f"{name}: the model is sharded already, as its DistributedConfig says; leave it out"
    if args.fp16_full_eval or args.bf16_full_eval:
        yield "fp16_full_eval, bf16_full_eval: a sharded model keeps its dtype; load it with dtype=..."
    if getattr(args, "enable_jit_checkpoint", False):
        yield (
            "enable_jit_checkpoint=True: each rank would save by itself; leave it out, a SIGTERM to any "
            "rank saves and stops all (CheckpointOptions.stop_signals)"
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True: a rank that runs out of memory would leave the others "
            "waiting; set per_device_train_batch_size"
        )
    if loader.dispatch_batches:
        yield "accelerator_config.dispatch_batches=True: each rank reads its own data shard"
    if not loader.even_batches:
        yield (
            "accelerator_config.even_batches=False: all ranks must run the same number of steps; "
            "samples that fill up the last batch count in no loss and no prediction anyway"
        )
    if _value(args.optim).startswith(_NEEDS_WHOLE_MATRICES):
        yield (
            f"optim={_value(args.optim)!r}: it works on whole matrices, a rank has shards; pass "
            "adamw_torch_fused, adamw_torch or sgd"
        )
    kwargs: Any = args.gradient_checkpointing_kwargs or {}  # mirrors the newer name
    if kwargs.get("selective") not in (None, True, False):
        yield (
            f"activation_checkpointing_kwargs: selective={kwargs['selective']!r}; it is True (nothing is "
            "sent again in backward) or False"
        )
    if kwargs.get("selective") and (kwargs.get("use_reentrant") or "context_fn" in kwargs):
        yield (
            "activation_checkpointing_kwargs: selective=True brings use_reentrant=False and a context_fn "
            "of its own; leave both out"
        )


def check_devices(args: TrainingArguments, device: torch.device, world_size: int) -> None:
    """Refuse arguments that were made for other processes than the model's.

    Raises:
        ValueError: number of processes or kind of device differ.
    """
    if args.world_size != world_size:
        raise ValueError(
            f"TrainingArguments see {args.world_size} processes, the model is sharded over "
            f"{world_size}: start all of them with torchrun --nproc-per-node {world_size}."
        )
    if args.device.type != device.type:
        raise ValueError(
            f"TrainingArguments put data on {args.device.type}, the model is on {device.type}: "
            "pass use_cpu=True for a model on the CPU, or load the model onto the accelerator."
        )


def _value(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))
