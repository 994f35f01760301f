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

import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ep_plans.safetensors_file import flush
from ep_trainer.checkpoint.background import Background
from ep_trainer.checkpoint.errors import CheckpointError, collect, exchange, settle
from ep_trainer.checkpoint.files import read_json, save_object, write_json
from ep_trainer.checkpoint.manifest import (
    Manifest,
    check_checkpoint,
    checkpoints,
    put_in_place,
    saving_folder,
    section,
    small_files,
    tidy,
    write_manifest,
)
from ep_trainer.checkpoint.planner import BoxLoadPlanner, BoxSavePlanner, form_of
from ep_trainer.checkpoint.storage import SafetensorsReader, SafetensorsWriter

OPTIMIZER = "optimizer.json"


@dataclass
class Contents:
    """What this rank puts into a checkpoint.

    Attributes:
        sections: tensors by section and name; those that this rank holds a part of.
        told: what the first rank should know too (`gathered` gets it), of any kind.
        prepared: on the first rank: writes small files into the new directory, before any other.
        gathered: on the first rank, given what each rank told: writes small files.
        own_file: name and content of this rank's own small file, written by `torch.save`.
        expected: names that some rank must hold, by section: where ranks hold different ones.

    What is told and written is used later, while training goes on: none of it may change.
    """

    sections: Mapping[str, Mapping[str, Tensor]]
    told: Any = None
    prepared: Callable[[Path], None] | None = None
    gathered: Callable[[Path, list[Any]], None] | None = None
    own_file: tuple[str, Any] | None = None
    expected: Mapping[str, Collection[str]] = field(default_factory=dict)


@dataclass
class _Section:
    planner: BoxSavePlanner
    plan: SavePlan
    metadata: Metadata


_Forms = Mapping[str, Mapping[str, tuple[Any, ...]]]
"""By section and name."""


@dataclass
class _Job:
    folder: Path
    sections: Mapping[str, _Section]
    manifest: Manifest
    contents: Contents
    then: Callable[[], None] | None
    make_folder: bool
    error: BaseException | None = None
    done: threading.Event | None = None


class Checkpointer:
    """Writes checkpoints of the ranks' shards and reads them, in any layout.

    Every rank makes one and calls its methods in the same order. Paths are on a file system that
    all ranks see. Making one makes two process groups (gloo).
    """

    def __init__(self) -> None:
        self._talk, self._commits = _groups()
        self._background = Background()
        self._job: _Job | None = None
        self._prepared: Path | None = None
        self._known: tuple[_Forms, Mapping[str, _Section]] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is there once."""
        return not dist.is_initialized() or dist.get_rank() == 0

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
                _make_folder(new)
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
        job = _Job(folder, {}, manifest, contents, then, make_folder=self._prepared != folder)
        self._prepared = None
        if known and in_background:
            self._renewed(job)
            self._stage(job)
        if not answer.all_say_so():
            self._known = None  # its memory goes before that of another
            job.sections, job.error = {}, None
            sections = self._planned(folder, contents, error)
            self._known = forms, sections
        if not job.sections:
            self._renewed(job)
            if in_background:
                self._stage(job)
        if not in_background:
            for each in job.sections.values():
                each.planner.free()
            self._run(job)
            if job.error is not None:
                raise job.error
            return
        self._job = job
        job.done = self._background.run(lambda: self._run(job))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the save in the background; every rank must call.

        Raises:
            CheckpointError: it failed, on this rank or another.
        """
        job, self._job = self._job, None
        if job is None or job.done is None:
            return
        if not job.done.wait(timeout):
            self._known = None  # its memory is still being written from
            self._background = Background()  # and its thread is taken
        if job.error is not None:
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

    def _renewed(self, job: _Job) -> None:
        """Give a job the plan that is known, with its tensors."""
        assert self._known is not None
        job.sections = self._known[1]
        for name, each in job.sections.items():
            each.planner.renew(job.contents.sections[name])

    @staticmethod
    def _stage(job: _Job) -> None:
        """Copy what this rank writes; an error is raised by all ranks after the job has run."""
        try:
            for each in job.sections.values():
                each.planner.stage(each.plan)
        except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
            job.error = caught

    def _planned(
        self, folder: Path, contents: Contents, error: Exception | None
    ) -> dict[str, _Section]:
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
        rank = dist.get_rank() if dist.is_initialized() else 0
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
            sections[name] = _Section(planner, kept[rank], metadata)
        return sections

    def _run(self, job: _Job) -> None:
        """Write and commit. Whatever happens, every rank makes the same collectives."""
        what = f"Writing {job.folder}"
        new = saving_folder(job.folder)
        error, job.error = job.error, None
        try:
            try:
                if self.is_first and error is None:
                    error = _caught(self._prepare, job)
                exchange(None, error, what, self._commits)
                results: dict[str, Any] = {}
                error = _caught(self._write, job, results)
                firsts = _caught(self._commit, job, results, error)
                settle(error, firsts, self._commits)
            finally:
                if self.is_first and new.exists():
                    shutil.rmtree(new, ignore_errors=True)
            if self.is_first and job.then is not None:
                job.then()
        except BaseException as caught:  # noqa: BLE001 (raised by the next call)
            job.error = caught
        finally:
            for each in job.sections.values():
                each.planner.renew({})  # which holds on to no tensor until the next save

    def _prepare(self, job: _Job) -> None:
        new = saving_folder(job.folder)
        if job.make_folder:
            _make_folder(new)
        if job.contents.prepared is not None:
            job.contents.prepared(new)

    def _write(self, job: _Job, results: dict[str, Any]) -> None:
        folder = saving_folder(job.folder)
        rank = dist.get_rank() if dist.is_initialized() else 0
        for name, each in job.sections.items():
            path = section(folder, name)
            path.mkdir(parents=True, exist_ok=True)
            writer = SafetensorsWriter(path, rank)
            results[name] = writer.write_data(each.plan, each.planner).value()
            flush(path)
        if job.contents.own_file is not None:
            name, content = job.contents.own_file
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            save_object(path, content)
            flush(path)

    def _commit(self, job: _Job, results: Any, error: BaseException | None) -> None:
        folder = saving_folder(job.folder)
        own = None if job.contents.own_file is None else job.contents.own_file[0]
        mine = results, job.contents.told, own
        said = collect(mine, error, f"Writing {job.folder}", self._commits)
        if not self.is_first:
            return
        for rank, (_, _, file) in enumerate(said):
            if file is not None and not (folder / file).is_file():
                raise CheckpointError(_not_seen(rank, folder / file))
        for name, each in job.sections.items():
            writer = SafetensorsWriter(section(folder, name))
            writer.finish(each.metadata, [results[name] for results, _, _ in said])
            for rank, (written, _, _) in enumerate(said):
                for file in {one.storage_data.file for one in written[name]}:
                    if not (writer.path / file).is_file():
                        raise CheckpointError(_not_seen(rank, writer.path / file))
        if job.contents.gathered is not None:
            job.contents.gathered(folder, [told for _, told, _ in said])
        files = small_files(folder)
        write_manifest(folder, _with_files(job.manifest, job.sections, files))
        put_in_place(job.folder)

    # -- loading

    def check(self, folder: Path, *, values: bool) -> Manifest:
        """Check a checkpoint, each rank a part of its tensors; the same verdict on all ranks.

        Raises:
            CheckpointError: names the file and the key; nothing has been changed.
        """
        rank, size = 0, 1
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        manifest: Manifest | None = None
        with self.together(f"Checking {folder}"):
            manifest = check_checkpoint(folder, values=values, part=rank, parts=size)
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
        """The newest complete checkpoint of a run, as the first rank sees it.

        `clean`: take away what a killed run left; no other run may save there meanwhile.
        """
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


def read_optimizer(folder: Path) -> Mapping[str, Any]:
    """The description of the optimizer in a checkpoint."""
    found: Mapping[str, Any] = read_json(folder / OPTIMIZER)
    return found


def write_optimizer(folder: Path, described: Mapping[str, Any]) -> None:
    """Write it."""
    write_json(folder / OPTIMIZER, described)


def _with_files(
    manifest: Manifest, sections: Mapping[str, Any], files: Mapping[str, tuple[int, int]]
) -> Manifest:
    return Manifest(
        step=manifest.step,
        layout=manifest.layout,
        world_size=manifest.world_size,
        sections=tuple(sections),
        files=files,
        versions=manifest.versions,
    )


def _not_seen(rank: int, path: Path) -> str:
    return (
        f"rank {rank} has written {path.name}, but rank 0 does not see {path}: all ranks must see one "
        "file system, and the same output_dir (an absolute path, if their working directories differ)."
    )


def _make_folder(new: Path) -> None:
    """An empty directory; what killed runs left beside it goes."""
    new.parent.mkdir(parents=True, exist_ok=True)
    tidy(new.parent)
    new.mkdir()


def _caught(call: Callable[..., None], *args: Any) -> Exception | None:
    """What a call raises."""
    try:
        call(*args)
    except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
        return caught
    return None


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


# Per default group, so that further trainers of a program make none.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup]]
_known = weakref.WeakKeyDictionary()


def _groups() -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return None, None
    if world not in _known:
        _known[world] = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    return _known[world]


__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Contents",
    "read_optimizer",
    "write_optimizer",
]
