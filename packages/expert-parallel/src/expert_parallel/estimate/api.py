"""`estimate`: one training step without the devices it would need."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from ep_dispatch import AllToAll, EPImplementationInterface, HierarchicalAllToAll
from ep_dispatch.all_reduce import AllReduce
from ep_dispatch.auto import Auto
from ep_kernels import Recompute
from ep_mesh import DistributedConfig
from expert_parallel.meta import read_config

from .devices import Device, device_of
from .pipelines import step_of
from .report import Estimate, estimate_of
from .routing import RoutingModel, check_routing_model
from .simulate import Setting

_KNOWN = (AllToAll, HierarchicalAllToAll, AllReduce, Auto)


def estimate(
    model: PreTrainedConfig | str,
    config: DistributedConfig | Mapping[str, Any],
    *,
    sequence_length: int,
    micro_batch: int = 1,
    gradient_checkpointing: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    routing: RoutingModel = "balanced",
    device: str | Device = "h100",
    seed: int = 0,
    experts_recompute: Recompute = "none",
    ep_options: Mapping[str, Any] | None = None,
    sampled: bool = False,
    fused_operators: bool = True,
) -> Estimate:
    """Estimate memory, traffic and time of a training step, from a simulated one.

    The model is sharded by `parallelize` over ranks that are not there, and runs a step of
    `model(...).loss.backward()`, `clip_grad_norm_` and fused AdamW on tensors without memory. Nothing is
    downloaded but a config that is named. The same arguments give the same bytes.

    Args:
        model: a config of transformers; or a folder, a model type, or a name on the hub.
        config: the layout, or a dict of its fields.
        sequence_length: tokens of a sequence.
        micro_batch: sequences of a rank's batch; of a pipeline, of each of its micro-batches.
        gradient_checkpointing: whether each layer runs again in backward.
        dtype: of parameters, gradients and optimizer states.
        routing: how tokens choose experts, see `RoutingModel`: "balanced", "multinomial", "zipf".
        device: a name of `DEVICES`, or a `Device`.
        seed: of the routing.
        experts_recompute: as for `parallelize`.
        ep_options: as for `parallelize`; `ranks_per_node` is that of the device unless given.
        fused_operators: as for `parallelize`.
        sampled: simulate a few layers of each kind, and extrapolate: peaks within 0.1 %, times within
            1 %, at a fraction of the cost.

    Raises:
        ValueError: the arguments fit neither each other nor the model; an `ep_implementation` that can't
            be simulated; FSDP2's CPU offload; the `zero_bubble` schedule.
        RuntimeError: the simulation in another process failed.

    Costs seconds of one core: 10 for 48 layers of Qwen3-30B-A3B; a pipeline as many times that as it has
    micro-batches. Where `torch.distributed` runs, the
    simulation runs in a process of its own, and the running groups are not touched.
    """
    layout = config if isinstance(config, DistributedConfig) else DistributedConfig(**config)
    _check(layout, sequence_length, micro_batch, experts_recompute, dtype)
    check_routing_model(routing)
    setting = Setting(
        model=copy.deepcopy(read_config(model) if isinstance(model, str) else model),
        config=layout,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        gradient_checkpointing=gradient_checkpointing,
        dtype=dtype,
        routing=routing,
        device=device_of(device),
        seed=seed,
        experts_recompute=experts_recompute,
        ep_options=dict(ep_options or {}),
        sampled=sampled,
        fused_operators=fused_operators,
    )
    if dist.is_initialized():
        return _elsewhere(setting)
    return estimate_of(setting, step_of(setting)[0])


def check_sizes(sequence: int, batch: int, dtype: torch.dtype) -> None:
    """Raise a ValueError unless a step of such a batch can be simulated."""
    if sequence < 2 or batch < 1:
        raise ValueError(
            f"sequence_length must be at least 2 and micro_batch at least 1, got {sequence} and {batch}."
        )
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating point dtype, got {dtype}.")


def _check(
    config: DistributedConfig, sequence: int, batch: int, recompute: str, dtype: torch.dtype
) -> None:
    check_sizes(sequence, batch, dtype)
    if recompute not in get_args(Recompute):
        raise ValueError(
            f"experts_recompute={recompute!r} is unknown; known are {', '.join(get_args(Recompute))}."
        )
    if config.pp_size > 1 and config.pp_schedule == "zero_bubble":
        raise ValueError(
            "pp_schedule='zero_bubble' can't be simulated: how it fills the bubble is not told. Estimate "
            "'1f1b', 'interleaved_1f1b' or 'gpipe'."
        )
    if config.fsdp_cpu_offload:
        raise ValueError(
            "fsdp_cpu_offload=True can't be simulated: what lies on the host is not told."
        )
    if config.ep_size > 1:
        found = EPImplementationInterface.get(config.ep_implementation)
        if found not in _KNOWN:
            raise ValueError(
                f"ep_implementation={config.ep_implementation!r} can't be simulated; these can: "
                "all_to_all, all_to_all_hierarchical, all_reduce, auto."
            )


def _elsewhere(setting: Setting) -> Estimate:
    """Simulate in a process of its own."""
    command = [sys.executable, "-m", f"{__package__}.child"]
    done = subprocess.run(command, input=pickle.dumps(setting), capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            "the simulation failed in its process:\n" + done.stderr.decode(errors="replace")[-4000:]
        )
    error, found = pickle.loads(done.stdout)
    if error is not None:
        raise error
    assert isinstance(found, Estimate)
    return found
