"""Signals that ask a run to stop, and ranks that agree when."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class StopSignals:
    """Notes signals while it is installed; `agreed` tells all ranks the same.

    Ranks may get a signal in different steps, or only some of them. Each boundary starts a small
    all-reduce on the host and hears the result of the one before, so nobody waits for it and all
    stop after the same step: that of the signal or the one after.

    Args:
        names: of the signals.
        group: a gloo group of all ranks, whose collectives all begin in the same order, from one
            thread; None without processes.
    """

    def __init__(self, names: Sequence[str], group: dist.ProcessGroup | None) -> None:
        self._numbers = [signal.Signals[name] for name in names]
        self._group = group
        self._before: dict[signal.Signals, Any] = {}
        self._asked = torch.zeros(1)
        self._sent: torch.Tensor | None = None
        self._work: Any = None

    def install(self) -> None:
        """Begin to note signals; only the main thread of a program may."""
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._before[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Let signals do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _note(self, number: int, frame: Any) -> None:
        self._asked.fill_(1)

    def agreed(self) -> bool:
        """Whether to stop now; every rank must call, at the same boundaries."""
        if not self._numbers:
            return False
        heard = self.finish()
        self._sent = self._asked.clone()
        if self._group is not None:
            self._work = dist.all_reduce(self._sent, group=self._group, async_op=True)
        return heard

    def finish(self) -> bool:
        """Hear the result of the last boundary; every rank must call when the run ends."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        sent, self._sent = self._sent, None
        return sent is not None and bool(sent.item())
