"""One save of a checkpoint: staged, written by all ranks, committed by the first."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ep_mesh.world import own_rank
from ep_plans.safetensors_file import flush
from ep_trainer.checkpoint.errors import CheckpointError, collect, exchange, settle
from ep_trainer.checkpoint.files import save_object
from ep_trainer.checkpoint.manifest import (
    Manifest,
    put_in_place,
    saving_folder,
    section,
    small_files,
    tidy,
    write_manifest,
)
from ep_trainer.checkpoint.planner import BoxSavePlanner
from ep_trainer.checkpoint.storage import SafetensorsWriter


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Section:
    """What this rank writes of a section, and what there is of it.

    Attributes:
        planner: has the tensors.
        plan: this rank's.
        metadata: of the tensors of all ranks.
    """

    planner: BoxSavePlanner
    plan: SavePlan
    metadata: Metadata


@dataclass
class Save:
    """A save on its way, on this rank.

    Attributes:
        folder: where the checkpoint will be.
        manifest: what it is, without files and sections.
        contents: what this rank puts in.
        then: run on the first rank when the checkpoint is in place; must not raise.
        make_folder: the first rank makes the directory that is written into.
        sections: by name; empty until they are planned.
        error: what ended it.
        done: set when it has run; None if that isn't in the background.
        is_given_up: nobody asks for the error any more.
    """

    folder: Path
    manifest: Manifest
    contents: Contents
    then: Callable[[], None] | None
    make_folder: bool
    sections: Mapping[str, Section] = field(default_factory=dict)
    error: BaseException | None = None
    done: threading.Event | None = None
    is_given_up: bool = False

    def take(self, sections: Mapping[str, Section]) -> None:
        """Go on with what is planned, for the tensors of `contents`."""
        self.sections = sections
        for name, each in sections.items():
            each.planner.renew(self.contents.sections[name])

    def stage(self) -> None:
        """Copy what this rank writes; an error is raised by all ranks after the save has run."""
        try:
            for each in self.sections.values():
                each.planner.stage(each.plan)
        except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
            self.error = caught

    def let_go(self) -> None:
        """Hold on to no tensor that is staged: the run may want its memory."""
        self.contents = replace(self.contents, sections={})

    def run(self, group: dist.ProcessGroup | None) -> None:
        """Write and commit; `error` tells what went wrong on any rank.

        Whatever happens, every rank makes the same collectives: an all-gather, a gather and a broadcast
        of objects, over `group`.
        """
        what = f"Writing {self.folder}"
        new = saving_folder(self.folder)
        error, self.error = self.error, None
        is_first = own_rank() == 0
        try:
            try:
                if is_first and error is None:
                    error = _caught(self._prepare, new)
                exchange(None, error, what, group)
                results: dict[str, Any] = {}
                error = _caught(self._write, new, results)
                firsts = _caught(self._commit, new, results, error, group)
                settle(error, firsts, group)
            finally:
                if is_first and new.exists():
                    shutil.rmtree(new, ignore_errors=True)
            if is_first and self.then is not None:
                self.then()
        except BaseException as caught:  # noqa: BLE001 (raised by the next call)
            self.error = caught
        finally:
            self.let_go()
            for each in self.sections.values():
                each.planner.renew({})

    def _prepare(self, new: Path) -> None:
        if self.make_folder:
            make_folder(new)
        if self.contents.prepared is not None:
            self.contents.prepared(new)

    def _write(self, new: Path, results: dict[str, Any]) -> None:
        for name, each in self.sections.items():
            path = section(new, name)
            path.mkdir(parents=True, exist_ok=True)
            writer = SafetensorsWriter(path, own_rank())
            results[name] = writer.write_data(each.plan, each.planner).value()
            flush(path)
        if self.contents.own_file is not None:
            name, content = self.contents.own_file
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            save_object(path, content)
            flush(path)

    def _commit(
        self, new: Path, results: Any, error: BaseException | None, group: dist.ProcessGroup | None
    ) -> None:
        own = None if self.contents.own_file is None else self.contents.own_file[0]
        said = collect((results, self.contents.told, own), error, f"Writing {self.folder}", group)
        if own_rank() != 0:
            return
        for rank, (_, _, file) in enumerate(said):
            if file is not None and not (new / file).is_file():
                raise CheckpointError(_not_seen(rank, new / file))
        for name, each in self.sections.items():
            writer = SafetensorsWriter(section(new, name))
            writer.finish(each.metadata, [results[name] for results, _, _ in said])
            for rank, (written, _, _) in enumerate(said):
                for file in {one.storage_data.file for one in written[name]}:
                    if not (writer.path / file).is_file():
                        raise CheckpointError(_not_seen(rank, writer.path / file))
        if self.contents.gathered is not None:
            self.contents.gathered(new, [told for _, told, _ in said])
        files = small_files(new)
        write_manifest(new, replace(self.manifest, sections=tuple(self.sections), files=files))
        put_in_place(self.folder)


def make_folder(new: Path) -> None:
    """An empty directory; what killed runs left beside it goes."""
    new.parent.mkdir(parents=True, exist_ok=True)
    tidy(new.parent)
    new.mkdir()


def _not_seen(rank: int, path: Path) -> str:
    return (
        f"rank {rank} has written {path.name}, but rank 0 does not see {path}: all ranks must see one "
        "file system, and the same output_dir (an absolute path, if their working directories differ)."
    )


def _caught(call: Callable[..., None], *args: Any) -> Exception | None:
    """What a call raises."""
    try:
        call(*args)
    except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
        return caught
    return None
