"""Where gradients are not finite: looked for after the fact, so that good steps pay nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ep_mesh.world import gathered
from ep_plans.parallelize import parallel_state
from ep_plans.styles.base import local

Gradients = nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""A model, its `parameters()` or its `named_parameters()`; the first and the last bring names."""


@dataclass(frozen=True)
class NonFinite:
    """The gradients that are not finite, of all ranks.

    Attributes:
        ranks: for each such parameter, in the model's order, the ranks on whose part of the reduced
            gradient it shows. A reduction carries a value to the ranks that hold its sum, so these
            tell which part of a parameter is bad (which experts), not always who computed it.
        total: parameters with a gradient, on this rank.
        stages: the pipeline stage of each such parameter; empty without stages, or if no model was given.
    """

    ranks: dict[str, tuple[int, ...]]
    total: int
    stages: dict[str, int] = field(default_factory=dict)

    @property
    def first(self) -> str | None:
        """The first of them that backward met: the last one in the model's order."""
        return next(reversed(self.ranks), None)

    def __str__(self) -> str:
        """The layer that backward met first, the ranks, and how far it spread."""
        if self.first is None:
            return "no gradient is: each is finite, but their norm is not"
        layer, _, _ = self.first.rpartition(".")
        ranks = ", ".join(map(str, self.ranks[self.first]))
        stage = f"pipeline stage {self.stages[self.first]}, " if self.stages else ""
        of = "" if self.stages else f" of {self.total}"
        return (
            f"backward met it first in {layer or self.first} ({self.first}, {stage}on rank {ranks}), and "
            f"{len(self.ranks)}{of} gradients have it"
        )


def find_nonfinite(parameters: Gradients) -> NonFinite:
    """Which gradients are not finite, and on which ranks. Every rank must call it.

    Parameters without names are told by their place and shape.

    Cost: a pass over the gradients, a host sync, a gather of names over the world.
    """
    named = [(name, p.grad) for name, p in with_names(parameters) if p.grad is not None]
    flags = [local(grad).isfinite().all().logical_not() for _, grad in named]
    found = torch.stack([flag.to("cpu") for flag in flags]).tolist() if flags else []
    mine = [name for (name, _), bad in zip(named, found, strict=True) if bad]
    said = gathered(mine)
    state = parallel_state(parameters) if isinstance(parameters, nn.Module) else None
    pipeline = None if state is None else state.pipeline
    names = [name for name, _ in named] if pipeline is None else pipeline.tensors
    order = {name: place for place, name in enumerate(names)}
    every = sorted({n for names in said for n in names}, key=lambda n: order.get(n, -1))
    return NonFinite(
        {n: tuple(rank for rank, names in enumerate(said) if n in names) for n in every},
        len(named),
        {n: pipeline.stage_of(n) for n in every} if pipeline is not None else {},
    )


def with_names(parameters: Gradients) -> list[tuple[str, Tensor]]:
    """Parameters with their names, or with their place and shape where none was given."""
    if isinstance(parameters, nn.Module):
        return list(parameters.named_parameters())
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    return [
        (f"parameter {place} of shape {list(given.shape)}", given)
        if isinstance(given, Tensor)
        else given
        for place, given in enumerate(parameters)
    ]
