"""One run at a time saves in a directory."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ep_trainer.checkpoint.errors import CheckpointError

_PATIENCE_S = 15.0
"""How long the workers of a killed run's data loader may outlive it, which share its lock."""


@contextmanager
def sole_run(run: Path, patience: float = _PATIENCE_S) -> Iterator[None]:
    """Hold a lock on the directory `run`; nothing where the file system has no locks.

    Raises:
        CheckpointError: another process holds it, and for longer than `patience` seconds.
    """
    run.mkdir(parents=True, exist_ok=True)
    directory = os.open(run, os.O_RDONLY)
    try:
        _lock(directory, run, time.monotonic() + patience)
        yield
        # Before the close: a child that is still there shares the lock.
        fcntl.flock(directory, fcntl.LOCK_UN)
    finally:
        os.close(directory)


def _lock(directory: int, run: Path, end: float) -> None:
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
        except OSError:  # this file system has no locks
            return
        else:
            return
