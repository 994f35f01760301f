"""`EPTrainer`: a `transformers.Trainer` for a model that is sharded over a layout.

[Note: one loss for all ranks]
Gradients are the mean over the D data shards, `D = fsdp * dp_replicate`; the ranks of a TP group
compute one batch together. With N label tokens in the global batch (all shards, all micro-batches
of the step), shard `r` calls backward on `D * sum_r / N`: its mean over shards is
`sum / N`, the loss of one process that holds the whole global batch, and so are its gradients,
however unevenly the labels are spread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ep_mesh import ParallelMesh
from ep_plans import clip_grads_with_norm_, compile_layers, parallel_state
from ep_trainer import _compat
from ep_trainer.accelerator import LayoutAccelerator
from ep_trainer.balancing import BalancingLoss
from ep_trainer.batching import BatchingTrainer
from ep_trainer.checkpoint.options import CheckpointOptions
from ep_trainer.checks import (
    check_arguments,
    check_devices,
    check_model,
    check_model_init,
    check_saves,
)
from ep_trainer.chunked_loss import chunk_loss
from ep_trainer.data import (
    check_shared,
    count_labels,
    len_of,
)
from ep_trainer.meters.base import Collector, Meter
from ep_trainer.numerics import Numerics
from ep_trainer.optim import reshard, split_by_mesh
from ep_trainer.pipeline import PipelineRunner
from ep_trainer.watch import Watch, watched
from ep_trainer.z_loss import RouterZLoss


class EPTrainer(BatchingTrainer):
    """Trains a sharded model as `transformers.Trainer` trains it in one process.

    The arguments are `transformers.Trainer`'s; the model was loaded or sharded by
    `expert_parallel`, which also says the layout. `per_device_train_batch_size` is the batch
    of a data shard, and there are `fsdp * dp_replicate` of them: the ranks of a TP group get
    the same one. Losses, token counts, predictions and gradient norms are those of the global
    batch, each sample once. A model that nobody sharded is trained as by `transformers.Trainer`.

    Checkpoints are sharded (`ep_trainer.checkpoint`): every rank writes its part, and any layout
    resumes from them. `checkpoint_options` says how; `register_for_checkpoint` adds state.

    Args:
        on_nonfinite: what to do with a step whose loss or gradient norm is not finite, the same on
            every rank: `"stop"` raises a RuntimeError that names the step, the layer and the ranks,
            with the parameters as they were before the step; `"skip"` warns with that text and goes
            on with the next batch; `"ignore"` steps. The default stops, since what is not finite
            once mostly is so again, and skipping would go on for days without learning. With fp16 an
            overflow is no such case: the scale falls.
        optim_in_backward: step each parameter when backward has its gradient, and free that
            (`StepInBackward`). Not with clipping, accumulation, fp16 or `"skip"`, which need all
            gradients at once.
        loss_chunk_tokens: so many tokens' logits exist at one time in training, see
            `ep_trainer.chunk_loss`; None: those of the whole batch.
        router_z_loss_coef: the weight of ST-MoE's router z-loss, the mean over the tokens of a step,
            added up over the layers.
        watch: how the ranks watch each other in `train`, so that one that fails stops all, see `Watch`;
            True: with its defaults; False: they don't.

    Raises:
        ValueError: an argument that doesn't work with a sharded model, or a model that isn't
            sharded though several processes run. At construction.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        checkpoint_options: CheckpointOptions | None = None,
        on_nonfinite: str = "stop",
        optim_in_backward: bool = False,
        loss_chunk_tokens: int | None = None,
        router_z_loss_coef: float = 0.0,
        watch: Watch | bool = True,
        **named: Any,
    ) -> None:
        self._numerics = Numerics(on_nonfinite, in_backward=optim_in_backward)
        state = None if model is None else parallel_state(model)
        self.mesh: ParallelMesh | None = None if state is None else state.mesh
        self._steps_of_loop = 0
        self._checked_batch = False
        self._init_batches()
        self._balancing: BalancingLoss | None = None
        self._init_checkpoints(checkpoint_options)
        self._watch = (Watch() if watch else None) if isinstance(watch, bool) else watch
        self._runner: PipelineRunner | None = None
        self._items_in_step: Any = None
        self._z_loss: RouterZLoss | None = None
        self._tokens_in_step: Tensor | None = None
        self._collect = Collector()
        self._loss_is_counted = True
        if self.mesh is not None and model is not None:
            args = args or TrainingArguments("tmp_trainer", save_strategy="no")
            self._check(model, args)
            if not self._computes_own_loss:
                self._balancing = BalancingLoss.of(model, self.mesh)
        elif model is not None:
            check_model(model)
            self._numerics.check_unsharded()
        super().__init__(model, args, *positional, **named)
        if self.mesh is not None and self.label_smoother is not None:
            self.label_smoother = _compat.ShiftingSmoother(
                self.label_smoother.epsilon, shifts=self.label_positions_are_shifted
            )
        if self.model_init is not None:
            check_model_init(self.model)
        if self.mesh is None and self.model is not None:
            check_model(self.model)
        if router_z_loss_coef and self.model is not None:
            self._z_loss = RouterZLoss(self.model, router_z_loss_coef, self.mesh)
        if "selective" in (self.args.gradient_checkpointing_kwargs or {}):
            _compat.checkpoint_selectively(self.model)
        self._chunks_loss = loss_chunk_tokens is not None
        if loss_chunk_tokens is not None and self.model is not None:
            if self.compute_loss_func is not None:
                raise ValueError(
                    "loss_chunk_tokens with compute_loss_func: a loss of one's own is given logits, which a "
                    "chunked loss doesn't make. Leave one of them out."
                )
            smoothing = self.args.label_smoothing_factor
            chunk_loss(self.model, loss_chunk_tokens, label_smoothing=smoothing)
        if self.args.torch_compile and self.is_sharded and self.model is not None:
            backend, mode = self.args.torch_compile_backend, self.args.torch_compile_mode
            compile_layers(self.model, backend=backend, mode=mode)

    def _check(self, model: nn.Module, args: TrainingArguments) -> None:
        mesh = self._sharded_mesh
        check_arguments(args)
        self._numerics.check(args, model)
        saves = args.save_strategy != "no"
        if saves and (args.save_only_model or self.checkpoint_options.save_hf):
            check_saves(model)
        if mesh.device_type == "cpu" and args.device.type == "cpu" and args.world_size == 1:
            _compat.use_cpu_ranks(args)
        _compat.use_one_device(args)
        check_devices(args, mesh.device, mesh.layout.world_size)

    @property
    def _computes_own_loss(self) -> bool:
        """Whether a trainer that is not transformers' own computes the loss, see `with_layout`."""
        after = type(self).__mro__[type(self).__mro__.index(EPTrainer) + 1 :]
        return next(kind for kind in after if "compute_loss" in vars(kind)) is not Trainer

    # -- accelerate

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator and let it know the layout."""
        super().create_accelerator_and_postprocess()
        if self.mesh is None:
            return
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.accelerator = LayoutAccelerator.over(self.accelerator, self.mesh, seed)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics,
            use_gather_object=self.args.eval_use_gather_object,
        )

    def get_tp_size(self) -> int:
        """Ranks that hold the same batch."""
        return super().get_tp_size() if self.mesh is None else self.layout.tp * self.layout.pp

    # -- batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of a step and the label tokens in them, over all data shards."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._z_loss is not None and batches:
            self._tokens_in_step = self._z_loss.count(batches, device)
        return batches, items

    # -- loss

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of a micro-batch."""
        if self.mesh is not None and not self._checked_batch:
            check_shared(inputs, self.mesh)
            self._checked_batch = True
        self._real_rows = self._real_rows_of.get(id(inputs))
        self._measure(inputs)
        if self.layout.pp > 1:
            loss = self._pipeline_step(model, inputs, num_items_in_batch)
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.mesh is not None:
            self._numerics.saw(inputs, loss)
        return loss

    def _pipeline_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Forward and backward over the stages of a pipeline; the loss of the global batch."""
        model.train()
        set_optimizer_mode = getattr(self.optimizer, "train", None)
        if callable(set_optimizer_mode):
            set_optimizer_mode()
        if self._runner is None:
            assert self.model is not None
            self._runner = PipelineRunner(
                self.model,
                compute_loss=self._micro_batch_loss,
                balanced=self.label_smoother is None and self.compute_loss_func is None,
                context=self.compute_loss_context_manager,
                z_loss=self._z_loss,
            )
        self._items_in_step = num_items_in_batch
        each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        scaler = self.accelerator.scaler
        return self._runner.step(
            _compat.prepared(self, inputs),
            num_items_in_batch=num_items_in_batch,
            real_rows=None if self._real_rows is None else self._real_rows[0],
            reduce=each or self.accelerator.sync_gradients,
            tokens_in_step=self._tokens_in_step,
            loss_scale=1.0 if scaler is None else scaler.get_scale(),
        )

    def _micro_batch_loss(
        self, model: nn.Module, inputs: dict[str, Any], _: Tensor | None, micro_batches: int
    ) -> Tensor:
        """This micro-batch's share of the shard's loss, which transformers would divide itself."""
        items = self._items_in_step
        with self._smoothing_left_to_chunks():
            loss: Any = super().compute_loss(model, inputs, num_items_in_batch=items)
        counted = items is not None and self.model_accepts_loss_kwargs
        scaled = counted or self.compute_loss_func is not None
        parts = 1 if scaled else micro_batches * self.current_gradient_accumulation_steps
        share: Tensor = loss / parts
        return share

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """This shard's share of the loss, its auxiliary loss that of the global batch."""
        if model.training:
            with self._smoothing_left_to_chunks():
                return self._shards_loss(model, inputs, return_outputs, num_items_in_batch)
        return self._shards_loss(model, inputs, return_outputs, num_items_in_batch)

    @contextmanager
    def _smoothing_left_to_chunks(self) -> Iterator[None]:
        """A chunked loss smooths the labels itself; without logits there is nothing else to do it."""
        smoother = self.label_smoother
        if self._chunks_loss:
            self.label_smoother = None
        try:
            yield
        finally:
            self.label_smoother = smoother

    def _shards_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool, num_items_in_batch: Any
    ) -> Any:
        if self._computes_own_loss:
            self._loss_is_counted = num_items_in_batch is not None
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        own_loss = self.label_smoother is not None or self.compute_loss_func is not None
        balanced = self._balancing is not None and "labels" in inputs and not own_loss
        mask = inputs.get("attention_mask") if balanced else None
        labels = {"labels": inputs["labels"]} if "labels" in inputs else {}
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if balanced and self._balancing is not None:
            counted = self.args.average_tokens_across_devices and num_items_in_batch is not None
            shards = self.layout.data_parallel_size if counted else 1
            loss = self._balancing.over_global_batch(
                loss, outputs, mask, weight=shards, real_rows=self._real_rows
            )
        if self._z_loss is not None and self._tokens_in_step is not None and model.training:
            term = self._z_loss.of({**inputs, **labels}, self._tokens_in_step)
            if not self._is_scaled(num_items_in_batch):
                # Divided again by whoever called this.
                term = term * self.current_gradient_accumulation_steps
            loss = loss + term.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    def _is_scaled(self, num_items_in_batch: Any) -> bool:
        """Whether the loss is that of its part of the step already, not of a micro-batch."""
        told = getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None:
            return bool(told)
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return counted or self.compute_loss_func is not None

    # -- gradients and optimizer

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by the norm over all meshes; the same on every rank, also when it isn't finite."""
        norm = self.gradient_norm(model)
        clip_grads_with_norm_(model, max_norm, norm)
        return norm

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """The norm over all meshes, judged: what is not finite stops or skips the step."""
        return self._numerics.judged_norm(self, model)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer, a parameter group per mesh and weight decay."""
        if self.mesh is None:
            return (
                super().create_optimizer(model) if model is not None else super().create_optimizer()
            )
        assert self.model is not None
        reshard(self.model)
        given = self.optimizer is not None
        optimizer: torch.optim.Optimizer = super().create_optimizer()
        if not given:
            split_by_mesh(optimizer)
        self._numerics.watch(optimizer)
        return optimizer

    # -- evaluation and prediction

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Run the loop, counting its steps.

        Raises:
            ValueError: the ranks have different numbers of batches.
        """
        self._steps_of_loop = 0
        if self.is_sharded:
            self.check_same_steps(len_of(dataloader), "the dataset to evaluate on")
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """One step; its loss is that of the global batch, where labels are counted."""
        self._steps_of_loop += 1
        if self.mesh is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return, unused-ignore]
        counted = self._counts_items(inputs) and self.args.average_tokens_across_devices
        samples = self.args.per_device_eval_batch_size
        # A loss is gathered as often as a full batch has rows.
        loader = self.accelerator.gradient_state.active_dataloader
        unsplit = len_of(loader) is None and self.layout.data_parallel_size == 1
        self.accelerator.rows_of_stream = _compat.find_batch_size(inputs) if unsplit else None
        inputs, self._real_rows = self._global_rows(inputs, samples)
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        if loss is not None and counted:
            loss = loss * self._weight_of(inputs)
            dist.all_reduce(loss, group=self.mesh.group("dp"))
        return loss, logits, labels

    def _weight_of(self, inputs: Any) -> Any:
        """What makes the losses of the data shards add up to that of the global batch."""
        if self._loss_is_counted:
            return 1.0 / self.layout.data_parallel_size
        # The mean over this shard's labels, by a trainer that does not count the others'.
        own = count_labels([inputs], shifted=self.label_positions_are_shifted)
        every = self.count_items([inputs], self._sharded_mesh.device)
        if own is None or every is None:
            return 1.0 / self.layout.data_parallel_size
        return own / every

    # -- counting

    def floating_point_ops(self, inputs: Any) -> int:
        """This rank's share: the ranks of a TP group do one batch's operations together."""
        return int(super().floating_point_ops(self.real_part(inputs))) // self.layout.tp

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what the meters say, and evaluation's steps per second as they were."""
        self._mend_speed(logs)
        if "loss" in logs:
            if self._numerics.skipped_steps:
                logs["skipped_steps"] = self._numerics.skipped_steps
            logs.update(self._collect(self._meters, self.args.device))
        super().log(logs, start_time)

    @property
    def _meters(self) -> list[Meter]:
        return [call for call in self.callback_handler.callbacks if isinstance(call, Meter)]

    def _measure(self, inputs: Any) -> None:
        ids = self.real_part(inputs).get(getattr(self.model, "main_input_name", "input_ids"))
        if isinstance(ids, Tensor):
            share = self.layout.data_parallel_size / self.layout.world_size
            for meter in self._meters:
                meter.count(ids.numel() * share, ids.shape[-1])

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; every rank gets all predictions, each sample once, in the dataset's order."""
        output = super().predict(*args, **kwargs)
        self._mend_speed(output.metrics)
        return output

    def _mend_speed(self, metrics: dict[str, float] | None) -> None:
        """Count steps by data shards: transformers divides the samples by all processes."""
        if metrics is None or not self.is_sharded:
            return
        for name in metrics:
            split, found, _ = name.rpartition("_steps_per_second")
            runtime = metrics.get(f"{split}_runtime")
            if found and split != "train" and runtime:
                metrics[name] = round(self._steps_of_loop / runtime, 3)

    # -- saving

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train.

        Args:
            resume_from_checkpoint: as with `transformers.Trainer`: a path, or True for the newest
                complete checkpoint; `"auto"`: that one if there is any, else from the start.
            *args: as with `transformers.Trainer`.
            **kwargs: as with `transformers.Trainer`.

        Raises:
            PeerError: another rank failed; it is named.
        """
        if not self.is_sharded:
            if resume_from_checkpoint == "auto":
                resume_from_checkpoint = _compat.last_checkpoint(str(self.args.output_dir))
            return super().train(resume_from_checkpoint, *args, **kwargs)
        self._collect.check(self._meters)
        saver = self.checkpointer
        with self.checkpointed_run(), watched(self._watch, saver.join, saver.group) as dog:
            checkpoint = self.found_checkpoint(resume_from_checkpoint)
            if dog is None:
                return super().train(checkpoint, *args, **kwargs)
            self.add_callback(dog)
            try:
                return super().train(checkpoint, *args, **kwargs)
            finally:
                self.remove_callback(dog)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write an ordinary checkpoint that plain transformers loads. Every rank must call it."""
        if self.mesh is None:
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        model: Any = self.model
        check_saves(model)
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        model.save_pretrained(folder)
        if self.args.should_save:
            _compat.save_beside_model(self, folder)
        dist.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
