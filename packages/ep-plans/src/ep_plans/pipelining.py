"""One training step over the stages of a pipeline, run by torch's schedules.

[Note: FSDP2 inside a schedule]
torch's schedules handle a stage that is itself an FSDP module. Here one model holds all stages of a
rank, so a stage is a plain module to them and FSDP2 is told what to do around the whole step
(`_compat.deferred_gradients`): gradients stay on the rank, whole, until the last backward, and are
reduced once then, for all micro-batches. With `reduce_each` they are reduced at every backward instead:
M times the traffic, and gradients lie in shards all the time. A split backward bypasses FSDP2's hooks,
so it always defers, and keeps parameters gathered for the whole step.

[Note: split backward]
The zero-bubble schedule runs a stage's backward in two parts: first what the previous stage waits for
(gradients of activations), the gradients of weights later, in the bubble. torch cuts the autograd graph
where a parameter enters it. A node that computes both, like our experts' function, runs twice, which
costs time but no communication: the exchanges of tokens lie on the way of the activations, in the
first part, on all ranks of a stage in the same order. Reductions over TP lie on the way of the weights,
in the second part, in the order of the parameters. With activation checkpointing every parameter group
would compute the layer again, so there the first part does all and the second nothing.
Source: Qi et al., Zero Bubble Pipeline Parallelism (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from ep_mesh import PP_SCHEDULES
from ep_plans._compat import deferred_gradients

StageForward = Callable[[int, tuple[Tensor, ...], int], Tensor | tuple[Tensor, ...]]
"""Runs (stage, its input, micro-batch); the last stage gives the micro-batch's loss, a scalar."""

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
    "gpipe": ScheduleGPipe,
}


@dataclass
class PipelineSteps:
    """Runs training steps of the stages that this rank holds.

    Args:
        model: holds them all; its FSDP2 modules are handled.
        modules: the module of each stage of this rank, whose parameters are its.
        forward: runs a stage.
        num_stages: of all ranks.
        schedule: a name of `SCHEDULES`.
        group: the ranks of the pipeline, in their order.
        device: where the stages run.
    """

    model: nn.Module
    modules: Mapping[int, nn.Module]
    forward: StageForward
    num_stages: int
    schedule: str
    group: ProcessGroup
    device: torch.device

    def __post_init__(self) -> None:
        self._ready: tuple[Any, Any] | None = None

    def run(
        self,
        micro_batches: int,
        boundary: tuple[Tensor, ...],
        *,
        split_backward: bool = True,
        reduce_each: bool = False,
        reduce: bool = True,
    ) -> Tensor | None:
        """Forward and backward of all micro-batches; gradients are added up in `.grad`.

        Args:
            micro_batches: M.
            boundary: on the meta device, what a stage hands to the next for one micro-batch.
            split_backward: split it where the schedule can.
            reduce_each: see the note above.
            reduce: False keeps the gradients of this step on the rank, for a later step to reduce.

        Returns:
            The sum of the losses on the rank of the last stage, else None.

        Raises:
            Exception: what a stage raised, with a note of its number and the micro-batch.

        Cost: M point-to-point messages of `boundary` to each neighbour and back, per stage; the
        first step with another M or boundary sends two numbers more.
        """
        schedule = self._prepared(micro_batches, boundary, split_backward)
        splits = split_backward and self.schedule == "zero_bubble"
        losses: list[Tensor] = []
        index = torch.arange(micro_batches)
        with deferred_gradients(
            self.model, reduce=reduce, each=reduce_each and not splits, keep_gathered=splits
        ):
            try:
                schedule.step(index=index, target=index, losses=losses, return_outputs=False)
            except RuntimeError as error:
                # torch tells the arguments of a forward that failed, not why it did.
                cause = _of_stage(error)
                if cause is None:
                    raise
                raise cause from None
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    def _prepared(self, count: int, boundary: tuple[Tensor, ...], split: bool) -> Any:
        """The schedule for these sizes; buffers of others are freed."""
        sizes = [(t.shape, t.dtype, t.requires_grad) for t in boundary]
        key = (count, sizes, split)
        if self._ready is None or self._ready[0] != key:
            self._ready = None
            stages = [
                self._stage(number, boundary, split and self.schedule == "zero_bubble")
                for number in sorted(self.modules)
            ]
            build = SCHEDULES[self.schedule]
            whole: Any = stages[0] if PP_SCHEDULES[self.schedule] == 1 else stages
            made = build(whole, count, loss_fn=_own_loss, scale_grads=False)
            self._ready = (key, made)
        return self._ready[1]

    def _stage(self, number: int, boundary: tuple[Tensor, ...], split: bool) -> PipelineStage:
        last = number == self.num_stages - 1
        return PipelineStage(
            _Stage(self, number),
            number,
            self.num_stages,
            self.device,
            input_args=boundary if number else (),
            output_args=torch.empty((), device="meta") if last else boundary,
            group=self.group,
            dw_builder=None if split else _nothing_later,
        )


_STAGE = "in stage"


class _Stage(nn.Module):
    """A stage as torch's schedules call it: they hand over the micro-batch's number, nothing else.

    It shows its parameters but not its modules: torch would drop the gradients of the FSDP modules
    among them whenever a batch has another length.
    """

    def __init__(self, steps: PipelineSteps, number: int) -> None:
        super().__init__()
        self.number = number
        self.run = steps.forward
        self._held = [steps.modules[number]]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of the stage."""
        return self._held[0].parameters(recurse)

    def forward(self, *received: Tensor, index: Tensor) -> Tensor | tuple[Tensor, ...]:
        micro_batch = int(index.storage_offset())  # of a chunk of `arange`: its value is not read
        try:
            return self.run(self.number, received, micro_batch)
        except Exception as error:
            error.add_note(f"{_STAGE} {self.number} of the pipeline, micro-batch {micro_batch}")
            raise


def _of_stage(error: BaseException) -> BaseException | None:
    """The error of a stage's forward that `error` comes of, if it does."""
    seen = error.__cause__
    while seen is not None:
        if any(note.startswith(_STAGE) for note in getattr(seen, "__notes__", ())):
            return seen
        seen = seen.__cause__
    return None


def _own_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage computes the loss itself."""
    return output


def _nothing_later() -> Callable[[], None]:
    return lambda: None
