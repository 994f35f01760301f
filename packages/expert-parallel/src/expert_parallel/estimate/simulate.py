"""One training step of one rank on tensors without memory.

Of a pipeline, one of its ranks runs all its micro-batches, and nobody waits for the others; `pipelines`
puts its places together.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from ep_kernels import Recompute
from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import clip_grad_norm_
from ep_trainer.optim import split_by_mesh
from expert_parallel.meta import build_on_meta
from expert_parallel.parallel import shard_model

from ._compat import FakeTensorMode, start_fake_group, unlogged_errors, without_tracing
from .cuda_paths import cuda_paths
from .devices import Device
from .layers import keep_layers
from .memory import Peak
from .routes import Routes
from .routing import RoutingModel
from .stages import bubble_share, run_stages
from .timeline import Timeline
from .tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is simulated. The fields are those of `estimate`; `layers`: those that are kept; None: all."""

    model: PreTrainedConfig
    config: DistributedConfig
    sequence_length: int
    micro_batch: int
    gradient_checkpointing: bool
    dtype: torch.dtype
    routing: RoutingModel
    device: Device
    seed: int
    experts_recompute: Recompute
    ep_options: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    cuda: bool = True
    layers: tuple[int, ...] | None = None
    sampled: bool = False
    fused_operators: bool = True


@dataclass(frozen=True)
class Step:
    """What a step was.

    Attributes:
        steady: bytes of each kind between steps.
        peaks: of each phase.
        places: of each phase and place in it.
        parameters, local_parameters: numbers of elements, of the model and on this rank.
        sent: bytes that this rank sends, by axis and kind of collective.
        calls: how many there are.
        flops, seconds, moved: of each operator.
        kernels: of each phase.
        host_reads: how often the host waited for a number.
        timeline: the clocks; None if no time was told.
        total: seconds.
        bubble: those of them in which a place of a pipeline waits for the others.
    """

    steady: dict[str, int]
    peaks: dict[str, Peak]
    places: dict[tuple[str, str], Peak]
    parameters: int
    local_parameters: int
    sent: dict[tuple[str, str], int]
    calls: dict[tuple[str, str], int]
    flops: dict[str, int]
    seconds: dict[str, float]
    moved: dict[str, int]
    kernels: dict[str, int]
    host_reads: int
    timeline: Timeline | None
    total: float
    bubble: float = 0.0


def simulate(setting: Setting) -> Step:
    """Simulate a step in this process, where `torch.distributed` must not run.

    Raises:
        ValueError: the configuration fits neither the model nor what can be simulated.
    """
    config = copy.deepcopy(setting.model)
    config.dtype = setting.dtype
    model = build_on_meta(config)
    parameters = sum(p.numel() for p in model.parameters())
    if setting.layers is not None:
        keep_layers(model, setting.layers)
    with fake_world(setting.config, setting.rank) as mesh:
        shard_model(
            model,
            mesh,
            setting.config,
            own_experts=True,
            recompute=setting.experts_recompute,
            ep_options=_options(setting),
            backend="grouped_mm" if setting.config.ep_size > 1 else "auto",
            fused_operators=setting.fused_operators,
        )
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        tracker = Tracker(mesh, fake=fake)
        layout, rank = setting.config.layout, setting.rank
        routes = Routes(layout, rank, setting.routing, setting.seed, tracker.paused, tracker.read)
        with ExitStack() as stack:
            stack.enter_context(without_tracing())
            stack.enter_context(unlogged_errors())
            stack.enter_context(fake)
            stack.enter_context(routes.told())
            if setting.cuda:
                stack.enter_context(cuda_paths(tracker))
            stack.enter_context(tracker.following(model))
            model.to_empty(device="cpu")
            return run_step(model, tracker, setting, parameters)


def _options(setting: Setting) -> dict[str, Any]:
    """What the implementation would find on GPUs: their nodes, and NCCL."""
    options = dict(setting.ep_options)
    if setting.config.ep_implementation == "all_to_all_hierarchical":
        options.setdefault("ranks_per_node", setting.device.devices_per_node)
    if options.get("num_chunks") == "auto" and setting.config.ep_size > 1:
        options["num_chunks"] = 2
    return options


@contextmanager
def fake_world(config: DistributedConfig, rank: int) -> Iterator[ParallelMesh]:
    """A mesh of ranks that are not there."""
    if dist.is_initialized():
        raise RuntimeError("a simulation needs a process in which torch.distributed does not run.")
    start_fake_group(config.world_size, rank)
    try:
        yield ParallelMesh(config.layout, "cpu")
    finally:
        dist.destroy_process_group()


def run_step(model: nn.Module, tracker: Tracker, setting: Setting, parameters: int) -> Step:
    """Run one step of a sharded model under a tracker, which follows it from its parameters on."""
    memory = tracker.memory
    model.train()
    if setting.gradient_checkpointing:
        # transformers 5.17 has the older name alone, 5.24 warns of it
        older: Any = model.gradient_checkpointing_enable
        enable: Any = getattr(model, "activation_checkpointing_enable", older)
        enable({"use_reentrant": False})
    for tensor in [*model.parameters(), *model.buffers()]:
        memory.set_kind(tensor, "parameters")
    tracker.follow_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    split_by_mesh(optimizer)
    memory.enter("prepare")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes its states
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                memory.set_kind(value, "optimizer_states")
    shape = setting.micro_batch, setting.sequence_length
    ids = torch.zeros(shape, dtype=torch.int64)
    steady = {kind: size for kind, size in memory.by_kind.items() if size}

    timeline = Timeline(setting.device) if tracker.fake is not None else None
    tracker.begin(timeline)
    bubble = 0.0
    if setting.config.pp_size > 1:
        run_stages(model, tracker, ids)
        if timeline is not None:
            bubble = timeline.end() * bubble_share(setting.config)
    else:
        memory.enter("forward")
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        memory.enter("backward")
        loss.backward()
        del loss
    for parameter in model.parameters():
        if parameter.grad is not None:
            memory.set_kind(parameter.grad, "gradients")
    memory.place = ""
    memory.enter("clip")
    clip_grad_norm_(model.parameters(), 1.0)
    steady["gradients"] = memory.by_kind["gradients"]
    memory.enter("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    local = sum(_local(p).numel() for p in model.parameters())
    return Step(
        steady=steady,
        peaks=dict(memory.peaks),
        places=dict(memory.places),
        parameters=parameters,
        local_parameters=local,
        sent=dict(tracker.sent),
        calls=dict(tracker.calls),
        flops={name: count for name, count in tracker.flops.items() if count},
        seconds=dict(tracker.seconds),
        moved=dict(tracker.moved),
        kernels=dict(tracker.kernels),
        host_reads=tracker.host_reads,
        timeline=timeline,
        total=0.0 if timeline is None else timeline.end() + bubble,
        bubble=bubble,
    )


def _local(parameter: torch.Tensor) -> torch.Tensor:
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
