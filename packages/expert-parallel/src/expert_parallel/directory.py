"""Replace a checkpoint directory at once, so that there is a whole one at any moment.

[Note: how a directory is replaced]
The new checkpoint is written into a directory beside the old one, other files of the old one (a
tokenizer) are linked into it, and the two exchange names in one step (`renameat2` on Linux;
elsewhere two renames, and the old one lies beside in between). Then what else the old one had,
sub-directories too, moves over, and the rest of it is removed. An interruption leaves the old
checkpoint, or the new one, whole under the name, and perhaps a directory `.name.saving-...`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WEIGHTS = re.compile(
    r"(model|pytorch_model)(\.[^.]+)?(-\d{5}-of-\d{5})?\.(safetensors|bin)"
    r"|(model|pytorch_model)\.(safetensors|bin)\.index(\.[^.]+)?\.json"
)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Give an empty directory beside `path`; at the end of the body it becomes `path`.

    If the body raises, the new directory is removed and `path` is as it was.

    Raises:
        NotADirectoryError: `path` is a file.
        OSError: the directory beside can't be made or moved.
    """
    path = path.resolve()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; give a directory to save to.")
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
    _flush(path.parent)


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


def _flush(directory: Path) -> None:
    """Ask the file system to remember the renaming (not possible everywhere)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
