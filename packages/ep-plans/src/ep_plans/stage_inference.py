"""Inference over stages: one call of the model on every rank, one output on all.

[Note: a call is a chain]
All stages of a pipeline call the model with the same arguments. Each waits for the hidden states of
the stage before it, runs its own layers and hands them on; what the last one's model gives is sent
to all. So `generate` and an evaluation loop run on every rank as they would on one. A stage that
fails hands its error on in place of the hidden states, so that every rank raises.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_mesh import ParallelMesh
from ep_plans.stage_forward import StageForward, runs_as_stage
from ep_plans.stages import Pipeline
from ep_plans.styles.base import around_forward

# Recorded layer by layer, and layers are elsewhere.
_PER_LAYER = ("output_hidden_states", "output_attentions")
_CACHES = ("cache", "past_key_values")


class OtherStageError(RuntimeError):
    """Another stage of the pipeline failed; the message holds what it said."""


def install_inference(model: nn.Module, mesh: ParallelMesh, pipeline: Pipeline) -> None:
    """Let a call of `model` run all its stages; see the note above.

    A call costs, for each stage but the last, one message of the hidden states and one of their
    shape, and a broadcast of the output and of its shapes over the `pp` axis; each is a host
    synchronization. It runs without gradients.
    """
    chain = _Chain(model, mesh, pipeline)

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if runs_as_stage(model):
            return forward(*args, **kwargs)
        if torch.is_grad_enabled() and model.training:
            raise RuntimeError(
                f"This {type(model).__name__} is split into {len(pipeline.stages)} pipeline stages, "
                "which a plain forward can't train. Train it with EPTrainer, or call model.eval() "
                "first to infer."
            )
        signature = inspect.signature(forward)
        named = dict(signature.bind(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(name, {}))
        with torch.no_grad():
            return chain(forward, named)

    around_forward(model, run)


@dataclass
class _Handed:
    """What goes from stage to stage: shapes and dtypes ahead of the tensors, or an error."""

    tensors: list[tuple[torch.Size, torch.dtype]]
    rest: Any = None
    error: str | None = None


class _Chain:
    def __init__(self, model: nn.Module, mesh: ParallelMesh, pipeline: Pipeline) -> None:
        self.model, self.mesh, self.pipeline = model, mesh, pipeline
        self.group = mesh.group("pp")
        self.ranks = mesh.layout.group("pp", mesh.rank)
        self.caches = _Caches(pipeline)
        self.stages = {stage: StageForward(model, pipeline, stage) for stage in pipeline.here}

    def __call__(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        for name in _PER_LAYER:
            if kwargs.get(name) or getattr(getattr(self.model, "config", None), name, False):
                raise ValueError(
                    f"{name}=True records every layer, and a stage runs some of them. Leave it out, "
                    "or use pp_size=1."
                )
        as_tuple = kwargs.pop("return_dict", None) is False
        kwargs["return_dict"] = True
        output: Any = None
        error: Exception | None = None
        passed: list[Tensor] = []
        caches = self.caches
        caches.begin(kwargs)
        for number, stage in self.stages.items():
            received, error = self._receive(number, passed, error)
            if error is None:
                try:
                    call = caches.shown_to(number, kwargs)
                    output, passed = self._run(stage, forward, received, call)
                    caches.note(number, output)
                except Exception as caught:  # noqa: BLE001 (raised after all stages know)
                    error = caught
            self._send(number, passed, error)
        output = self._share(output, error)
        return output.to_tuple() if as_tuple else output

    def _run(
        self,
        stage: StageForward,
        forward: Callable[..., Any],
        received: list[Tensor],
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, list[Tensor]]:
        hidden, earlier = (received[0], received[1:]) if received else (None, [])
        found: list[Tensor] = []
        call = dict(kwargs)
        with contextlib.ExitStack() as stack:
            if self._wants_routers(kwargs):
                if not stage.is_last:  # its own sum over some layers would be of no use
                    call["output_router_logits"] = False
                stack.enter_context(stage.router_logits(found, earlier=earlier))
            output, handed = stage.run(forward, hidden, call)
        return output, [] if handed is None else [handed, *earlier, *found]

    def _wants_routers(self, kwargs: Mapping[str, Any]) -> bool:
        config: Any = getattr(self.model, "config", None)
        asked = kwargs.get("output_router_logits")
        return bool(getattr(config, "output_router_logits", False) if asked is None else asked)

    def _receive(
        self, stage: int, passed: list[Tensor], error: Exception | None
    ) -> tuple[list[Tensor], Exception | None]:
        """What the stage before handed on."""
        if stage == 0 or (error is not None and stage - 1 in self.stages):
            return [], error
        if stage - 1 in self.stages:
            return passed, error
        source = self.ranks[self.pipeline.stages.ranks[stage - 1]]
        told: list[Any] = [None]
        dist.recv_object_list(told, src=source, group=self.group, device=self.mesh.device)
        handed: _Handed = told[0]
        if handed.error is not None:
            return [], error or OtherStageError(handed.error)
        received = [torch.empty(s, dtype=d, device=self.mesh.device) for s, d in handed.tensors]
        for tensor in received:
            dist.recv(tensor, src=source, group=self.group)
        return received, error

    def _send(self, stage: int, tensors: list[Tensor], error: Exception | None) -> None:
        if stage == len(self.pipeline.stages) - 1 or stage + 1 in self.stages:
            return
        target = self.ranks[self.pipeline.stages.ranks[stage + 1]]
        told = _Handed([(t.shape, t.dtype) for t in tensors], error=_told(error))
        dist.send_object_list([told], dst=target, group=self.group, device=self.mesh.device)
        for tensor in () if error is not None else tensors:
            dist.send(tensor.contiguous(), dst=target, group=self.group)

    def _share(self, output: Any, error: Exception | None) -> Any:
        """The last stage's output on every rank; a cache is each rank's own."""
        source = self.ranks[self.pipeline.stages.ranks[-1]]
        is_source = source == self.mesh.rank
        tensors: list[Tensor] = []
        told: list[Any] = [None]
        if is_source:
            rest = {} if error is not None else _taken_apart(output, tensors)
            shapes = [(t.shape, t.dtype) for t in tensors]
            told = [_Handed(shapes, rest, _told(error))]
        dist.broadcast_object_list(told, src=source, group=self.group, device=self.mesh.device)
        handed: _Handed = told[0]
        if error is not None:
            raise error
        if handed.error is not None:
            raise OtherStageError(handed.error)
        if not is_source:
            tensors = [torch.empty(s, dtype=d, device=self.mesh.device) for s, d in handed.tensors]
        tensors = [tensor.contiguous() for tensor in tensors]
        for tensor in tensors:
            dist.broadcast(tensor, src=source, group=self.group)
        fields = {name: _put_together(value, tensors) for name, value in handed.rest.items()}
        caches = {name: self.caches.main for name in output if name in _CACHES}
        return type(output)(**fields, **caches)


class _Caches:
    """The key-value cache as each of a rank's stages sees it.

    A stage's run lets a cache hear of the tokens of all layers. A rank with several stages would
    count them several times, so each stage but its first has a cache of its own, in which only its
    own layers are those of the caller's.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.main: Any = None
        self._others: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()

    def begin(self, kwargs: Mapping[str, Any]) -> None:
        """Take the cache of a call's arguments; None if the model is to make one."""
        given = (kwargs.get(name) for name in _CACHES)
        self.main = next((cache for cache in given if cache is not None), None)
        if self.main is not None and self.main not in self._others:
            self._add_layers(self.main)
            later = self.pipeline.here[1:]
            self._others[self.main] = {stage: copy.deepcopy(self.main) for stage in later}
            for stage, other in self._others[self.main].items():
                self._share(stage, self.main, other)

    def shown_to(self, stage: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a stage's run."""
        call = {name: value for name, value in kwargs.items() if name not in _CACHES}
        names = [name for name in _CACHES if kwargs.get(name) is not None]
        cache = self.main
        if names and stage != self.pipeline.here[0]:
            cache = self._others[self.main][stage]
        return {**call, **dict.fromkeys(names, cache)}

    def note(self, stage: int, output: Any) -> None:
        """Keep the caches that the model made itself."""
        made = next((value for name, value in output.items() if name in _CACHES), None)
        if made is None or self.main is made:
            return
        if stage == self.pipeline.here[0]:
            self.main = made
            self._add_layers(made)
            self._others[made] = {}
        elif stage not in self._others[self.main]:
            self._others[self.main][stage] = made
            self._share(stage, made, self.main)

    def _add_layers(self, cache: Any) -> None:
        """A cache without a config has a layer only from its first tokens on."""
        more = getattr(cache, "layer_class_to_replicate", None)
        if more is not None and len(self.pipeline.here) > 1:
            cache.layers.extend(more() for _ in range(len(cache.layers), self.pipeline.parts.count))

    def _share(self, stage: int, source: Any, target: Any) -> None:
        """Let `target` have the layers of a stage from `source`."""
        for layer in self.pipeline.stages.ranges[stage]:
            target.layers[layer] = source.layers[layer]


def _told(error: Exception | None) -> str | None:
    if error is None or isinstance(error, OtherStageError):
        return None if error is None else str(error)
    return f"A pipeline stage failed: {type(error).__name__}: {error}"


def _taken_apart(output: Mapping[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """The fields of an output, each tensor as its place in `tensors`."""

    def place(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return len(tensors) - 1
        return tuple(place(item) for item in value)

    return {
        name: place(value)
        for name, value in output.items()
        if name not in _CACHES and isinstance(value, (Tensor, tuple))
    }


def _put_together(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, int):
        return tensors[value]
    return tuple(_put_together(item, tensors) for item in value)
