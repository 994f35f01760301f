"""A step of one place of a pipeline: its stages, as torch's schedule runs them.

[Note: the bubble]
With M micro-batches a place of P computes M times its part of a micro-batch and waits P - 1 times, for the
first to reach it and the last to come back; with V stages a place for 1 / V of that.
Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ep_mesh import PP_SCHEDULES, DistributedConfig
from ep_plans import parallel_state
from ep_plans.pipelining import PipelineSteps
from ep_plans.sizes import hidden_size
from ep_plans.stage_forward import stage_forward

from .tracker import Tracker


def micro_batches(config: DistributedConfig) -> int:
    """Of a step: as the config says, else the least number that training takes if the batch allows it."""
    if config.pp_size == 1:
        return 1
    return config.pp_micro_batches or 2 * config.pp_size


def bubble_share(config: DistributedConfig) -> float:
    """What a place of a pipeline waits for others, as a share of what it computes."""
    stages = PP_SCHEDULES[config.pp_schedule]
    return (config.pp_size - 1) / (stages * micro_batches(config))


def run_stages(model: nn.Module, tracker: Tracker, ids: Tensor) -> None:
    """Forward and backward of all micro-batches, each of them `ids` [rows, length]."""
    state = parallel_state(model)
    assert state is not None
    assert state.pipeline is not None
    pipeline, config, memory = state.pipeline, state.config, tracker.memory
    modules = {stage: stage_forward(model, pipeline, stage) for stage in pipeline.here}
    last = len(pipeline.stages) - 1

    def run(stage: int, received: tuple[Tensor, ...], _: int) -> Tensor | tuple[Tensor, ...]:
        memory.enter("forward")
        found = modules[stage](*received, input_ids=ids, labels=ids, use_cache=False)
        memory.enter("backward")
        if stage == last:
            loss: Tensor = found.loss
            return loss
        return tuple(part.contiguous() for part in found)

    mixed = config.fsdp_mixed_precision and config.dp_size > 1
    dtype = torch.bfloat16 if mixed else next(model.parameters()).dtype
    shape = (*ids.shape, hidden_size(model))
    boundary = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    steps = PipelineSteps(
        model,
        modules,
        run,
        len(pipeline.stages),
        config.pp_schedule,
        state.mesh.group("pp"),
        ids.device,
    )
    steps.run(micro_batches(config), (boundary,), split_backward=False)
