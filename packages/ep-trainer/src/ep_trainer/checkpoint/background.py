"""A thread that writes while others compute."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_NICENESS = 10


def yield_to_others() -> None:
    """Let the calling thread run where nobody else would (Linux, whose threads have priorities)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
