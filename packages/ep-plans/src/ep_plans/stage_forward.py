"""One pipeline stage as a module that runs it.

[Note: a stage is the whole model's code]
Every rank runs the model's own forward, in which the modules of other stages are `Passthrough`s. So
layer numbers, layer types, cache indices and parameter names are the whole model's, and masks,
position ids and rotary embeddings are computed from the batch, which all stages of a pipeline share.
What a stage receives takes the place of what comes out of the passthrough before its first layer,
and what the passthrough after its last layer is given is what the stage hands on; what the model
computes before and after is small and not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ep_plans.splitting import StageParts
from ep_plans.stages import Passthrough, Stages

RouterSums = Callable[[Sequence[Tensor], Tensor, Mapping[str, Any]], tuple[Tensor, ...]]


def stage_forward(
    model: nn.Module,
    stages: Stages,
    stage: int,
    parts: StageParts,
    *,
    sums: RouterSums | None = None,
    finish: Callable[[Any, tuple[Tensor, ...], Mapping[str, Any]], Any] | None = None,
) -> StageForward:
    """A module that runs one stage of a model that `keep_stages` left.

    Args:
        model: the model.
        stages: its stages.
        stage: which of them.
        parts: what `keep_stages` gave.
        sums: of the router logits [T, E] of the stage's own layers (perhaps none), of the hidden
            states and of the call's keyword arguments makes the sums that are added up from stage to
            stage; None: nothing but the hidden states is handed on.
        finish: makes the last stage's result of the model's output, the sums of all stages and the
            keyword arguments; None: the output.
    """
    return StageForward(model, stages, stage, parts, sums, finish)


class StageForward(nn.Module):
    """One stage as a module of its own, over the modules of the model; see `stage_forward`.

    Its parameters are the stage's. `forward(input_ids, **kwargs)` on the first stage,
    `forward(hidden_states, *sums, **kwargs)` on the others, with the keyword arguments of the model,
    the same on every stage. Gives `(hidden_states, *sums)`, on the last stage what `finish` makes.
    """

    _model: nn.Module
    _owner: nn.Module
    _stand_in: _StandIn
    _swapped: dict[str, nn.Module]
    _entry: _Entry | None
    _exit: _Exit | None

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        stage: int,
        parts: StageParts,
        sums: RouterSums | None,
        finish: Callable[[Any, tuple[Tensor, ...], Mapping[str, Any]], Any] | None,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.is_first, self.is_last = stage == 0, stage == len(stages) - 1
        self._sums, self._finish = sums, finish
        entry: _Entry | None = None
        leave: _Exit | None = None
        held = stages.ranges[stage]
        swapped: dict[str, nn.Module] = {}
        for i in range(parts.count):
            name = f"{parts.layers}.{i}"
            if i in held:
                continue
            layer = model.get_submodule(name)
            if i == held.start - 1:
                swapped[name] = entry = _Entry(layer, i)
            elif i == held.stop:
                swapped[name] = leave = _Exit(layer, i)
            else:
                swapped[name] = Passthrough(layer, i)
        for name in () if self.is_first else parts.first:
            swapped[name] = Passthrough(model.get_submodule(name))
        stand_in = _StandIn(model.get_submodule(parts.embedding))
        if not self.is_first:
            swapped[parts.embedding] = stand_in
        for name in () if self.is_last else parts.last:
            swapped[name] = Passthrough(model.get_submodule(name))
        own = [f"{parts.layers}.{i}" for i in held]
        own += parts.first if self.is_first else ()
        own += parts.last if self.is_last else ()
        self.parts = nn.ModuleList([model.get_submodule(name) for name in own])
        # Not as submodules: they hold what other stages of this rank run.
        owner = model.get_submodule(parts.embedding.rpartition(".")[0])
        vars(self).update(_model=model, _owner=owner, _stand_in=stand_in, _swapped=swapped)
        vars(self).update(_entry=entry, _exit=leave)

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Any:
        """Run the stage."""
        received: tuple[Tensor, ...] = ()
        if self.is_first:
            kwargs = {"input_ids": inputs[0], **kwargs} if inputs else kwargs
            output, logits = self._run(kwargs)
        else:
            hidden, *rest = inputs
            received = tuple(rest)
            assert self._entry is not None
            self._entry.value = hidden
            output, logits = self._run(self._with_embeds(kwargs, hidden))
            self._entry.value = None
        if self.is_last:
            totals = self._totals(logits, inputs[0], kwargs, received)
            return output if self._finish is None else self._finish(output, totals, kwargs)
        assert self._exit is not None
        handed, self._exit.value = self._exit.value, None
        assert handed is not None, "the model's loop did not reach the layer after the stage"
        return (handed, *self._totals(logits, handed, kwargs, received))

    def _totals(
        self,
        logits: Sequence[Tensor],
        hidden: Tensor,
        kwargs: Mapping[str, Any],
        received: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        if self._sums is None:
            return ()
        own = self._sums(logits, hidden, kwargs)
        return tuple(a + b for a, b in zip(received, own, strict=True)) if received else own

    def _with_embeds(self, kwargs: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
        """The arguments of a stage that does not embed: shapes, dtype and device come from these."""
        size = hidden.shape[-1]
        like = hidden.detach()
        if hidden.ndim > 3:  # several residual streams
            like = like.new_zeros(*hidden.shape[:2], size)
        self._stand_in.value = like
        if kwargs.get("input_ids") is not None:
            return kwargs
        return {**kwargs, "inputs_embeds": like}

    def _run(self, kwargs: dict[str, Any]) -> tuple[Any, Sequence[Tensor]]:
        if not self.is_last:
            kwargs = {k: v for k, v in kwargs.items() if k not in ("labels", "logits_to_keep")}
        logits: list[Tensor] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(_swapped(self._model, self._swapped))
            if self._sums is not None:
                kwargs = {**kwargs, "output_router_logits": False}
                stack.enter_context(_router_logits(self._owner, logits))
            output = self._model(**kwargs)
        self._stand_in.value = None
        return output, logits


@contextlib.contextmanager
def _router_logits(owner: nn.Module, found: list[Tensor]) -> Iterator[None]:
    """Have the model of the layers record its routers' logits, and put them into `found`."""

    def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "output_router_logits": True}

    def take(_: nn.Module, args: Any, output: Any) -> None:
        found.extend(getattr(output, "router_logits", None) or ())

    hooks = (
        owner.register_forward_pre_hook(ask, with_kwargs=True),
        owner.register_forward_hook(take),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let `model` have these modules meanwhile."""
    places = []
    for name, module in modules.items():
        owner, _, leaf = name.rpartition(".")
        children = model.get_submodule(owner)._modules
        places.append((children, leaf, children[leaf]))
        children[leaf] = module
    try:
        yield
    finally:
        for children, leaf, before in places:
            children[leaf] = before


class _Entry(Passthrough):
    """Gives what a stage received, in place of what comes out of the layers before."""

    value: Tensor | None = None

    def forward(self, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        super().forward(hidden_states, *args, **kwargs)
        return self.value


class _Exit(Passthrough):
    """Keeps what a stage hands on."""

    value: Tensor | None = None

    def forward(self, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.value = hidden_states
        return super().forward(hidden_states, *args, **kwargs)


class _StandIn(Passthrough):
    """An embedding that another stage runs: gives something of the right shape for each token."""

    value: Tensor | None = None

    @property
    def weight(self) -> Tensor | None:
        """What tells the device, as an embedding's weight does."""
        return self.value

    def forward(self, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        return self.value
