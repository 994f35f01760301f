"""One run at a time saves in a directory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ep_trainer.checkpoint.errors import CheckpointError

_PATIENCE_S = 15.0
"""How long the workers of a killed run's data loader may outlive it, which share its lock."""


@contextmanager
def sole_run(run: Path, patience: float = _PATIENCE_S) -> Iterator[None]:
    """Hold a lock on the directory `run`.

    Nothing where the file system has no locks, nor on Windows, where directories can't be locked: there two
    runs in one directory are not refused.

    Raises:
        CheckpointError: another process holds it, and for longer than `patience` seconds.
    """
    run.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    directory = os.open(run, os.O_RDONLY)
    try:
        is_locked = _lock(directory, run, time.monotonic() + patience)
        try:
            yield
        finally:
            if is_locked:  # closing is not enough: a child that is still there shares the lock
                fcntl.flock(directory, fcntl.LOCK_UN)
    finally:
        os.close(directory)


def _lock(directory: int, run: Path, end: float) -> bool:
    """Lock the directory by `end`; False if its file system has no locks."""
    import fcntl

    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise CheckpointError(
                    f"another run saves its checkpoints in {run} now, and each would remove what the "
                    "other writes: give this one another output_dir, or wait for the other's end."
                ) from None
            time.sleep(0.1)
        except OSError:
            return False
        else:
            return True
