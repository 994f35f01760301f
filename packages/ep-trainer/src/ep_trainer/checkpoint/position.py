"""Where in the data a run is, so that one with other batches or ranks goes on at the same sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ep_trainer.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class Position:
    """A place in the order of the samples, which is one order for all data shards.

    Attributes:
        epoch: whole epochs done.
        samples: samples of the current epoch done, by global index.
        samples_in_epoch: how many an epoch has; 0 if nobody knows.
        seed: what the order is drawn from.
    """

    epoch: int
    samples: int
    samples_in_epoch: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Position:
        """From plain data."""
        return cls(**values)

    def steps(self, micro_batch: int, accumulation: int, here: Position) -> tuple[int, int]:
        """Epochs and micro-batches of the current epoch to skip.

        Args:
            micro_batch: samples of a micro-batch over all data shards.
            accumulation: micro-batches of a step.
            here: the start of the resuming run's own data.

        Raises:
            CheckpointError: the data are others, or the position is inside a step.
        """
        if self.samples_in_epoch != here.samples_in_epoch:
            raise CheckpointError(
                f"the checkpoint was trained on {self.samples_in_epoch} samples per epoch, the data "
                f"here have {here.samples_in_epoch}: give the same data, or ignore_data_skip=True to "
                "begin with them anew."
            )
        if self.seed != here.seed:
            raise CheckpointError(
                f"the checkpoint's order of samples was drawn from the seed {self.seed}, here it is "
                f"{here.seed}: set data_seed={self.seed}, or ignore_data_skip=True to begin anew."
            )
        step = micro_batch * accumulation
        if self.samples % step:
            raise CheckpointError(
                f"the checkpoint stands after {self.samples} samples of an epoch, which is inside a "
                f"step of {step} samples here (per_device_train_batch_size x data shards = "
                f"{micro_batch}, gradient_accumulation_steps={accumulation}): choose them so that "
                "their product divides it."
            )
        return self.epoch, self.samples // micro_batch
