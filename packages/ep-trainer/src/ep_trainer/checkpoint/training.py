"""What `EPTrainer` does with checkpoints: which state goes in, and how it comes back."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl

from ep_mesh import Layout, ParallelMesh
from ep_trainer import _compat
from ep_trainer._compat import HookedTrainer
from ep_trainer.checkpoint.checkpointer import Checkpointer, Contents
from ep_trainer.checkpoint.errors import CheckpointError
from ep_trainer.checkpoint.files import read_json, save_object, write_json
from ep_trainer.checkpoint.locking import sole_run
from ep_trainer.checkpoint.manifest import Manifest, read_manifest, rotate
from ep_trainer.checkpoint.options import CheckpointOptions
from ep_trainer.checkpoint.position import Position
from ep_trainer.checkpoint.preemption import StopSignals
from ep_trainer.checkpoint.randomness import random_state, set_random_state
from ep_trainer.checkpoint.state import (
    load_scheduler,
    merged_descriptions,
    model_tensors,
    optimizer_state,
    optimizer_targets,
    read_optimizer,
    scheduler_state,
    tensor_names,
    write_optimizer,
)
from ep_trainer.data import len_of
from ep_trainer.forks import forks_wait_for

logger = logging.getLogger(__name__)

_SCHEDULER, _POSITION, _ORDER, _EXTRA = "scheduler.pt", "position.json", "order.pt", "extra.json"
_SCALER = "scaler"
_ASKED = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)
_AFTER_AN_ERROR_S = 60.0


class _VoteInSubsteps(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """After the other callbacks of a micro-batch, which may end the epoch or the run."""

    def __init__(self, vote: Callable[[TrainerControl], None]) -> None:
        self.vote = vote

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch without an optimizer step is done."""
        self.vote(control)


class Checkpointed(Protocol):
    """An object of a run that is saved and loaded with it.

    Its state is a flat dict of tensors (DTensors: each rank its part; plain ones: the same on
    all ranks) and values that JSON can hold.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state."""


class CheckpointingTrainer(HookedTrainer):
    """The part of `EPTrainer` that saves and resumes."""

    mesh: ParallelMesh | None
    checkpoint_options: CheckpointOptions

    def _init_checkpoints(self, options: CheckpointOptions | None) -> None:
        self.checkpoint_options = options or CheckpointOptions()
        self.save_stalls: list[float] = []
        """Seconds that training waited for each checkpoint."""
        self._checkpointer: Checkpointer | None = None
        self._registered: dict[str, Checkpointed] = {}
        self._signals: StopSignals | None = None
        self._stopping = self._votes = False
        self._generators: list[torch.Generator] = []
        self._drawn_from: list[Tensor] = []
        self._resumed_generators: list[Tensor] | None = None
        self._epoch = self._samples_done = self._samples_in_run_epoch = 0

    @property
    def layout(self) -> Layout:
        """The sizes."""
        raise NotImplementedError

    @property
    def checkpointer(self) -> Checkpointer:
        """Writes and reads this run's checkpoints; all ranks make it at the same time."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer()
            forks_wait_for(self._checkpointer)
        return self._checkpointer

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Run the body on every rank; if it raises on one, raise on all."""
        return self.checkpointer.together(what)

    def register_for_checkpoint(self, name: str, thing: Checkpointed) -> None:
        """Save `thing` with every checkpoint and load it when resuming.

        Raises:
            ValueError: the name is taken, or can't be one.
        """
        taken = {_SCALER, *self._registered}
        if name in taken or "/" in name or not name:
            raise ValueError(
                f"register_for_checkpoint({name!r}): names are not empty, hold no slash and are "
                f"given once; taken are {sorted(taken)}."
            )
        self._registered[name] = thing

    @property
    def writes_shards(self) -> bool:
        """Whether checkpoints are sharded ones: not if only the model for plain use is wanted."""
        return self.is_sharded and (
            not self.args.save_only_model or bool(self.args.load_best_model_at_end)
        )

    # -- a run

    @contextmanager
    def checkpointed_run(self) -> Iterator[None]:
        """Note signals during a run, and let its last save end with it.

        Raises:
            CheckpointError: another run saves in the same directory.
        """
        options = self.checkpoint_options
        self._stopping = False
        self.saved_step = -1
        self._votes = self.checkpointer.any_says([self.callbacks_may_differ])[0]
        run = Path(str(self.args.output_dir))
        with contextlib.ExitStack() as stack:
            with self.checkpointer.together(f"Saving in {run}"):
                if self._saves and self.checkpointer.is_first:
                    stack.enter_context(sole_run(run))
            signals = StopSignals(options.stop_signals, self.checkpointer.group)
            signals.install()
            stack.callback(signals.restore)
            vote = _VoteInSubsteps(self.agree_on_control)
            self.add_callback(vote)
            stack.callback(self.remove_callback, vote)
            self._signals = signals
            try:
                yield
                signals.finish()
                self.checkpointer.wait()
            except BaseException:
                # Other ranks may be gone: give a write that is under way the time to end, no more.
                with contextlib.suppress(Exception):
                    self.checkpointer.wait(_AFTER_AN_ERROR_S)
                raise
            finally:
                self._signals = None

    def finish_saves(self) -> None:
        """Wait for the save in the background."""
        self.checkpointer.wait()

    def keep_best_only(self) -> None:
        """Delete what `save_total_limit=1` leaves beside the best checkpoint when a run ends."""
        if self.checkpointer.is_first and self.state.best_model_checkpoint is not None:
            run = Path(str(self.args.output_dir))
            self._rotate(run, self.state.global_step, keep_newest=False)

    def found_checkpoint(self, resume_from_checkpoint: Any) -> str | None:
        """The checkpoint to resume from; True is the newest complete one, "auto" that or none.

        Raises:
            CheckpointError: there is none, but it must be.
            ValueError: the ranks were given different ones.

        Costs one all-gather of objects.
        """
        given = resume_from_checkpoint or None
        named = given is not None and given not in (True, "auto")
        self.checkpointer.check_same(
            Path(str(given)).name if named else given,
            "the checkpoint to go on from",
            'Give every rank the same resume_from_checkpoint; True and "auto" find it for all of them.',
        )
        if given is None:
            return None
        if named:
            return str(given)
        newest = self.checkpointer.newest(Path(str(self.args.output_dir)), clean=self._saves)
        if newest is None and given == "auto":
            return None
        if newest is None:
            raise CheckpointError(
                f"resume_from_checkpoint=True, but {self.args.output_dir} holds no complete "
                'checkpoint of a sharded run. Give its path, or "auto" to begin anew where there is none.'
            )
        return str(newest)

    @property
    def _saves(self) -> bool:
        """Whether checkpoints are saved, not only when a signal stops the run."""
        return str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) != "no"

    def agree_on_control(self, control: TrainerControl) -> None:
        """Let what a callback asks for on one rank (by its own clock, say) be done by all.

        Costs one small all-reduce on the host; nothing where only transformers' callbacks and ours
        are there, which ask for the same on all ranks.
        """
        if self._votes:
            said = self.checkpointer.any_says([getattr(control, name) for name in _ASKED])
            for name, word in zip(_ASKED, said, strict=True):
                setattr(control, name, word)

    def at_step_boundary(self) -> None:
        """Save and stop here if a rank was asked to."""
        self.agree_on_control(self.control)
        if self._signals is None or self._stopping or not self._signals.agreed():
            return
        logger.warning("asked to stop by a signal: saving at step %d", self.state.global_step)
        self._stopping = True
        self.control.should_save = True
        self.control.should_training_stop = True

    @property
    def must_save(self) -> bool:
        """Whether the run stops here and this step was not saved."""
        return self._stopping and self.saved_step != self.state.global_step

    # -- saving

    def save_training_state(self, run: str) -> None:
        """Save a checkpoint of the current step in the directory `run`."""
        begin = time.perf_counter()
        folder = Path(run) / f"checkpoint-{self.state.global_step}"
        options = self.checkpoint_options
        only_model = bool(self.args.save_only_model)
        with_model = options.save_hf or only_model or bool(self.args.push_to_hub)
        self.checkpointer.wait()
        if with_model:
            with self.checkpointer.preparing(folder) as new:
                self.save_model(str(new), _internal_call=True)
        self._note_best(folder)
        self.checkpointer.save(
            folder,
            lambda: self._contents(only_model, settings=not with_model),
            self._manifest(),
            in_background=options.async_save and not self.args.push_to_hub,
            then=functools.partial(self._rotate, Path(run), self.state.global_step),
        )
        self.save_stalls.append(time.perf_counter() - begin)
        if self.args.push_to_hub:
            _compat.push_checkpoint(self, str(folder))

    def _contents(self, only_model: bool, *, settings: bool) -> Contents:
        model = model_tensors(self._whole_model)
        expected = {"model": tensor_names(self._whole_model, model)}
        first = self.checkpointer.is_first
        prepared = self._small_files(only_model, settings) if first else None
        if only_model:
            return Contents({"model": model}, prepared=prepared, expected=expected)
        names = _names_of(model)
        optimizer = optimizer_state(self._plain_optimizer, names, self.lr_scheduler)
        return Contents(
            {"model": model, "optimizer": optimizer.tensors, "extra": self._extra_tensors()},
            told=optimizer.described(),
            prepared=prepared,
            gathered=_write_descriptions,
            own_file=(self._random_file(), random_state()),
            expected=expected,
        )

    @property
    def _whole_model(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def _manifest(self) -> Manifest:
        return Manifest(
            step=self.state.global_step,
            layout=asdict(self.layout),
            world_size=self.layout.world_size,
            sections=(),
            files={},
            versions=_versions(),
        )

    def _note_best(self, folder: Path) -> None:
        best = self.state.best_global_step
        if not best:
            return
        path = folder.with_name(f"checkpoint-{best}")
        if path == folder or path.exists():
            self.state.best_model_checkpoint = str(path)

    def _small_files(self, only_model: bool, settings: bool) -> Callable[[Path], None]:
        """What writes the files of this moment's state, later."""
        state = _compat.trainer_state(self)
        position, order = self._position().to_dict(), self._order()
        scheduler = copy.deepcopy(scheduler_state(self.lr_scheduler))
        extra = copy.deepcopy(self._extra_values())

        def write(folder: Path) -> None:
            if settings:  # which a run doesn't change
                _compat.save_settings(self, str(folder))
            _compat.save_trainer_state(state, str(folder))
            write_json(folder / _POSITION, position)
            save_object(folder / _ORDER, order)
            if not only_model:
                save_object(folder / _SCHEDULER, scheduler)
                write_json(folder / _EXTRA, extra)

        return write

    def _position(self) -> Position:
        epoch, samples = self._epoch, self._samples_done
        if self._epoch_is_done:
            epoch, samples = epoch + 1, 0
        return replace(self._start, epoch=epoch, samples=samples)

    @property
    def _epoch_is_done(self) -> bool:
        return self._samples_done >= self._samples_in_run_epoch

    def _order(self) -> list[Tensor]:
        """The states that the generators of the data's order had when the epoch began."""
        if self._epoch_is_done:
            return [generator.get_state() for generator in self._generators]
        return self._drawn_from

    @property
    def _start(self) -> Position:
        """The begin of this run's data."""
        return Position(0, 0, len_of(self.train_dataset) or 0, self.accelerator.seed)

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)  # type: ignore[no-any-return]

    def _random_file(self) -> str:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return f"random/rank-{rank:05d}.pt"

    @property
    def _extra(self) -> dict[str, Checkpointed]:
        """What is registered, and float16's scaler."""
        scaler = self.accelerator.scaler
        return self._registered | ({} if scaler is None else {_SCALER: scaler})

    def _extra_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": value
            for name, thing in self._extra.items()
            for key, value in thing.state_dict().items()
            if isinstance(value, Tensor)
        }

    def _extra_values(self) -> dict[str, Any]:
        return {
            name: {k: v for k, v in thing.state_dict().items() if not isinstance(v, Tensor)}
            for name, thing in self._extra.items()
        }

    def _rotate(self, run: Path, step: int, *, keep_newest: bool = True) -> None:
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        try:
            for path in rotate(run, limit, best, until=step, keep_newest=keep_newest):
                logger.info("deleted %s (save_total_limit)", path)
        except Exception as error:  # noqa: BLE001 (the checkpoint is there; that an old one stays is no failure)
            logger.warning("an old checkpoint could not be deleted: %s", error)

    # -- resuming

    def load_model_state(self, checkpoint: str, *, resuming: bool) -> None:
        """Check a checkpoint and load its model; if training resumes, check that it can too."""
        folder = Path(checkpoint)
        self.checkpointer.wait()
        manifest = self.checkpointer.check(folder, values=self.checkpoint_options.verify)
        targets = model_tensors(self._whole_model)
        # Stages hold different names.
        known = self.checkpointer.everywhere(targets) if self.layout.pp > 1 else set(targets)
        with self.checkpointer.together(f"Loading {folder}"):
            self._check_nothing_left(folder, known)
            if resuming:
                self._check_resumable(folder, manifest, targets)
        self.checkpointer.load(folder, {"model": targets})

    def _check_resumable(
        self, folder: Path, manifest: Manifest, targets: Mapping[str, Tensor]
    ) -> None:
        if "optimizer" not in manifest.sections:
            raise CheckpointError(
                f"{folder} holds the model only (save_only_model=True), so training can't go on "
                "from it; load it with from_pretrained(..., distributed_config=...)."
            )
        self.resumed_position(checkpoint=str(folder))
        known = {name for group in read_optimizer(folder)["groups"] for name in group["names"]}
        trained = {name for name, tensor in targets.items() if tensor.requires_grad}
        if self.optimizer is None and trained - known:
            raise CheckpointError(
                f"{min(trained - known)} is trained here, but the optimizer in {folder} has no such "
                "parameter: freeze the same ones as before."
            )

    def _check_nothing_left(self, folder: Path, known: set[str]) -> None:
        """Refuse what the model, all stages of it, has no place for."""
        left = sorted(set(self.checkpointer.stored(folder, "model")) - known)
        if left:
            raise CheckpointError(
                f"{folder} holds {left[0]}"
                + (f" and {len(left) - 1} more tensors" if len(left) > 1 else "")
                + f" that {_model_name(self.model)} has not: it is of another model"
                + (", with other adapters." if any(".lora." in name for name in left) else ".")
            )

    def load_training_state(self, checkpoint: str) -> None:
        """Load optimizer, scheduler and what was registered; the model is loaded already."""
        folder = Path(checkpoint)
        with self.checkpointer.together(f"Loading {folder}"):
            stored = self.checkpointer.stored(folder, "optimizer")
            targets, apply = optimizer_targets(
                self._plain_optimizer,
                _names_of(model_tensors(self._whole_model)),
                read_optimizer(folder),
                stored,
                self.lr_scheduler,
            )
            extra, values = self._extra_targets(folder)
            scheduler = torch.load(folder / _SCHEDULER, weights_only=True)
        self.checkpointer.load(folder, {"optimizer": targets, "extra": extra})
        load_scheduler(self.lr_scheduler, scheduler)
        apply()
        if not self.args.ignore_data_skip:
            self._resumed_generators = torch.load(folder / _ORDER, weights_only=True)
        for name, thing in self._extra.items():
            if name in values:
                own = {
                    key.partition("/")[2]: value
                    for key, value in extra.items()
                    if key.startswith(f"{name}/")
                }
                thing.load_state_dict({**values[name], **own})

    def _extra_targets(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        values: dict[str, Any] = read_json(folder / _EXTRA)
        for name in sorted(set(values) ^ set(self._extra)):
            where = "the run" if name in values else str(folder)
            logger.warning("%r is not in %s: it is left as it is", name, where)
        tensors = {
            key: torch.empty_like(tensor, requires_grad=False)
            for key, tensor in self._extra_tensors().items()
            if key.partition("/")[0] in values
        }
        return tensors, values

    def load_random_state(self, checkpoint: str) -> None:
        """Go on with the random numbers of the run, where the layout is the same."""
        folder = Path(checkpoint)
        manifest = read_manifest(folder)
        if dict(manifest.layout) == asdict(self.layout):
            set_random_state(torch.load(folder / self._random_file(), weights_only=True))

    def resumed_position(self, checkpoint: str) -> tuple[int, int]:
        """Epochs, and micro-batches of the current one, that are done."""
        position = Position.from_dict(read_json(Path(checkpoint) / _POSITION))
        if self.args.ignore_data_skip:
            return position.epoch, 0
        epoch, steps = position.steps(
            self._micro_batch, self.args.gradient_accumulation_steps, self._start
        )
        return epoch, steps

    @property
    def _micro_batch(self) -> int:
        """Samples of a micro-batch over all data shards."""
        return int(_compat.train_batch_size(self)) * self.layout.data_parallel_size

    def at_epoch_begin(
        self, epoch: int, skipped: int, micro_batches: int, generators: Sequence[torch.Generator]
    ) -> None:
        """Note where an epoch begins, after how many of its micro-batches, and what orders it.

        Raises:
            ValueError: the ranks have different numbers of micro-batches. Costs one all-gather of objects.
        """
        self.check_same_steps(micro_batches, "train_dataset")
        self._epoch = epoch
        self._samples_done = skipped * self._micro_batch
        self._samples_in_run_epoch = micro_batches * self._micro_batch
        self._generators = list(generators)
        resumed, self._resumed_generators = self._resumed_generators, None
        if resumed is not None and len(resumed) == len(self._generators):
            for generator, state in zip(self._generators, resumed, strict=True):
                generator.set_state(state)
        self._drawn_from = [generator.get_state() for generator in self._generators]

    def check_same_steps(self, batches: int | None, dataset: str) -> None:
        """Check that every rank has as many batches, since they would wait for each other for ever.

        Raises:
            ValueError: they have not.
        """
        self.checkpointer.check_same(
            batches,
            f"the number of batches of {dataset}",
            "Give every rank the whole dataset: the trainer splits it over the data shards itself.",
        )

    def count_samples(self, micro_batches: int) -> None:
        """Note that a step's batches were taken."""
        self._samples_done += micro_batches * self._micro_batch


def _model_name(model: Any) -> str:
    """Without what FSDP2 puts before it."""
    return type(model).__name__.removeprefix("FSDP")


@functools.cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "ep-trainer")}


def _write_descriptions(folder: Path, told: list[Any]) -> None:
    write_optimizer(folder, merged_descriptions(told))


def _names_of(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(tensor): name for name, tensor in tensors.items()}


__all__ = ["Checkpointed", "CheckpointingTrainer"]
