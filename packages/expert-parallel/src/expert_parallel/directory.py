"""Replace a checkpoint directory at once, so that there is a whole one at any moment.

[Note: how a directory is replaced]
The new checkpoint is written into a directory beside the old one, other files of the old one (a
tokenizer) are linked into it, and the two exchange names in one step (`renameat2` on Linux;
elsewhere two renames, and the old one lies beside in between). Then what else the old one had,
sub-directories too, moves over, and the rest of it is removed. An interruption leaves the old
checkpoint, or the new one, whole under the name, and perhaps a directory `.name.saving-...`.

[Note: directories that stay]
Some can't be exchanged: a mount point (a container's volume) and a directory in a parent that one
may not change have no other name, and a process whose working directory was exchanged would be in
the removed one. The new checkpoint is then written into a hidden sub-directory, and its files
replace those of the same name one by one: weights, others, the index, the config. An error while
writing leaves the old checkpoint. Between the first move and the last, which copy nothing, there
are files of both; an interruption there leaves them so, and the rest of the new ones in
`.saving-...`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ep_plans.safetensors_file import flush

_WEIGHTS = re.compile(
    r"(model|pytorch_model)(\.[^.]+)?(-\d{5}-of-\d{5})?\.(safetensors|bin)"
    r"|(model|pytorch_model)\.(safetensors|bin)\.index(\.[^.]+)?\.json"
)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Give an empty directory on the file system of `path`; at the end its content is in `path`.

    If the body raises, the new directory is removed and `path` is as it was. At the end `path` is
    replaced in one step; but file by file if it is or holds a mount point, is this process's
    working directory, or may not be renamed.

    Raises:
        NotADirectoryError: `path` is a file.
        OSError: the new directory can't be made or moved.
    """
    path = path.resolve()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; give a directory to save to.")
    fill = _filled_inside if path.exists() and _must_stay(path) else _exchanged
    with fill(path) as new:
        yield new


@contextmanager
def _exchanged(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.parent / f".{path.name}.saving-{secrets.token_hex(4)}"
    new.mkdir()
    try:
        yield new
        if path.exists():
            shutil.copystat(path, new)
            _link_other_files(path, new)
            _exchange(new, path)
            old, new = new, path
            _move_rest(old, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            new.chmod(0o777 & ~_umask())
            new.rename(path)
    except BaseException:
        if new != path:
            shutil.rmtree(new, ignore_errors=True)
        raise
    flush(path.parent)


@contextmanager
def _filled_inside(path: Path) -> Iterator[Path]:
    new = path / f".saving-{secrets.token_hex(4)}"
    new.mkdir()
    try:
        yield new
        entries = sorted(new.iterdir(), key=_turn)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    for entry in entries:
        target = path / entry.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        entry.replace(target)
    names = {entry.name for entry in entries}
    stale = [old for old in path.iterdir() if is_weights(old.name) and old.name not in names]
    for old in sorted(stale, key=_turn, reverse=True):  # an index before what it tells of
        if old.is_symlink() or not old.is_dir():
            old.unlink()
    new.rmdir()
    flush(path)


def _must_stay(path: Path) -> bool:
    """Whether a directory can't be renamed, or a process would be left in the old one."""
    parent = path.parent
    if not os.access(parent, os.W_OK | os.X_OK) or _is_protected(path):
        return True
    bound = _mount_points()
    if any(os.path.ismount(each) or str(each) in bound for each in (path, *path.iterdir())):
        return True
    with contextlib.suppress(OSError):
        return path.samefile(os.curdir)
    return False


def _is_protected(path: Path) -> bool:
    """Whether the parent lets only owners rename, as /tmp does."""
    parent = path.parent.stat()
    return bool(parent.st_mode & stat.S_ISVTX) and os.geteuid() not in (
        0,
        parent.st_uid,
        path.stat().st_uid,
    )


def _mount_points() -> set[str]:
    """On Linux: also directories of the same file system, which `ismount` doesn't see."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return set()
    octal = re.compile(rb"\\([0-7]{3})")
    points = (octal.sub(lambda found: bytes([int(found[1], 8)]), line.split()[4]) for line in lines)
    return {os.fsdecode(point) for point in points}


def _turn(entry: Path) -> tuple[int, str]:
    """Weights first; what tells a reader of them last."""
    name = entry.name
    if name == "config.json":
        return 3, name
    if is_weights(name):
        return (2 if name.endswith(".json") else 0), name
    return 1, name


def is_weights(name: str) -> bool:
    """Whether a file of this name holds a model's weights, or their index."""
    return _WEIGHTS.fullmatch(name) is not None


def _link_other_files(old: Path, new: Path) -> None:
    for entry in old.iterdir():
        if entry.is_file() and not is_weights(entry.name) and not (new / entry.name).exists():
            with contextlib.suppress(OSError):  # no hard links here: `_move_rest` moves it
                os.link(entry, new / entry.name)


def _move_rest(old: Path, new: Path) -> None:
    for entry in old.iterdir():
        if not is_weights(entry.name) and not (new / entry.name).exists():
            entry.rename(new / entry.name)


def _exchange(first: Path, second: Path) -> None:
    """Let two directories swap names."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        renameat2 = None
    if renameat2 is not None:
        failed = renameat2(
            _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
        )
        if not failed:
            return
    aside = first.with_name(f"{first.name}-old")
    second.rename(aside)
    try:
        first.rename(second)
    except BaseException:
        aside.rename(second)
        raise
    aside.rename(first)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
