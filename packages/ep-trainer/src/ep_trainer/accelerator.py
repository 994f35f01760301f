"""accelerate's `Accelerator`, where a process is no longer one batch.

accelerate numbers data by process. Here the ranks of a TP group hold one batch, and an expert
axis exists that accelerate cannot express, so this class answers the questions that depend on it:
which part of the data, gathered over whom, and what must not be wrapped.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import SkipBatchSampler, prepare_data_loader
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ep_mesh import Layout, ParallelMesh
from ep_plans import no_sync
from ep_trainer._compat import rank_in_worker_seed, remember_data_loader, scaler_settings
from ep_trainer.nonfinite import SkippableOptimizer
from ep_trainer.scaler import WorldGradScaler


class LayoutAccelerator(Accelerator):  # type: ignore[misc, unused-ignore]
    """An `Accelerator` for a model that is sharded already.

    Built by `LayoutAccelerator.over`: transformers creates the accelerator itself, and this turns
    that very object (its state, its trackers) into one that knows the layout.
    """

    mesh: ParallelMesh
    seed: int
    rows_of_stream: int | None = None
    """Rows of this batch of a stream that isn't split, which tells the end by a batch of fewer rows."""

    @classmethod
    def over(cls, accelerator: Accelerator, mesh: ParallelMesh, seed: int) -> LayoutAccelerator:
        """Turn `accelerator` into one for `mesh`; `seed` orders the data on all ranks."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator.mesh = mesh
        accelerator.seed = seed
        accelerator._mirror = mirror(mesh.layout)
        if accelerator.scaler is not None:
            accelerator.scaler = WorldGradScaler(**scaler_settings(accelerator.scaler))
        return accelerator

    # -- sizes, as accelerate tells them

    @property
    def data_shards(self) -> int:
        """Number of distinct batches: `fsdp * dp_replicate`."""
        return self.mesh.layout.data_parallel_size

    @property
    def data_shard(self) -> int:
        """Which of them this rank holds."""
        return self.mesh.layout.batch_of(self.mesh.rank)

    @property
    def parallelism_config(self) -> ParallelismConfig:
        """The sizes in accelerate's words; it has none for experts."""
        return self._mirror

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's place in its TP group."""
        return self.mesh.coordinate("tp")

    @property
    def data_parallel_rank(self) -> int:
        """This rank's HSDP replica."""
        return self.mesh.coordinate("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's place in its FSDP group."""
        return self.mesh.coordinate("fsdp")

    # -- preparing: nothing is wrapped or moved, data is split by data shard

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers; others are given back as is."""
        ready = tuple(self._prepared(arg) for arg in args)
        return ready if len(ready) > 1 else ready[0]

    def _prepared(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return self.prepare_model(thing)
        if isinstance(thing, DataLoader):
            return self.prepare_data_loader(thing)
        if isinstance(thing, Optimizer):
            return self.prepare_optimizer(thing)
        if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            return self.prepare_scheduler(thing)
        return thing

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Autocast and compilation only: the model is placed and reduces its own gradients."""
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)  # type: ignore[no-any-return, unused-ignore]

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> SkippableOptimizer:
        """The optimizer, of which a step can be skipped on all ranks."""
        return SkippableOptimizer.of(super().prepare_optimizer(optimizer, device_placement))

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's data shard; equal on all ranks of a TP group.

        What is drawn at random (the order, the workers' seeds) starts from `seed`, not from the
        rank's generator, which may have been used differently on another rank.
        """
        if data_loader.generator is None:
            data_loader.generator = torch.Generator().manual_seed(self.seed)
        rank_in_worker_seed(data_loader, self.data_shard)
        # Nothing is filled up where the rest is dropped, and accelerate 1.12 refuses to fill up the
        # batches of a sampler without a batch size.
        even_batches = self.even_batches and not getattr(
            data_loader.batch_sampler, "drop_last", False
        )
        prepared: DataLoader[Any] = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.data_shards,
            process_index=self.data_shard,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        remember_data_loader(self, prepared)
        return prepared

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep the gradients of this micro-batch on the rank (they stay unsharded until synced)."""
        return no_sync(model)

    # -- gathering: over data shards, in their order, each sample once

    def gather(self, tensor: Any) -> Any:
        """Concatenate over the data shards; TP copies are not repeated.

        One all-gather per tensor, whose shapes must be equal on all ranks.
        """
        return recursively_apply(self._gather, tensor, error_on_other_type=True)

    def _gather(self, tensor: Tensor) -> Tensor:
        rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach().contiguous()
        if self.data_shards == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.data_shards)]
        dist.all_gather(parts, rows, group=self.mesh.group("dp"))
        return torch.cat(parts)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather`, without the samples that fill up the last batch.

        Things that hold no tensors, or `use_gather_object`: lists of objects, concatenated.
        """
        if use_gather_object or not _all_tensors(input_data):
            parts: list[Any] = [None] * self.data_shards
            dist.all_gather_object(parts, input_data, group=self.mesh.group("dp"))
            rows = [row for part in parts for row in part]
            return rows[: self.rows_in_step]
        rows = self.gather(input_data)
        real = self.rows_of_stream if self.rows_in_step is None else self.rows_in_step
        return rows if real is None else recursively_apply(lambda tensor: tensor[:real], rows)

    @property
    def rows_in_step(self) -> int | None:
        """Samples of the current step over all data shards, if it is a last one with fewer."""
        state = self.gradient_state
        if state.active_dataloader is None or not state.end_of_dataloader:
            return None
        remainder = state.remainder
        skipping = getattr(state.active_dataloader, "batch_sampler", None)
        if isinstance(skipping, SkipBatchSampler) and not skipping.batch_sampler.drop_last:
            # accelerate does not see through a loader that skips batches (a resumed epoch).
            samples = len(state.active_dataloader.dataset)
            remainder = samples % (skipping.batch_sampler.batch_size * self.data_shards)
        return int(remainder) if remainder > 0 else None


def mirror(layout: Layout) -> ParallelismConfig:
    """The sizes that accelerate has words for.

    accelerate knows no replicas without shards beside TP: they count as shards there.
    """
    if layout.tp > 1 and layout.fsdp == 1:
        return ParallelismConfig(tp_size=layout.tp, dp_shard_size=layout.dp_replicate)
    return ParallelismConfig(
        tp_size=layout.tp, dp_shard_size=layout.fsdp, dp_replicate_size=layout.dp_replicate
    )


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
