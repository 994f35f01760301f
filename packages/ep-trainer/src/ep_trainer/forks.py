"""Workers of data loaders that are forked from a process with collectives.

[Note: a fork waits for the collectives' threads]
A thread of gloo that lets go of the last reference to a tensor asks the interpreter for a thread state, and
for that holds a lock of the interpreter without the GIL. A process that is forked in this moment has the
lock held for ever: it never comes to its first line, and who waits for its data waits too (seen with CPython
3.11: fork's own code takes this lock before it makes it anew). The moment is short, but collectives often
come just before a fork: a step's before the loader of the next epoch or of an evaluation. So before a fork
of the main thread, which then has no collective under way, a save in the background ends, and the threads
of what was communicated before get the time to end too.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist

_SETTLE_S = 0.05
_AGAIN_S = 0.2  # workers are forked one after the other, with no collective in between
_SAVE_S = 60.0

_savers: weakref.WeakSet[Any] = weakref.WeakSet()
_last = -_AGAIN_S


def forks_wait_for(saver: Any) -> None:
    """Let each fork of the main thread wait for the save in the background of `saver`, and for collectives.

    Cost of a fork: 50 ms, less often than five times a second; the rest of a save, 60 seconds at most.
    """
    _savers.add(saver)
    _register()


@functools.cache
def _register() -> None:
    os.register_at_fork(before=_settle)


def _settle() -> None:
    global _last
    if not dist.is_initialized() or threading.current_thread() is not threading.main_thread():
        return
    for saver in list(_savers):
        saver.join(_SAVE_S)
    if time.monotonic() - _last > _AGAIN_S:
        time.sleep(_SETTLE_S)
    _last = time.monotonic()
