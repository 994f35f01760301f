"""What a batch is to `EPTrainer`: whose samples, how many labels, which rows only fill it up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from ep_mesh import Layout, ParallelMesh
from ep_trainer import _compat
from ep_trainer.checkpoint.training import CheckpointingTrainer
from ep_trainer.data import (
    count_labels,
    filled_up,
    first_sequences,
    sequence_starts,
    without_fillers,
)

RealRows = tuple[int, int] | None
"""Rows of a batch that are in the global batch, and rows of it in all; None: no row only fills up."""


class BatchingTrainer(CheckpointingTrainer):
    """The batches of a data shard, and their share of the global batch."""

    def _init_batches(self) -> None:
        self._real_rows_of: dict[int, RealRows] = {}
        self._real_rows: RealRows = None

    @property
    def _sharded_mesh(self) -> ParallelMesh:
        assert self.mesh is not None
        return self.mesh

    @property
    def is_sharded(self) -> bool:
        """Whether the model is sharded, over a layout of any size."""
        return self.mesh is not None

    @property
    def layout(self) -> Layout:
        """The sizes; one rank if the model isn't sharded."""
        return Layout() if self.mesh is None else self.mesh.layout

    def shared_sampler(self, sampler: Sampler[Any] | None) -> Sampler[Any] | None:
        """The sampler with the same order on all ranks, split by data shards if it splits."""
        if self.mesh is None:
            return sampler
        if isinstance(sampler, _compat.BatchRebalanceSampler):
            shard = self.layout.batch_of(self.mesh.rank)
            return _compat.rebalance_for(sampler, self.layout.data_parallel_size, shard)
        if isinstance(sampler, _compat.LengthGroupedSampler) and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(self.accelerator.seed)
        return sampler

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of a step and the label tokens in them, over all data shards."""
        if self.mesh is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[no-any-return, unused-ignore]
        batches: list[Any] = []
        self._real_rows_of.clear()
        for _ in range(num_batches):
            batch = next(epoch_iterator, None)
            if batch is None:
                break
            batch, real_rows = self._global_rows(batch, self.args.per_device_train_batch_size)
            if self.layout.pp > 1 and self._counts_items(batch):
                batch, real_rows = self._cuttable(batch, real_rows)
            self._real_rows_of[id(batch)] = real_rows
            batches.append(batch)
        self.count_samples(len(batches))
        return batches, self.count_items(batches, device)

    def _global_rows(self, batch: Any, samples: int) -> tuple[Any, RealRows]:
        """The batch without the labels of rows that only fill it up; how many rows are real.

        Of a row that holds the batch's `samples` one after the other, those are cut off.
        """
        rows = self.accelerator.rows_in_step
        if rows is None or not self._counts_items(batch):
            return batch, None
        held = batch["labels"].shape[0]
        starts = sequence_starts(batch) if samples > 1 else []
        if len(starts) == samples:
            real = min(max(rows - self.accelerator.data_shard * samples, 0), samples)
            if real < samples:
                batch = first_sequences(batch, starts, real)
            return batch, None if real else (0, 1)
        real = min(max(rows - self.accelerator.data_shard * held, 0), held)
        return without_fillers(batch, real), (real, held)

    def _cuttable(self, batch: Any, real_rows: RealRows) -> tuple[Any, RealRows]:
        """A last batch of fewer rows, filled up so that micro-batches can be cut; how many rows are real."""
        shards = self.layout.data_parallel_size if self.accelerator.split_batches else 1
        held, whole = batch["labels"].shape[0], _compat.train_batch_size(self) // shards
        if held >= whole or sequence_starts(batch):
            return batch, real_rows
        real = held if real_rows is None else real_rows[0]
        return filled_up(batch, whole, real), (real, whole)

    def _counts_items(self, batch: Any) -> bool:
        normalizes = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return normalizes and isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor)

    def count_items(self, batches: Sequence[Any], device: torch.device) -> Tensor | None:
        """Label tokens of these micro-batches, int64 [], of all data shards unless told otherwise.

        None where the loss does not count them. One all-reduce of a number over data shards.
        """
        if not batches or not self._counts_items(batches[0]):
            return None
        count = count_labels(batches, shifted=self.label_positions_are_shifted)
        if count is None:
            return None
        count = count.to(device)
        if self.args.average_tokens_across_devices:
            dist.all_reduce(count, group=self._sharded_mesh.group("dp"))
        return count.clamp(min=1)

    def real_part(self, inputs: Any) -> Any:
        """The micro-batch of this step without rows that only fill it up."""
        if self._real_rows is None:
            return inputs
        real, held = self._real_rows
        return {
            name: value[:real]
            if isinstance(value, Tensor) and value.shape[:1] == (held,)
            else value
            for name, value in inputs.items()
        }
