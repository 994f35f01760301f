"""The private parts of its dependencies that the trainer needs, all in this file.

Seen in transformers 5.17.0 and 5.24.0, accelerate 1.15.0, torch 2.13.0, torchao 0.18.0.
`HookedTrainer` overrides the private hooks of `transformers.Trainer` and hands each to a method that
`EPTrainer` defines.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader, Sampler
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss as causal_lm_loss
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import (
    BatchRebalanceSampler,
    LabelSmoother,
    LengthGroupedSampler,
    find_batch_size,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from ep_dispatch import keep_communicated

Batch = Mapping[str, Any]

_KNOWN = ("transformers", "ep_trainer", "expert_parallel")
_ASK = (
    "on_epoch_begin",
    "on_epoch_end",
    "on_evaluate",
    "on_log",
    "on_optimizer_step",
    "on_pre_optimizer_step",
    "on_save",
    "on_step_begin",
    "on_step_end",
    "on_substep_end",
)
"""What a callback does where it may ask the trainer to stop, save, evaluate or log."""


class HookedTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A `transformers.Trainer` whose private hooks call methods with names of our own."""

    saved_step = -1
    """The step of the last checkpoint of this run."""

    # -- what EPTrainer says

    @property
    def is_sharded(self) -> bool:
        """Whether the model owns its placement and its gradient reduction."""
        raise NotImplementedError

    def count_items(self, batches: Sequence[Batch], device: torch.device) -> Tensor | None:
        """The label tokens of a step."""
        raise NotImplementedError

    def real_part(self, inputs: Any) -> Any:
        """The micro-batch of this step without rows that only fill it up."""
        raise NotImplementedError

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip, return the norm before."""
        raise NotImplementedError

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """The norm, nothing is clipped."""
        raise NotImplementedError

    @property
    def writes_shards(self) -> bool:
        """Whether checkpoints are sharded ones."""
        raise NotImplementedError

    def save_training_state(self, run: str) -> None:
        """Save a checkpoint in the directory of the run."""
        raise NotImplementedError

    def load_model_state(self, checkpoint: str, *, resuming: bool) -> None:
        """Load the model of a checkpoint."""
        raise NotImplementedError

    def load_training_state(self, checkpoint: str) -> None:
        """Load what else is in a checkpoint."""
        raise NotImplementedError

    def load_random_state(self, checkpoint: str) -> None:
        """Load the random generators' states."""
        raise NotImplementedError

    def resumed_position(self, checkpoint: str) -> tuple[int, int]:
        """Epochs and micro-batches that are done."""
        raise NotImplementedError

    def at_epoch_begin(
        self, epoch: int, skipped: int, micro_batches: int, generators: Sequence[torch.Generator]
    ) -> None:
        """An epoch begins."""
        raise NotImplementedError

    def at_step_boundary(self) -> None:
        """A step is done; nothing is logged or saved yet."""
        raise NotImplementedError

    @property
    def must_save(self) -> bool:
        """Whether a checkpoint of this step is due that nothing else has made."""
        raise NotImplementedError

    def agree_on_control(self, control: TrainerControl) -> None:
        """Make `control` the same on all ranks."""
        raise NotImplementedError

    @property
    def callbacks_may_differ(self) -> bool:
        """Whether there are callbacks that might ask for something on one rank alone."""
        return any(
            type(call).__module__.partition(".")[0] not in _KNOWN
            and any(
                getattr(type(call), name) is not getattr(TrainerCallback, name) for name in _ASK
            )
            for call in self.callback_handler.callbacks
        )

    def finish_saves(self) -> None:
        """The training is done: saves in the background must be too."""
        raise NotImplementedError

    def keep_best_only(self) -> None:
        """The training is done, and only one checkpoint shall be left."""
        raise NotImplementedError

    # -- the hooks of transformers

    # Read from the model by transformers 5.24, which then treats the model as sharded by itself,
    # with its own gradient deferral; the accelerator below does that for every version.
    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        return self.__dict__.get("_loaded_by_transformers", False) and not self.is_sharded

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, value: bool) -> None:
        self.__dict__["_loaded_by_transformers"] = value

    def together(self, what: str) -> AbstractContextManager[None]:
        """Run the body on every rank; if it raises on one, raise on all."""
        raise NotImplementedError

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        if not self.is_sharded:
            super().init_hf_repo(*args, **kwargs)
            return
        with self.together("Making the repository on the hub"):  # which the first rank does
            super().init_hf_repo(*args, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        if not self.is_sharded:
            return dict(super()._build_accelerator_args(**kwargs))
        # With a TP size on the model transformers passes a ParallelismConfig: accelerate would
        # make meshes of its own, and refuses one on CPU ranks. `LayoutAccelerator` mirrors it.
        model, self.model = self.model, None
        try:
            arguments = dict(super()._build_accelerator_args(**kwargs))
        finally:
            self.model = model
        arguments.pop("parallelism_config", None)
        # It would compile the model as one: `compile_layers` does it.
        arguments.pop("dynamo_plugin", None)
        return arguments

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.is_sharded:
            super()._move_model_to_device(model, device)

    def _get_num_items_in_batch(
        self, batch_samples: list[Any], device: torch.device
    ) -> Tensor | int | None:
        if not self.is_sharded:
            return super()._get_num_items_in_batch(batch_samples, device)
        return self.count_items(batch_samples, device)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if not self.is_sharded:
            return super()._clip_grad_norm(model)
        return self.clip_gradients(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if not self.is_sharded:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return self.gradient_norm(model) if grad_norm is None else grad_norm

    def _track_num_input_tokens(self, inputs: Any) -> None:
        super()._track_num_input_tokens(self.real_part(inputs))

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        return self.shared_sampler(super()._get_train_sampler(train_dataset))

    def shared_sampler(self, sampler: Sampler[Any] | None) -> Sampler[Any] | None:
        """The sampler with one order on all ranks."""
        raise NotImplementedError

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.saved_step = self.state.global_step
        if not self.writes_shards:
            super()._save_checkpoint(model, trial)
            return
        if trial is None:
            self.store_flos()
        self.save_training_state(str(self._get_output_dir(trial=trial)))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if self.is_sharded:
            self.load_model_state(resume_from_checkpoint, resuming=True)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self.is_sharded:
            self.load_model_state(str(self.state.best_model_checkpoint), resuming=False)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            self.load_training_state(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self.is_sharded:
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None:
            self.load_random_state(checkpoint)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epochs, batches = super()._init_training_state(*args, **kwargs)
        # max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        checkpoint = kwargs.get("resume_from_checkpoint", args[3] if len(args) > 3 else None)
        if self.is_sharded and checkpoint is not None:
            return self.resumed_position(checkpoint)
        return epochs, batches

    def _run_epoch(self, **kwargs: Any) -> None:  # type: ignore[override, unused-ignore]
        if self.is_sharded:
            epoch, loader = kwargs["epoch"], kwargs["train_dataloader"]
            resumed = (
                kwargs["resume_from_checkpoint"] is not None and epoch == kwargs["epochs_trained"]
            )
            if self.state.global_step >= self.state.max_steps:
                # A finished run that is resumed: transformers would look at this after one more step.
                self.control.should_training_stop = True
                return
            skipped = kwargs["steps_trained_in_current_epoch"] if resumed else 0
            set_epoch(loader, epoch)
            self.at_epoch_begin(epoch, skipped, kwargs["steps_in_epoch"], generators(loader))
        super()._run_epoch(**kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.is_sharded:
            self.at_step_boundary()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.is_sharded and self.must_save:
            # With save_strategy="best" an evaluation decides, and has decided against it.
            model: Any = self.model
            self._save_checkpoint(model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        if self.is_sharded:
            self.agree_on_control(self.control)  # after callbacks of logging, evaluation and saving

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_sharded:
            return super()._finalize_training(*args, **kwargs)
        self.finish_saves()
        # What was logged is the mean over ranks; transformers adds what this rank has had since then.
        dist.all_reduce(self._tr_loss)
        self._tr_loss /= dist.get_world_size()
        limit = self.args.save_total_limit
        if not self.writes_shards or limit != 1:
            return super()._finalize_training(*args, **kwargs)
        # transformers would delete every directory whose name begins like a checkpoint's.
        self.args.save_total_limit = None
        try:
            output = super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        self.keep_best_only()
        return output

    @property
    def label_positions_are_shifted(self) -> bool:
        """Whether the model's loss predicts label `i + 1` at position `i`."""
        return bool(self._loss_shifts_labels)


@dataclass
class ShiftingSmoother(LabelSmoother):
    """A label smoother that knows whether labels are shifted.

    transformers asks the model's class by its name, which FSDP2 changes.
    """

    shifts: bool = False

    def __call__(
        self,
        model_output: Any,
        labels: Any,
        shift_labels: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The smoothed loss."""
        return super().__call__(
            model_output,
            labels,
            shift_labels=self.shifts,
            num_items_in_batch=num_items_in_batch,
        )


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool) -> None:
    """Copy each source into its target, of the same shape (torch 2.11 to 2.13)."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def checkpoint_selectively(model: Any) -> None:
    """Let `model` understand `"selective"` among the keyword arguments of its checkpointing.

    Both versions hand the function that checkpoints, with those arguments, to one private method.
    """
    own = model._set_gradient_checkpointing

    @functools.wraps(own)
    def enable(enable: bool = True, gradient_checkpointing_func: Any = None, **kwargs: Any) -> None:
        keywords = dict(getattr(gradient_checkpointing_func, "keywords", {}))
        if keywords.pop("selective", False):
            keywords |= {"use_reentrant": False, "context_fn": keep_communicated}
        if gradient_checkpointing_func is not None:
            function = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func)
            kwargs["gradient_checkpointing_func"] = functools.partial(function, **keywords)
        own(enable=enable, **kwargs)

    own.__self__._set_gradient_checkpointing = enable


def use_cpu_ranks(args: TrainingArguments) -> None:
    """Have `args` see the gloo ranks of this launch.

    Without `use_cpu=True` accelerate takes each CPU rank for a world of one, and so would
    transformers: every rank would read every batch and write every file.
    """
    args.use_cpu = True
    args.__dict__.pop("_setup_devices", None)
    _ = args.device


def use_one_device(args: TrainingArguments) -> None:
    """Keep transformers from wrapping the model in DataParallel on a machine with several GPUs."""
    if args.n_gpu > 1:
        args._n_gpu = 1


def save_beside_model(trainer: Trainer, folder: str) -> None:
    """Write what transformers writes beside a model: the tokenizer and the arguments."""
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    torch.save(trainer.args, Path(folder) / TRAINING_ARGS_NAME)


def save_settings(trainer: Trainer, folder: str) -> None:
    """Write what an export of the model needs: its configs, and what is beside a model."""
    config = copy.deepcopy(getattr(trainer.model, "config", None))
    if config is not None:
        # FSDP2 gives the model a class of its own, above the one that others know.
        kinds = [kind for kind in type(trainer.model).__mro__ if not issubclass(kind, FSDPModule)]
        config.architectures = [kinds[0].__name__]
        config.save_pretrained(folder)
    generation = getattr(trainer.model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    save_beside_model(trainer, folder)


def trainer_state(trainer: Trainer) -> TrainerState:
    """A copy of the state of the trainer, and of the callbacks that export theirs."""
    states: Any = trainer.state.stateful_callbacks
    stopping, trainer.control.should_training_stop = trainer.control.should_training_stop, False
    try:
        for call in [*trainer.callback_handler.callbacks, trainer.control]:
            if not isinstance(call, ExportableState):
                continue
            name = type(call).__name__
            if isinstance(states.get(name), list):
                states[name].append(call.state())
            else:
                states[name] = call.state()
    finally:
        trainer.control.should_training_stop = stopping
    state = copy.copy(trainer.state)
    state.log_history = list(state.log_history)  # of which no entry changes
    state.stateful_callbacks = copy.deepcopy(states)
    return state


def save_trainer_state(state: TrainerState, folder: str) -> None:
    """Write it."""
    state.save_to_json(str(Path(folder) / TRAINER_STATE_NAME))


def last_checkpoint(run: str) -> str | None:
    """The newest of transformers' own checkpoints in the directory of a run, which may not exist."""
    found: str | None = get_last_checkpoint(run) if Path(run).is_dir() else None
    return found


def push_checkpoint(trainer: Trainer, folder: str) -> None:
    """Push a checkpoint as transformers does."""
    trainer._push_from_checkpoint(folder)


def train_batch_size(trainer: Trainer) -> int:
    """Samples of a micro-batch in a data shard."""
    return int(trainer._train_batch_size)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell every sampler of a loader the epoch.

    transformers and accelerate look one or two levels deep, and a loader that skips batches has
    one more: a batch sampler in it that has epochs would draw the first one's order again.
    """
    for part in _parts(loader):
        if part is not loader and hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def generators(loader: Any) -> list[torch.Generator]:
    """What a loader and its samplers draw from, each once, in one order."""
    found = [
        getattr(part, name, None)
        for part in _parts(loader)
        for name in ("generator", "synchronized_generator")
    ]
    known = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return list(known.values())


def _parts(loader: Any) -> list[Any]:
    """A loader and the samplers in it."""
    parts: list[Any] = []
    todo = [loader]
    while todo:
        part = todo.pop(0)
        if part is not None and not any(part is each for each in parts):
            parts.append(part)
            todo += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
    return parts


def rank_in_worker_seed(loader: DataLoader[Any], shard: int) -> None:
    """Seed the loader's workers by data shard instead of by rank, as transformers does."""
    seed = loader.worker_init_fn
    if isinstance(seed, functools.partial) and "rank" in seed.keywords:
        loader.worker_init_fn = functools.partial(seed.func, **{**seed.keywords, "rank": shard})


def count_gathered_once(trainer: Trainer) -> None:
    """Let a trainer of TRL (seen in 1.16) not divide what it gathers by the TP size.

    It expects a token once per rank; `LayoutAccelerator` gathers each once.
    """
    if hasattr(trainer, "_tp_size"):
        trainer._tp_size = 1


def rebalance_for(sampler: BatchRebalanceSampler, shards: int, shard: int) -> BatchRebalanceSampler:
    """The sampler with data shards in the place of ranks."""
    return BatchRebalanceSampler(
        lengths=sampler.lengths,
        effective_batch_size=sampler.effective_batch_size // sampler.dp_size * shards,
        dp_size=shards,
        grad_accum=sampler.grad_accum,
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        rank=shard,
        drop_last=sampler.drop_last,
    )


def in_backward() -> bool:
    """Whether autograd runs backward now: what runs forward meanwhile is computed again.

    torch 2.11 to 2.13. Unknown, so False, while torch.compile traces.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another. torch 2.11 to 2.13."""
    return tensor._is_view()


def remember_data_loader(accelerator: Accelerator, loader: DataLoader[Any]) -> None:
    """Have accelerate free the loader with the others."""
    accelerator._dataloaders.append(loader)


def prepared(trainer: Trainer, inputs: Any) -> Any:
    """The inputs of a micro-batch as the trainer gives them to the model."""
    return trainer._prepare_inputs(inputs)


def new_low_bit_state(optimizer: Any, parameter: Tensor, name: str) -> Tensor | None:
    """A state of zeros as torchao's optimizers (0.18) make it; None for other optimizers."""
    if name == "step" or not hasattr(optimizer, "_new_buffer"):
        return None
    state: Tensor = optimizer._new_buffer(parameter, name == "exp_avg")  # signed, the others not
    return state


def scaler_settings(scaler: Any) -> dict[str, Any]:
    """The arguments that torch's gradient scaler was made with."""
    return {
        "init_scale": scaler._init_scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }


__all__ = [
    "BatchRebalanceSampler",
    "HookedTrainer",
    "LengthGroupedSampler",
    "ShiftingSmoother",
    "causal_lm_loss",
    "checkpoint_selectively",
    "count_gathered_once",
    "find_batch_size",
    "generators",
    "in_backward",
    "is_traceable_wrapper_subclass",
    "is_view",
    "last_checkpoint",
    "maybe_install_capturing_hooks",
    "new_low_bit_state",
    "prepared",
    "push_checkpoint",
    "rank_in_worker_seed",
    "rebalance_for",
    "remember_data_loader",
    "save_beside_model",
    "save_settings",
    "save_trainer_state",
    "scaler_settings",
    "set_epoch",
    "train_batch_size",
    "use_cpu_ranks",
    "use_one_device",
]
