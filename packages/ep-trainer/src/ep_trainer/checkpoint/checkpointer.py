"""Saving and loading sharded state: who communicates when.

[Note: threads and collectives]
A save has three parts. Planning, in the main thread: every rank tells what it holds (one
all-gather of objects, on a gloo group for such talk), and all compute the same plan. The plan is
kept; while no rank's tensors have other names or forms, all that is asked of the ranks is whether
so (one all-reduce of a number, on its way while the state is copied). Writing, in a thread if it is
asynchronous: the first rank makes the directory and its small files, then every rank its own.
Committing, in the same thread: every rank tells the first one what it has written; that one writes
the indices and the manifest, renames the directory, and tells how that went. The thread's
collectives are on a second gloo group that nothing else uses, so they can't be mixed up with
training's. What failed is raised on all ranks by the next `save` or `wait`, which are called by
all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan

from ep_mesh.world import own_rank, world_size
from ep_trainer.checkpoint.background import Background
from ep_trainer.checkpoint.errors import CheckpointError, exchange
from ep_trainer.checkpoint.manifest import (
    Manifest,
    check_checkpoint,
    checkpoints,
    saving_folder,
    section,
    tidy,
)
from ep_trainer.checkpoint.planner import BoxLoadPlanner, BoxSavePlanner, form_of
from ep_trainer.checkpoint.saving import Contents, Save, Section, make_folder
from ep_trainer.checkpoint.storage import SafetensorsReader

_Forms = Mapping[str, Mapping[str, tuple[Any, ...]]]
"""By section and name."""


class Checkpointer:
    """Writes checkpoints of the ranks' shards and reads them, in any layout.

    Every rank makes one and calls its methods in the same order. Paths are on a file system that
    all ranks see. Making one makes two process groups (gloo).
    """

    def __init__(self) -> None:
        self._talk, self._commits = _groups()
        self._background = Background()
        self._job: Save | None = None
        self._prepared: Path | None = None
        self._known: tuple[_Forms, Mapping[str, Section]] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is there once."""
        return own_rank() == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The gloo group for small talk in the main thread; None without processes."""
        return self._talk

    # -- saving

    @contextmanager
    def preparing(self, folder: Path) -> Iterator[Path]:
        """An empty directory that `save` will make `folder`, to be filled by all ranks beforehand.

        Not needed where `Contents.prepared` does.

        Raises:
            CheckpointError: on the other ranks, if it fails on one.
        """
        self.wait()
        new = saving_folder(folder)
        with self.together(f"Preparing {folder}"):
            if self.is_first:
                make_folder(new)
        with self.together(f"Writing into {new}"):
            yield new
        self._prepared = folder

    def save(
        self,
        folder: Path,
        collected: Callable[[], Contents],
        manifest: Manifest,
        *,
        in_background: bool,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint, after the one before is written.

        Args:
            folder: where it will be when it is complete.
            collected: gives this rank's part; called once, here.
            manifest: what it is; its files are found out.
            in_background: copy what this rank writes to host memory, which is kept for the next
                time, and give back at once.
            then: run on the first rank when the checkpoint is in place; must not raise.

        Raises:
            CheckpointError: collecting or planning failed, or the save before, here or on another
                rank; with `in_background=False` writing too.

        Costs one all-reduce of a number; the first time, and when names or forms of tensors have
        changed on a rank, an all-gather of what each holds too.
        """
        self.wait()
        error: Exception | None = None
        contents, forms = Contents({}), {}
        try:
            with torch.no_grad():  # a DTensor then gives its local part without a node of autograd
                contents = collected()
                forms = {
                    name: {key: form_of(tensor) for key, tensor in tensors.items()}
                    for name, tensors in contents.sections.items()
                }
        except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
            error = caught
        known = self._known is not None and self._known[0] == forms and error is None
        answer = _Agreement(known, self._talk)
        job = Save(folder, manifest, contents, then, make_folder=self._prepared != folder)
        self._prepared = None
        if known and in_background:
            assert self._known is not None
            job.take(self._known[1])
            job.stage()
        if not answer.all_say_so():
            self._known = None  # its memory goes before that of another
            job.sections, job.error = {}, None
            self._known = forms, self._planned(folder, contents, error)
        assert self._known is not None
        if not job.sections:
            job.take(self._known[1])
            if in_background:
                job.stage()
        if not in_background:
            for each in job.sections.values():
                each.planner.free()
            job.run(self._commits)
            if job.error is not None:
                raise job.error
            return
        job.let_go()
        self._job = job
        job.done = self._background.run(lambda: job.run(self._commits))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the save in the background; every rank must call.

        Args:
            timeout: seconds, after which its error is given up. It may still run: the next call waits on,
                since a save beside it would mix their collectives.

        Raises:
            CheckpointError: it failed, on this rank or another.
        """
        job = self._job
        if job is None or job.done is None:
            return
        if not job.done.wait(timeout):
            job.is_given_up = True
            return
        self._job = None
        if job.error is not None and not job.is_given_up:
            raise job.error

    def join(self, timeout: float) -> None:
        """Let the save in the background end, if it does so in time; from any thread."""
        job = self._job
        if job is not None and job.done is not None:
            job.done.wait(timeout)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the body on every rank; if it raises on one, raise on all."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
            error = caught
        exchange(None, error, what, self._talk)

    def _planned(
        self, folder: Path, contents: Contents, error: Exception | None
    ) -> dict[str, Section]:
        """What this rank writes of each section, by a plan that all make of what each holds."""
        planners: dict[str, BoxSavePlanner] = {}
        plans: dict[str, SavePlan] = {}
        try:
            for name, tensors in contents.sections.items():
                planners[name] = BoxSavePlanner()
                planners[name].set_up_planner(tensors)
                plans[name] = planners[name].create_local_plan()
        except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
            error = error or caught
        said = exchange(plans, error, f"Planning {folder}", self._talk)
        sections = {}
        for name, planner in planners.items():
            # The same on all ranks, so a problem is raised on all.
            kept, metadata = planner.create_global_plan([each[name] for each in said])
            missing = set(contents.expected.get(name, ())) - set(metadata.state_dict_metadata)
            if missing:
                raise CheckpointError(
                    f"{min(missing)}"
                    + (f" and {len(missing) - 1} more tensors" if len(missing) > 1 else "")
                    + " of the model are on no rank, so the checkpoint would not be whole."
                )
            sections[name] = Section(planner, kept[own_rank()], metadata)
        return sections

    # -- loading

    def check(self, folder: Path, *, values: bool) -> Manifest:
        """Check a checkpoint, each rank a part of its tensors; the same verdict on all ranks.

        Raises:
            CheckpointError: names the file and the key; nothing has been changed.
        """
        manifest: Manifest | None = None
        with self.together(f"Checking {folder}"):
            manifest = check_checkpoint(folder, values=values, part=own_rank(), parts=world_size())
        assert manifest is not None
        said = exchange((str(folder), manifest), None, "", self._talk)
        for other, (place, theirs) in enumerate(said):
            if theirs != said[0][1]:
                raise CheckpointError(
                    f"the ranks see different checkpoints: rank 0 that of step {said[0][1].step} in "
                    f"{said[0][0]}, rank {other} that of step {theirs.step} in {place}. Give every rank "
                    "the same one, on a file system that all see."
                )
        return manifest

    def check_same(self, value: Any, what: str, instead: str) -> None:
        """Check that every rank says the same.

        Raises:
            ValueError: they don't; on every rank, with two ranks' values.

        Costs one all-gather of objects.
        """
        said = exchange(value, None, "", self._talk)
        for other, theirs in enumerate(said):
            if theirs != said[0]:
                raise ValueError(
                    f"the ranks differ in {what}: on rank 0 {said[0]}, on rank {other} {theirs}. {instead}"
                )

    def any_says(self, words: Sequence[bool]) -> list[bool]:
        """For each of some words, whether any rank says it. One small all-reduce on the host."""
        said = torch.tensor([int(word) for word in words])
        if dist.is_initialized():
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self._talk)
        return [bool(word) for word in said]

    def newest(self, run: Path, *, clean: bool = True) -> Path | None:
        """The newest complete checkpoint of a run, as the first rank sees it, after a save on its way.

        `clean`: take away what a killed run left; no other run may save there meanwhile.
        """
        self.wait()
        found: Path | None = None
        with self.together(f"Looking for checkpoints in {run}"):
            if self.is_first:
                if clean:
                    tidy(run)
                found = next((path for _, path in checkpoints(run)), None)
        return exchange(found, None, "", self._talk)[0]  # type: ignore[no-any-return]

    def everywhere(self, names: Collection[str]) -> set[str]:
        """The names of all ranks together. One all-gather of objects."""
        return set().union(*exchange(sorted(names), None, "", self._talk))

    def stored(self, folder: Path, name: str) -> Mapping[str, Any]:
        """DCP's metadata of the tensors of a section, by name."""
        return SafetensorsReader(section(folder, name)).read_metadata().state_dict_metadata

    def load(self, folder: Path, targets: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Read this rank's parts into the tensors of each section.

        Raises:
            CheckpointError: they don't fit, on this rank or another; nothing has been changed.
        """
        reads = []
        with self.together(f"Loading {folder}"):
            for name, tensors in targets.items():
                path = section(folder, name)
                reader, planner = SafetensorsReader(path), BoxLoadPlanner(str(path))
                planner.set_up_planner(tensors, reader.read_metadata())
                reads.append((reader, planner, planner.create_local_plan()))
        with self.together(f"Reading {folder}"), torch.no_grad():
            for reader, planner, plan in reads:
                reader.read_data(plan, planner)


class _Agreement:
    """Whether all ranks say so: asked when it is made, heard later."""

    def __init__(self, word: bool, group: dist.ProcessGroup | None) -> None:
        self._word = torch.tensor([int(word)])
        self._work = None
        if dist.is_initialized():
            self._work = dist.all_reduce(self._word, dist.ReduceOp.MIN, group=group, async_op=True)

    def all_say_so(self) -> bool:
        if self._work is not None:
            self._work.wait()
        return bool(self._word.item())


_Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]
# Per default group, so that further trainers of a program make none.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, _Groups] = weakref.WeakKeyDictionary()


def _groups() -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return None, None
    if world not in _made:
        _made[world] = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    return _made[world]


__all__ = ["CheckpointError", "Checkpointer", "Contents"]
