"""What `estimate` gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .devices import GIB, Device
from .memory import KINDS, Peak
from .simulate import Setting, Step
from .stages import micro_batches

ASSUMPTIONS = (
    "one rank is simulated, of a pipeline one of each place; with unbalanced routing others may hold more",
    "memory is that of tensors: no fragmentation, cuBLAS workspaces, NCCL buffers, CUDA context",
    "operators run at the stated shares of the device's peaks, and read and write each byte once",
    "the host launches one kernel after the other; Triton is installed",
    "FSDP2's collectives run beside kernels on one link; those of TP and EP are waited for",
    "a pipeline is as slow as its slowest place, and waits P - 1 micro-batches beside its M",
)


@dataclass(frozen=True)
class MemoryPeak:
    """The most memory of a step, or of a phase of it.

    Attributes:
        bytes: all of it.
        by_kind: parameters, gradients, optimizer_states, activations, gathered_buffers,
            exchange_buffers, temporaries.
        phase: forward, backward, clip or optimizer.
        place: the module that ran, in backward the layer that it has come back to, or a part
            of it that runs again.
    """

    bytes: int
    by_kind: Mapping[str, int]
    phase: str
    place: str

    @classmethod
    def of(cls, peak: Peak) -> MemoryPeak:
        """From what a tracker saw."""
        by_kind: dict[str, int] = {kind: peak.by_kind.get(kind, 0) for kind in KINDS}
        return cls(peak.total, by_kind, peak.phase, peak.place)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one axis, of one rank and step.

    Attributes:
        axis: of the layout; several, joined by `=`, where they are the same ranks.
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast; send: from stage to stage.
        calls: how many.
        sent_bytes: what the rank sends; in a ring of P ranks (P - 1) / P of what is gathered or
            reduce-scattered, twice that for an all-reduce.
    """

    axis: str
    kind: str
    calls: int
    sent_bytes: int


@dataclass(frozen=True)
class StepTime:
    """A step's time, an estimate.

    Attributes:
        seconds: of the step.
        kernels: the device's kernels, one after the other.
        link_exposed: what the device waits for collectives.
        host_exposed: what the device waits for the host.
        host: what the host needs to launch everything.
        link: all collectives, also those beside kernels.
        bubble: what the device waits for other places of its pipeline.
        bottleneck: what costs most: `kernels: matrix products`, `kernels: memory traffic`, `links`,
            `host` or `pipeline bubble`.
        slowest: the operators that cost most, with their seconds.
    """

    seconds: float
    kernels: float
    link_exposed: float
    host_exposed: float
    host: float
    link: float
    bubble: float
    bottleneck: str
    slowest: Mapping[str, float]


@dataclass(frozen=True)
class Estimate:
    """A training step, estimated: nothing here was measured.

    Attributes:
        model: the type of the model.
        parameters: elements of the whole model.
        parameters_per_rank: elements that a rank keeps.
        config: the `DistributedConfig`, as plain data.
        settings: the other arguments, as plain data.
        device: what it would run on.
        memory: bytes between steps by kind; `gradients` are those before the optimizer's step.
        peak: the most memory of the step.
        phases: the most of each phase.
        fits: whether the peak and 2 GiB for what is not counted fit into the device.
        traffic: collectives.
        flops: of matrix products and attention, of a rank.
        kernels: launches of each phase.
        host_reads: how often the host waits for a number from the device.
        time: of the step.
        tokens_per_batch: tokens of a rank's batch, all micro-batches of a pipeline together.
        tokens_per_second_per_device: counted as every rank's own, so a batch that a TP group shares
            counts once for each of its ranks; a batch of a pipeline counts once for all its places.
        unique_tokens_per_second_per_device: each batch counted once.
        flops_share: FLOPs in the step's time over the device's peak.
        assumptions: what the numbers rest on.
    """

    model: str
    parameters: int
    parameters_per_rank: int
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    device: Device
    memory: Mapping[str, int]
    peak: MemoryPeak
    phases: Mapping[str, MemoryPeak]
    fits: bool
    traffic: tuple[Traffic, ...]
    flops: int
    kernels: Mapping[str, int]
    host_reads: int
    time: StepTime
    tokens_per_batch: int
    tokens_per_second_per_device: float
    unique_tokens_per_second_per_device: float
    flops_share: float
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the same bytes for the same arguments."""
        return dataclasses.asdict(self)


NOT_COUNTED = 2 * GIB
"""What is kept free for what the estimate does not count."""


def estimate_of(setting: Setting, step: Step) -> Estimate:
    """What a simulated step means."""
    timeline = step.timeline
    assert timeline is not None, "a fake step has a timeline"
    peak = max(step.peaks.values(), key=lambda one: one.total)
    tokens = setting.micro_batch * setting.sequence_length * micro_batches(setting.config)
    rate = tokens / step.total / setting.config.pp_size
    time = StepTime(
        seconds=step.total,
        kernels=timeline.busy,
        link_exposed=timeline.waited_for_link,
        host_exposed=timeline.waited_for_host,
        host=timeline.launches * setting.device.launch_seconds,
        link=timeline.carried,
        bubble=step.bubble,
        bottleneck=_bottleneck(setting, step),
        slowest=dict(sorted(step.seconds.items(), key=lambda item: -item[1])[:10]),
    )
    flops = sum(step.flops.values())
    device = setting.device
    most = device.flops_16bit if setting.dtype.itemsize <= 2 else device.flops_32bit
    return Estimate(
        model=setting.model.model_type,
        parameters=step.parameters,
        parameters_per_rank=step.local_parameters,
        config=setting.config.to_dict(),
        settings={
            "sequence_length": setting.sequence_length,
            "micro_batch": setting.micro_batch,
            "pp_micro_batches": micro_batches(setting.config),
            "gradient_checkpointing": setting.gradient_checkpointing,
            "dtype": str(setting.dtype).removeprefix("torch."),
            "routing": setting.routing,
            "seed": setting.seed,
            "experts_recompute": setting.experts_recompute,
            "ep_options": {name: str(value) for name, value in setting.ep_options.items()},
        },
        device=device,
        memory={kind: step.steady.get(kind, 0) for kind in KINDS[:3]},
        peak=MemoryPeak.of(peak),
        phases={name: MemoryPeak.of(one) for name, one in step.peaks.items()},
        fits=peak.total + NOT_COUNTED <= device.memory_bytes,
        traffic=tuple(
            Traffic(axis, kind, step.calls[axis, kind], sent)
            for (axis, kind), sent in sorted(step.sent.items())
        ),
        flops=flops,
        kernels=step.kernels,
        host_reads=step.host_reads,
        time=time,
        tokens_per_batch=tokens,
        tokens_per_second_per_device=rate,
        unique_tokens_per_second_per_device=rate / setting.config.tp_size,
        flops_share=flops / (step.total * most),
        assumptions=ASSUMPTIONS,
    )


def _bottleneck(setting: Setting, step: Step) -> str:
    assert step.timeline is not None
    products = sum(seconds for name, seconds in step.seconds.items() if step.flops.get(name))
    parts = {
        "kernels: matrix products": products,
        "kernels: memory traffic": step.timeline.busy - products,
        "links": step.timeline.waited_for_link,
        "host": step.timeline.waited_for_host,
        "pipeline bubble": step.bubble,
    }
    return max(parts, key=lambda name: parts[name])
