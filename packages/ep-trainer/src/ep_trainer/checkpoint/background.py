"""A thread that writes while others compute."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable

_NICENESS = 10


class Background:
    """Runs functions one after the other in a thread of its own, where nobody else would run.

    The thread begins with the first and stays: to start one costs its starter a turn of the other. It ends
    with the process, whatever it does.
    """

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] | None = None

    def run(self, work: Callable[[], None]) -> threading.Event:
        """Run `work`, which must not raise; the event is set when it is done."""
        if self._given is None:
            self._given = queue.SimpleQueue()
            threading.Thread(target=_run_all, args=(self._given,), name="save", daemon=True).start()
        done = threading.Event()
        self._given.put((work, done))
        return done


def _run_all(given: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]) -> None:
    _yield_to_others()
    while True:
        work, done = given.get()
        try:
            work()
        finally:
            done.set()
        del work, done  # what they hold on to


def _yield_to_others() -> None:
    """Let the calling thread run where nobody else would (Linux, whose threads have priorities)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
