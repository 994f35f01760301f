"""The manifest of a checkpoint: written last, so a directory without one is no checkpoint."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ep_plans.safetensors_file import flush
from ep_trainer.checkpoint.errors import CheckpointError
from ep_trainer.checkpoint.files import crc32_of_file, read_json, write_json
from ep_trainer.checkpoint.storage import INDEX, SafetensorsReader

MANIFEST = "manifest.json"
SECTIONS = "sharded"
FORMAT, VERSION = "ep-trainer checkpoint", 1
_NAME = re.compile(r"checkpoint-(\d+)")
_SAVING, _REPLACED, _ASIDE = ".saving", ".replaced", ".before"
_LEFT = re.compile(rf"\.(checkpoint-\d+)({re.escape(_SAVING)}|{re.escape(_REPLACED)})")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is, and the files that it consists of.

    Attributes:
        step: optimizer steps done.
        layout: the sizes of the layout that wrote it, as `ep_mesh.Layout` has them.
        world_size: ranks that wrote it.
        sections: the directories of tensors in `sharded`: "model", and "optimizer", "extra".
        files: size and CRC-32 of every file but those of tensors, which a section's index tells, and
            the model for plain use (`is_for_plain_use`), which is no part of what a run resumes from.
        versions: of the packages that wrote it.
    """

    step: int
    layout: Mapping[str, int]
    world_size: int
    sections: tuple[str, ...]
    files: Mapping[str, tuple[int, int]]
    versions: Mapping[str, str]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make `folder` a checkpoint: everything else in it is on the disk already."""
    body = asdict(manifest)
    write_json(
        folder / MANIFEST,
        {"format": FORMAT, "version": VERSION, "crc32": _crc32(body), "content": body},
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; no other file is looked at.

    Raises:
        CheckpointError: there is none, it is damaged, or of another program or a newer version.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no directory; give that of a checkpoint.")
    if not path.exists():
        if held := [str(each) for _, each in checkpoints(folder)]:
            raise CheckpointError(
                f"{folder} is no checkpoint, it holds some: give one of {', '.join(held)}."
            )
        raise CheckpointError(
            f"{path} is missing, so {folder} is no training checkpoint of a sharded model. A "
            "checkpoint of the model alone is loaded with from_pretrained(..., "
            "distributed_config=...), and its training starts anew."
        )
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"{path} was written by another program.")
    body = found.get("content")
    if found.get("version") != VERSION:
        versions = body.get("versions") if isinstance(body, dict) else "not told"
        raise CheckpointError(
            f"{path} has version {found.get('version')!r} of the format, this package reads "
            f"{VERSION}: install the version of ep-trainer that wrote it ({versions})."
        )
    if not isinstance(body, dict) or found.get("crc32") != _crc32(body):
        raise CheckpointError(f"{path} is damaged: its checksum differs.")
    files = {name: (size, crc) for name, (size, crc) in body["files"].items()}
    return Manifest(**{**body, "files": files, "sections": tuple(body["sections"])})


def section(folder: Path, name: str) -> Path:
    """Where the tensors of a section are."""
    return folder / SECTIONS / name


def is_for_plain_use(path: Path) -> bool:
    """Whether a file beside the sections is of the model as plain transformers loads it.

    `ep checkpoint export` may write it, or another one, later.
    """
    return path.name.endswith((".safetensors", ".safetensors.index.json"))


def small_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of the files to list; each is flushed to the disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            flush(path)
        elif name != MANIFEST and path.suffix != ".safetensors":
            flush(path)
            if is_for_plain_use(path):
                continue
            files[name] = (path.stat().st_size, crc32_of_file(path))
    return files


def check_checkpoint(folder: Path, *, values: bool, part: int = 0, parts: int = 1) -> Manifest:
    """Check that all that was written is there, and the checksums of part of it.

    Args:
        folder: the checkpoint.
        values: compare checksums of tensors too, which reads them.
        part: which part of the tensors.
        parts: how many parts, one per rank.

    Raises:
        CheckpointError: names the file and the key.
    """
    manifest = read_manifest(folder)
    for name, (size, crc) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing.")
        if path.stat().st_size != size or crc32_of_file(path) != crc:
            raise CheckpointError(
                f"{path} is damaged: {path.stat().st_size} bytes, {size} were written, or "
                "other ones (the checksum differs)."
            )
    for name in manifest.sections:
        reader = SafetensorsReader(section(folder, name))
        reader.check_files()
        if values:
            reader.check_values(part, parts)
    return manifest


def is_complete(folder: Path) -> bool:
    """Whether a directory is a checkpoint with all of its files, by their sizes."""
    try:
        manifest = read_manifest(folder)
        for name, (size, _) in manifest.files.items():
            if (folder / name).stat().st_size != size:
                return False
        for name in manifest.sections:
            SafetensorsReader(section(folder, name)).check_files()
    except (CheckpointError, OSError):
        return False
    return True


# -- the directories of a run


def saving_folder(folder: Path) -> Path:
    """Where the checkpoint `folder` is written before it is complete."""
    return folder.with_name(f".{folder.name}{_SAVING}")


def put_in_place(folder: Path) -> None:
    """Rename what was written to `folder`; a checkpoint that is there already goes, all else is kept aside."""
    new, old = saving_folder(folder), folder.with_name(f".{folder.name}{_REPLACED}")
    flush(new)
    if _is_foreign(folder):
        _put_aside(folder)
    if os.path.lexists(folder):
        _remove(old)
        folder.rename(old)
    new.rename(folder)
    flush(folder.parent)
    _remove(old)


def _is_foreign(folder: Path) -> bool:
    """Whether there is something that no run of this package wrote."""
    if folder.is_symlink() or not folder.exists():
        return False
    return not folder.is_dir() or (
        not (folder / MANIFEST).exists() and next(folder.iterdir(), None) is not None
    )


def _put_aside(path: Path) -> None:
    names = (path.with_name(f"{path.name}{_ASIDE}{number or ''}") for number in itertools.count())
    kept = next(name for name in names if not os.path.lexists(name))
    path.rename(kept)
    logger.warning("%s was no checkpoint of a sharded model; it is now %s", path, kept.name)


def _remove(path: Path) -> None:
    """Delete a directory, or a link to one but not what it leads to; if it is there."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def tidy(run: Path) -> None:
    """Take away what a killed run left; a checkpoint that it was about to replace comes back."""
    for path in list(run.glob(".checkpoint-*")):
        left = _LEFT.fullmatch(path.name)
        if left is None:
            continue
        folder = path.with_name(left[1])
        if left[2] == _REPLACED and not folder.exists():
            path.rename(folder)
        else:
            _remove(path)


def checkpoints(run: Path) -> Iterator[tuple[int, Path]]:
    """The complete checkpoints of a run, newest first."""
    found = []
    if run.is_dir():
        for path in run.iterdir():
            name = _NAME.fullmatch(path.name)
            if name is not None and path.is_dir():
                found.append((int(name[1]), path))
    return ((step, path) for step, path in sorted(found, reverse=True) if is_complete(path))


def rotate(
    run: Path,
    limit: int | None,
    best: str | None,
    *,
    until: int | None = None,
    keep_newest: bool = True,
) -> list[Path]:
    """Delete old complete checkpoints beyond `limit`; never the newest one, nor `best`.

    Directories that are no complete checkpoints of this format are neither counted nor touched, nor
    those of steps after `until`, the one that the run is in: they are another run's, or of one that
    went on from an earlier step.
    """
    if limit is None or limit <= 0:
        return []
    found = [path for step, path in checkpoints(run) if until is None or step <= until]
    kept = None if best is None else Path(best).resolve()
    keep = [path for path in found if path.resolve() == kept]
    if keep_newest or not keep:
        keep += found[:1]
    deleted: list[Path] = []
    for path in reversed(found):
        if len(found) - len(deleted) <= max(limit, len(set(keep))):
            break
        if path not in keep:
            # Renamed first: a run that is killed meanwhile leaves no half one under the name.
            gone = saving_folder(path)
            _remove(gone)
            path.rename(gone)
            _remove(gone)
            deleted.append(path)
    return deleted


def _crc32(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


__all__ = [
    "INDEX",
    "MANIFEST",
    "Manifest",
    "check_checkpoint",
    "checkpoints",
    "is_complete",
    "is_for_plain_use",
    "put_in_place",
    "read_manifest",
    "rotate",
    "saving_folder",
    "section",
    "small_files",
    "tidy",
    "write_manifest",
]
