"""A loss or a gradient that is not finite: one verdict, told with the step, the layer and the rank.

The verdict is the gradient norm, which every rank has from one all-reduce: not finite there is not
finite everywhere, and so is a loss, which is added to the same number. Only a step that failed costs
more: where it began is looked for then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from ep_mesh.world import gathered
from ep_plans import find_nonfinite, parallel_state
from ep_plans.stages import Passthrough
from ep_trainer.optim import reshard

ON_NONFINITE = ("stop", "skip", "ignore")


class SkippableOptimizer(AcceleratedOptimizer):  # type: ignore[misc, unused-ignore]
    """accelerate's wrapper of an optimizer, told to skip its next step."""

    skip_next: bool
    _skipped: bool

    @classmethod
    def of(cls, optimizer: AcceleratedOptimizer) -> SkippableOptimizer:
        """Turn accelerate's object into one of these."""
        if not isinstance(optimizer, cls):
            optimizer.__class__ = cls
            assert isinstance(optimizer, cls)
            optimizer.skip_next = optimizer._skipped = False
        return optimizer

    def step(self, closure: Any = None) -> None:
        """Step, or skip it if told so."""
        self._skipped, self.skip_next = self.skip_next, False
        if not self._skipped:
            super().step(closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, by this or by the gradient scaler."""
        return self._skipped or bool(super().step_was_skipped)


def check_policy(on_nonfinite: str) -> None:
    """Refuse a policy that isn't one.

    Raises:
        ValueError: names them.
    """
    if on_nonfinite not in ON_NONFINITE:
        raise ValueError(f"on_nonfinite={on_nonfinite!r}: it is one of {', '.join(ON_NONFINITE)}.")


def tell(
    model: nn.Module,
    step: int,
    norm: Tensor,
    losses: Sequence[Tensor],
    forward: Callable[[int], Any],
) -> str:
    """Where a step failed: its number, the layer, the ranks. Every rank must call it.

    Args:
        model: with the step's gradients.
        step: its number, from 1.
        norm: of the gradients.
        losses: of this rank's micro-batches, as many on every rank.
        forward: runs the micro-batch of that number once more.

    Cost: gathers of a few names, and a forward if a loss is not finite.
    """
    text = f"step {step}: the gradient norm is {norm.item()}"
    bad_losses = _bad_losses(losses)
    if bad_losses:
        micro = min(number for numbers in bad_losses.values() for number in numbers)
        ranks = ", ".join(str(rank) for rank, numbers in bad_losses.items() if micro in numbers)
        which = f" of micro-batch {micro + 1} of {len(losses)}" if len(losses) > 1 else ""
        text += f"; the loss{which} is not finite on rank {ranks}, {_first_output(model, micro, forward)}"
    return f"{text}; of its gradients, {find_nonfinite(model)}."


def _bad_losses(losses: Sequence[Tensor]) -> dict[int, list[int]]:
    """The micro-batches whose loss is not finite, by rank."""
    mine = [number for number, loss in enumerate(losses) if not bool(loss.isfinite().all())]
    return {rank: bad for rank, bad in enumerate(gathered(mine)) if bad}


def _first_output(model: nn.Module, micro: int, forward: Callable[[int], Any]) -> str:
    """The first module whose output is not finite when the micro-batch runs once more."""
    training = model.training
    model.eval()  # so that nothing counts or drops out
    try:
        with torch.random.fork_rng(), torch.no_grad(), _watched(model) as bad:
            forward(micro)
    finally:
        model.train(training)
        reshard(model)
    state = parallel_state(model)
    pipeline = None if state is None else state.pipeline
    # Over stages children come before their parents: a layer is handed on by others, which know it by name.
    names = [name for name, _ in model.named_modules()] if pipeline is None else pipeline.modules
    order = {name: place for place, name in enumerate(names)}
    found = [(names[0], rank) for rank, names in enumerate(gathered(bad[:1])) if names]
    if not found:
        return "and no module's output in a second forward"
    first = min((name for name, _ in found), key=lambda name: order.get(name, -1))
    ranks = ", ".join(str(rank) for name, rank in found if name == first)
    where = "" if pipeline is None else f"pipeline stage {pipeline.stage_of(first)}, "
    return f"first in the output of {first or type(model).__name__} ({where}on rank {ranks})"


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """A list that gets the names of modules whose output is not finite, in the order they finish."""
    bad: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if any(not bool(tensor.isfinite().all()) for tensor in _tensors(output)):
                bad.append(name)

        return look

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if not isinstance(module, Passthrough)  # another stage's
    ]
    try:
        yield bad
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _tensors(part)
