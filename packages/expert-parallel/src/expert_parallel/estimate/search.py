"""Every layout of a model over a number of devices, estimated and sorted.

[Note: the order of the search]
What the layout's and the model's rules refuse goes first, without cost. Parameters, gradients and the two
states of AdamW of the fullest rank follow from the plan exactly: what exceeds the memory by them alone goes
next. The rest is simulated with a few layers and extrapolated (see `sampling`). Without gradient
checkpointing a step needs more memory, so it is tried where the checkpointed one fits.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from ep_kernels import Recompute
from ep_mesh import DistributedConfig, legal_ep_sizes
from ep_plans import plan_parameters, plan_stages, resolve_plans
from expert_parallel.meta import build_on_meta, read_config

from .api import check_sizes
from .devices import GIB, Device, device_of
from .layers import find_layers
from .pipelines import step_of
from .report import NOT_COUNTED, Estimate, estimate_of
from .routing import RoutingModel, check_routing_model
from .simulate import Setting

_TENSORS = 4  # of each parameter: itself, its gradient, two states of AdamW


@dataclass(frozen=True)
class Choice:
    """A layout that fits.

    Attributes:
        config: the layout.
        gradient_checkpointing: whether each layer runs again in backward.
        experts_recompute: as for `parallelize`.
        static_bytes: parameters, gradients and AdamW states of the fullest rank, exactly.
        estimate: of the step.
        extrapolated: from steps of a few layers; False: all layers were simulated.
    """

    config: DistributedConfig
    gradient_checkpointing: bool
    experts_recompute: Recompute
    static_bytes: int
    estimate: Estimate
    extrapolated: bool

    @property
    def code(self) -> str:
        """The `DistributedConfig` as Python."""
        return code_of(self.config)


@dataclass(frozen=True)
class Refused:
    """A layout that is not among the choices.

    Attributes:
        layout: its sizes, as text.
        reason: why; layouts with the same kind of reason have the same.
        detail: what was said of this one.
        static_bytes: parameters, gradients and AdamW states of the fullest rank; None: not known.
    """

    layout: str
    reason: str
    detail: str
    static_bytes: int | None = None


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        choices: layouts that fit, most unique tokens/s/device first.
        refused: layouts that don't.
        not_estimated: layouts that may fit, but whose step was not or can't be simulated; their static
            bytes fit.
        memory_bytes: of a device, `reserved_bytes` of it for what is not counted.
    """

    choices: tuple[Choice, ...]
    refused: tuple[Refused, ...]
    not_estimated: tuple[Refused, ...]
    memory_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Task:
    """A layout to simulate, with and then without gradient checkpointing."""

    setting: Setting
    static_bytes: int
    limit: int


Answer = tuple[list[Choice], list[Refused], list[Refused]]


def search(
    model: PreTrainedConfig | str,
    devices: int,
    *,
    sequence_length: int,
    micro_batch: int = 1,
    memory_bytes: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    routing: RoutingModel = "balanced",
    device: str | Device = "h100",
    seed: int = 0,
    processes: int | None = None,
    pipelines: bool | None = None,
) -> Found:
    """Estimate a training step in every layout of `devices` devices.

    Layouts: all sizes of tp, fsdp, dp_replicate, ep and pp whose product fits, with sequence parallelism
    where TP allows it, `all_reduce` beside `all_to_all` where an EP group shares a batch,
    `all_to_all_hierarchical` where it spans nodes, with and without gradient checkpointing. A pipeline
    (1F1B) takes `2 * pp_size` micro-batches a step.

    Args:
        model: a config of transformers; or a folder, a model type, or a name on the hub.
        devices: how many.
        sequence_length: tokens of a sequence.
        micro_batch: sequences of a rank's batch.
        memory_bytes: of a device; None: the device's own.
        dtype: of parameters, gradients and optimizer states.
        routing: see `RoutingModel`.
        device: a name of `DEVICES`, or a `Device`.
        seed: of the routing.
        processes: that simulate; None: the cores at hand, 4 at most. Where `torch.distributed` runs none
            of them is this one.
        pipelines: whether layouts with pipeline stages are estimated too; None: where no other fits. Else
            `Found.not_estimated` has them.

    Raises:
        ValueError: the arguments don't fit.
        RuntimeError: a process that simulates failed.

    Costs 1 to 2 seconds of a core for each step of a layout and kind of layer; with pipeline stages, so
    much for each place with different layers, and its micro-batches: 5 to 50.
    """
    if devices < 1:
        raise ValueError(f"devices must be at least 1, got {devices}.")
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}.")
    check_sizes(sequence_length, micro_batch, dtype)
    check_routing_model(routing)
    on = device_of(device)
    memory = on.memory_bytes if memory_bytes is None else memory_bytes
    if memory <= NOT_COUNTED:
        raise ValueError(
            f"memory_bytes={memory} leaves nothing beside the {NOT_COUNTED} bytes for what is not counted "
            "(CUDA context, NCCL buffers, fragmentation): give the memory of a device."
        )
    config = copy.deepcopy(read_config(model) if isinstance(model, str) else model)
    built = build_on_meta(copy.deepcopy(config))
    limit = memory - NOT_COUNTED
    tasks: list[Task] = []
    staged: list[Task] = []
    refused: list[Refused] = []
    waiting: list[Refused] = []
    for layout, static in _planned(built, devices, on.devices_per_node, dtype.itemsize, refused):
        if static > limit:
            refused.append(
                Refused(
                    layout_text(layout),
                    "parameters, gradients and AdamW states alone exceed the memory",
                    f"{static / GIB:.1f} GiB",
                    static,
                )
            )
        else:
            setting = Setting(
                model=config,
                config=layout,
                sequence_length=sequence_length,
                micro_batch=micro_batch,
                gradient_checkpointing=True,
                dtype=dtype,
                routing=routing,
                device=replace(on, memory_bytes=memory),
                seed=seed,
                experts_recompute="none",
            )
            (staged if layout.pp_size > 1 else tasks).append(Task(setting, static, limit))
    choices: list[Choice] = []

    def run(some: list[Task]) -> None:
        for more, no, unknown in run_tasks(some, processes):
            choices.extend(more)
            refused.extend(no)
            waiting.extend(unknown)

    run(tasks)
    if pipelines or (pipelines is None and not choices):
        run(staged)
    else:
        told = "pipelines are estimated if asked for, or if nothing else fits"
        waiting += [
            Refused(layout_text(task.setting.config), told, told, task.static_bytes)
            for task in staged
        ]
    choices.sort(
        key=lambda choice: (-choice.estimate.unique_tokens_per_second_per_device, choice.code)
    )
    return Found(tuple(choices), tuple(refused), tuple(waiting), memory, NOT_COUNTED)


# -- layouts


def layouts_of(devices: int) -> Iterator[dict[str, int]]:
    """All sizes that the rules of `ep_mesh` allow for so many devices."""
    for pp in _divisors(devices):
        for dp_replicate in _divisors(devices // pp):
            for fsdp in _divisors(devices // pp // dp_replicate):
                tp = devices // pp // dp_replicate // fsdp
                for ep in legal_ep_sizes(tp, fsdp):
                    yield {
                        "tp_size": tp,
                        "fsdp_size": fsdp,
                        "ep_size": ep,
                        "pp_size": pp,
                        "dp_replicate_size": dp_replicate,
                    }


def layout_text(config: DistributedConfig | dict[str, int]) -> str:
    """The sizes above 1, and the implementation if it is not the default."""
    names = ("tp", "fsdp", "ep", "pp", "dp_replicate")
    if isinstance(config, dict):
        sizes, implementation = config, "auto"
    else:
        sizes = {f"{name}_size": getattr(config, f"{name}_size") for name in names}
        implementation = config.ep_implementation
    told = [f"{name}={sizes[f'{name}_size']}" for name in names if sizes[f"{name}_size"] > 1]
    if implementation != "auto":
        told.append(implementation)
    return " ".join(told) or "one device"


def code_of(config: DistributedConfig) -> str:
    """What differs from a `DistributedConfig()`, as Python that makes it."""
    plain = DistributedConfig().to_dict()
    fields = config.to_dict().items()
    given = ", ".join(f"{name}={value!r}" for name, value in fields if value != plain[name])
    return f"DistributedConfig({given})"


def _planned(
    model: nn.Module, devices: int, per_node: int, itemsize: int, refused: list[Refused]
) -> Iterator[tuple[DistributedConfig, int]]:
    """The layouts that model and rules allow, and the static bytes of the fullest rank."""
    numbers: dict[tuple[int, ...], dict[str, int]] = {}
    for sizes in layouts_of(devices):
        try:
            config = DistributedConfig.from_dict(
                sizes, enable_sequence_parallel=sizes["tp_size"] > 1
            )
            key = config.tp_size, config.fsdp_size, config.ep_size, config.dp_replicate_size
            if key not in numbers:
                numbers[key] = _most_elements(model, replace(config, pp_size=1))
            most = _of_fullest_stage(model, config, numbers[key])
        except ValueError as error:
            refused.append(_refusal(layout_text(sizes), error))
            continue
        yield config, _TENSORS * itemsize * most
        if config.pp_size == 1 and config.ep_size == config.tp_size > 1:
            # Of a shared batch, so not of slices.
            shared = replace(config, ep_implementation="all_reduce", enable_sequence_parallel=False)
            yield shared, _TENSORS * itemsize * most
        nodes = {rank // per_node for rank in config.layout.group("ep", 0)}
        if 1 < len(nodes) < config.ep_size:
            hops = replace(config, ep_implementation="all_to_all_hierarchical")
            yield hops, _TENSORS * itemsize * most


def _most_elements(model: nn.Module, config: DistributedConfig) -> dict[str, int]:
    """The elements of each parameter on the rank that holds most of it."""
    shardings = plan_parameters(model, resolve_plans(model, config), config)
    layout = config.layout
    known: dict[Any, int] = {}
    found = {}
    for name, parameter in model.named_parameters():
        key = shardings[name], tuple(parameter.shape)
        if key not in known:
            known[key] = max(
                key[0].local_numel(key[1], layout, r) for r in range(layout.world_size)
            )
        found[name] = known[key]
    return found


def _of_fullest_stage(model: nn.Module, config: DistributedConfig, elements: dict[str, int]) -> int:
    """The most elements of a place on the `pp` axis; the embedding with the first stage, the rest with the last."""
    if config.pp_size == 1:
        return sum(elements.values())
    stages = plan_stages(model, config)
    layers = find_layers(model)
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    first = {id(p) for p in embedding.parameters()} if embedding is not None else set()
    held = [0] * config.pp_size
    for name, parameter in model.named_parameters():
        if layers is not None and name.startswith(f"{layers}."):
            number = int(name[len(layers) + 1 :].partition(".")[0])
            held[stages.holder(number)] += elements[name]
        else:
            held[stages.ranks[0 if id(parameter) in first else -1]] += elements[name]
    return max(held)


def _refusal(layout: str, error: Exception) -> Refused:
    """Why, with the numbers taken out of the reason, so that alike ones meet."""
    text = " ".join(str(error).split()) or type(error).__name__
    first = re.split(r"(?<=[.:;]) ", text)[0].rstrip(".:;")
    return Refused(layout, re.sub(r"\d+", "N", first), text)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


# -- simulations


def answer_of(task: Task) -> Answer:
    """Simulate a layout: with gradient checkpointing, and, where that fits, without."""
    choices: list[Choice] = []
    setting = task.setting
    try:
        options: tuple[tuple[bool, Recompute], ...] = (
            (True, "none"),
            (False, "none"),
            (False, "gate_up"),
        )
        for checkpointing, recompute in options:
            if recompute != "none" and setting.config.ep_size == 1:
                break
            given = replace(
                setting,
                gradient_checkpointing=checkpointing,
                experts_recompute=recompute,
            )
            given, found, extrapolated = estimated(given)
            setting = replace(setting, config=given.config)
            if found.peak.bytes <= task.limit:
                choices.append(
                    Choice(
                        given.config,
                        checkpointing,
                        given.experts_recompute,
                        task.static_bytes,
                        found,
                        extrapolated,
                    )
                )
            if checkpointing != (found.peak.bytes <= task.limit):
                break  # it doesn't fit: more is not tried; or it fits without recomputing
    except Exception as error:  # noqa: BLE001 - a model's forward may do anything
        if not choices:
            text = _refusal(layout_text(setting.config), error)
            return [], [], [replace(text, static_bytes=task.static_bytes)]
    if choices:
        return choices, [], []
    refusal = Refused(
        layout_text(setting.config),
        "the step's peak exceeds the memory, gradient checkpointing included",
        f"{found.peak.bytes / GIB:.1f} GiB",
        task.static_bytes,
    )
    return [], [refusal], []


def estimated(setting: Setting) -> tuple[Setting, Estimate, bool]:
    """The estimate, without sequence parallelism where the model refuses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names in transformers that are on their way out
        try:
            step, extrapolated = step_of(replace(setting, sampled=True))
        except ValueError:
            if not setting.config.enable_sequence_parallel:
                raise
            plain = replace(setting.config, enable_sequence_parallel=False)
            setting = replace(setting, config=plain)
            step, extrapolated = step_of(replace(setting, sampled=True))
    return setting, estimate_of(setting, step), extrapolated


def exactly(choice: Choice, model: PreTrainedConfig) -> Choice:
    """The same choice with all layers simulated, in this process."""
    given = choice.estimate
    setting = Setting(
        model=copy.deepcopy(model),
        config=choice.config,
        sequence_length=given.settings["sequence_length"],
        micro_batch=given.settings["micro_batch"],
        gradient_checkpointing=choice.gradient_checkpointing,
        dtype=getattr(torch, given.settings["dtype"]),
        routing=given.settings["routing"],
        device=given.device,
        seed=given.settings["seed"],
        experts_recompute=choice.experts_recompute,
    )
    return replace(choice, estimate=estimate_of(setting, step_of(setting)[0]), extrapolated=False)


def run_tasks(
    tasks: Sequence[Task],
    processes: int | None,
    answer: Callable[[Task], Answer] = answer_of,
) -> list[Answer]:
    """The answers, in the order of the tasks; spread over this process and others."""
    here = not dist.is_initialized()
    if processes is None:
        processes = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 4)
    if here and len(tasks) < 4:
        processes = 1
    parts = [list(tasks[i::processes]) for i in range(processes)]
    command = [sys.executable, "-m", f"{__package__}.child"]
    children: list[subprocess.Popen[bytes] | None] = []
    try:
        for number, part in enumerate(parts):
            if here and number == 0:
                children.append(None)
                continue
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            children.append(child)
            assert child.stdin is not None
            child.stdin.write(pickle.dumps(part))
            child.stdin.close()
        found = []
        for part, process in zip(parts, children, strict=True):
            if process is None:
                found.append([answer(task) for task in part])
                continue
            assert process.stdout is not None
            told = process.stdout.read()
            if process.wait() != 0:
                raise RuntimeError(
                    f"a process that simulates layouts ended with exit code {process.returncode}; its "
                    "error output is above."
                )
            found.append(pickle.loads(told))
    finally:
        for left in children:
            if left is not None and left.poll() is None:
                left.kill()
                left.wait()
    answers = {
        id(t): a
        for part, more in zip(parts, found, strict=True)
        for t, a in zip(part, more, strict=True)
    }
    return [answers[id(task)] for task in tasks]
