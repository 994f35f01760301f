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

from ep_plans.stages import Passthrough, Pipeline

RouterSums = Callable[[Sequence[Tensor], Tensor, Mapping[str, Any]], tuple[Tensor, ...]]
Finish = Callable[[Any, tuple[Tensor, ...], Mapping[str, Any]], Any]

# What only the last stage has a use for.
_LAST_ONLY = ("labels", "logits_to_keep", "shift_labels")


def stage_forward(
    model: nn.Module,
    pipeline: Pipeline,
    stage: int,
    *,
    sums: RouterSums | None = None,
    finish: Finish | None = None,
    with_logits: bool = True,
) -> StageForward:
    """A module that runs one stage of a model that `keep_stages` left.

    Args:
        model: the model.
        pipeline: how it was split.
        stage: which of this rank's stages.
        sums: of the router logits [T, E] of the stage's own layers (perhaps none), of the hidden
            states and of the call's keyword arguments makes the sums that are added up from stage to
            stage; None: nothing but the hidden states is handed on.
        finish: makes the last stage's result of the model's output, the sums of all stages and the
            keyword arguments; None: the output.
        with_logits: whether `sums` is given the router logits, for which the model is asked then.
    """
    return StageForward(model, pipeline, stage, sums, finish, with_logits)


class StageForward(nn.Module):
    """One stage as a module of its own, over the modules of the model; see `stage_forward`.

    Its parameters are the stage's. `forward(input_ids, **kwargs)` on the first stage,
    `forward(hidden_states, *sums, **kwargs)` on the others, with the keyword arguments of the model,
    the same on every stage. Gives `(hidden_states, *sums)`, on the last stage what `finish` makes.
    """

    _model: nn.Module
    _owner: nn.Module
    _swapped: dict[str, nn.Module]
    _stand_in: _StandIn
    _entry: _Entry | None
    _exit: _Exit | None

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        stage: int,
        sums: RouterSums | None = None,
        finish: Finish | None = None,
        with_logits: bool = True,
    ) -> None:
        super().__init__()
        parts, stages = pipeline.parts, pipeline.stages
        self.stage = stage
        self.is_first, self.is_last = stage == 0, stage == len(stages) - 1
        self._sums, self._finish = sums, finish
        self._with_logits = sums is not None and with_logits
        held = stages.ranges[stage]
        swapped: dict[str, nn.Module] = {}
        entry: _Entry | None = None
        leave: _Exit | None = None
        for i in range(parts.count):
            name = f"{parts.layers}.{i}"
            if i in held:
                continue
            layer = model.get_submodule(name)
            # A cache hears of the layers that this rank's other stages run from those.
            counted = None if stage == pipeline.here[0] and pipeline.runs(name) else i
            if i == held.start - 1:
                swapped[name] = entry = _Entry(layer, counted)
            elif i == held.stop:
                swapped[name] = leave = _Exit(layer, counted)
            else:
                swapped[name] = Passthrough(layer, counted)
        around = (() if self.is_first else parts.first) + (() if self.is_last else parts.last)
        swapped.update({name: Passthrough(model.get_submodule(name)) for name in around})
        stand_in = _StandIn(model.get_submodule(parts.embedding))
        if not self.is_first:
            swapped[parts.embedding] = stand_in
        own = [f"{parts.layers}.{i}" for i in held]
        own += parts.first if self.is_first else ()
        own += parts.last if self.is_last else ()
        self.parts = nn.ModuleList([model.get_submodule(name) for name in own])
        # Not as submodules: they hold what other stages of this rank run.
        owner = model.get_submodule(parts.embedding.rpartition(".")[0])
        vars(self).update(_model=model, _owner=owner, _swapped=swapped)
        vars(self).update(_stand_in=stand_in, _entry=entry, _exit=leave)

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Any:
        """Run the stage."""
        logits: list[Tensor] = []
        received: tuple[Tensor, ...] = ()
        hidden: Tensor | None = None
        call = kwargs
        if self.is_first:
            call = {"input_ids": inputs[0], **kwargs} if inputs else kwargs
        else:
            hidden, *rest = inputs
            received = tuple(rest)
        with contextlib.ExitStack() as stack:
            if self._with_logits:
                call = {**call, "output_router_logits": False}
                stack.enter_context(self.router_logits(logits))
            output, handed = self.run(self._model, hidden, call)
        if self.is_last:
            totals = self._totals(logits, inputs[0], kwargs, received)
            return output if self._finish is None else self._finish(output, totals, kwargs)
        assert handed is not None
        return (handed, *self._totals(logits, handed, kwargs, received))

    def run(
        self, model: Callable[..., Any], hidden: Tensor | None, kwargs: Mapping[str, Any]
    ) -> tuple[Any, Tensor | None]:
        """Call `model`, which runs the split model's forward, as this stage.

        Returns:
            The model's output, of use on the last stage, and what this stage hands on elsewhere.
        """
        call = dict(kwargs)
        if hidden is not None:
            assert self._entry is not None
            self._entry.value = hidden
            # Shapes, dtype and device of a stage that doesn't embed come from these.
            like = hidden.detach()
            if hidden.ndim > 3:  # several residual streams
                like = like.new_zeros(*hidden.shape[:2], hidden.shape[-1])
            self._stand_in.value = like
            if call.get("input_ids") is None:
                call["inputs_embeds"] = like
        if not self.is_last:
            call = {name: value for name, value in call.items() if name not in _LAST_ONLY}
        try:
            with _running(self._model, self._swapped, kwargs):
                output = model(**call)
            return output, None if self._exit is None else self._exit.value
        finally:
            for part in (self._entry, self._exit, self._stand_in):
                if part is not None:
                    part.value = None

    @contextlib.contextmanager
    def router_logits(
        self, found: list[Tensor], *, earlier: Sequence[Tensor] | None = None
    ) -> Iterator[None]:
        """Put the logits of the stage's routers into `found` meanwhile.

        Args:
            found: receives those of this stage, in the order of the layers.
            earlier: those of earlier stages; the model's own code then sees all of them.
        """

        def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, "output_router_logits": True}

        def take(_: nn.Module, args: Any, output: Any) -> None:
            found.extend(getattr(output, "router_logits", None) or ())
            if earlier is not None:
                output.router_logits = (*earlier, *found)

        hooks = (
            self._owner.register_forward_pre_hook(ask, with_kwargs=True),
            self._owner.register_forward_hook(take),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

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


_RUNNING = "_ep_stage_running"


def runs_as_stage(model: nn.Module) -> bool:
    """Whether a `StageForward` is calling `model`."""
    return _RUNNING in vars(model)


def stage_arguments(model: nn.Module) -> Mapping[str, Any] | None:
    """What the `StageForward` that is calling `model` was given by name, labels on every stage too.

    None: no stage is running.
    """
    return vars(model).get(_RUNNING)


@contextlib.contextmanager
def _running(
    model: nn.Module, modules: Mapping[str, nn.Module], arguments: Mapping[str, Any]
) -> Iterator[None]:
    """Let `model` have these modules meanwhile."""
    places = []
    for name, module in modules.items():
        owner, _, leaf = name.rpartition(".")
        children = model.get_submodule(owner)._modules
        places.append((children, leaf, children[leaf]))
        children[leaf] = module
    vars(model)[_RUNNING] = arguments
    try:
        yield
    finally:
        vars(model).pop(_RUNNING)
        for children, leaf, before in places:
            children[leaf] = before
