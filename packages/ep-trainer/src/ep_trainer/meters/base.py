"""What a meter is, and the one all-reduce that all of them share.

[Note: one all-reduce for all meters]
Each meter has a vector of numbers, as long on every rank, that is added up over all ranks; the
vectors travel as one. What is no sum gets a place per rank, which only that rank fills: then every
rank knows all values, and the largest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from ep_mesh.world import gathered, own_rank, world_size


class Meter(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """A callback whose `metrics` `EPTrainer` adds to each training log, for every logger to see."""

    def count(self, tokens: float, sequence_length: int) -> None:
        """This rank's share of a micro-batch's input tokens, in rows of `sequence_length`.

        The ranks that hold the same batch have equal shares, which add up to its tokens.
        """

    def sums(self) -> Tensor:
        """This rank's numbers since the last log, float64 [n], to be added up over all ranks.

        Called on every rank, once per log; n is the same on every rank and at each log.
        """
        return torch.zeros(0, dtype=torch.float64)

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """The log's numbers, from the sums over all ranks, float64 [n] on the CPU.

        Called on every rank after `sums`.
        """
        return {}

    def details(self) -> dict[str, Any]:
        """More of the last log, for files; what JSON knows."""
        return {}


class Collector:
    """Brings together what the meters of all ranks counted.

    Cost: a gather of objects when training begins and at the first log; of a log one all-reduce of
    the float64 numbers of all meters, and one copy to the host.
    """

    def __init__(self) -> None:
        self._checked = False

    def __call__(self, meters: Sequence[Meter], device: torch.device) -> dict[str, float]:
        """The numbers of a log.

        Raises:
            ValueError: the ranks have different meters; at the first log, on all of them.
        """
        parts = [meter.sums() for meter in meters]
        spread = world_size() > 1
        if spread and not self._checked:
            sizes = [f" of {len(part)} numbers" for part in parts]
            self._check(meters, sizes)
            self._checked = True
        if not meters:
            return {}
        place = device if spread else torch.device("cpu")
        numbers = torch.cat([part.to(place, torch.float64) for part in parts])
        if spread:
            dist.all_reduce(numbers)
        found: dict[str, float] = {}
        for meter, part in zip(
            meters, numbers.cpu().split([len(part) for part in parts]), strict=True
        ):
            found.update(meter.metrics(part))
        return found

    def check(self, meters: Sequence[Meter]) -> None:
        """Check that all ranks have the same meters, before these communicate.

        Raises:
            ValueError: they have not; on all ranks.
        """
        self._check(meters, [""] * len(meters))

    @staticmethod
    def _check(meters: Sequence[Meter], sizes: Sequence[str]) -> None:
        names = [type(meter).__name__ + size for meter, size in zip(meters, sizes, strict=True)]
        everyone = gathered(", ".join(names) or "nothing")
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise ValueError(
                    f"rank 0 measures {everyone[0]}, rank {rank} {theirs}: give the "
                    "trainer the same callbacks on every rank, in the same order."
                )


def own_place(values: Sequence[float]) -> Tensor:
    """A place for each rank, filled on this one: float64 [world * n], see the note above."""
    places = torch.zeros(world_size(), len(values), dtype=torch.float64)
    places[own_rank()] = torch.tensor(values, dtype=torch.float64)
    return places.flatten()
