"""What a run can choose about its checkpoints beside `TrainingArguments`."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_KNOWN = tuple(signal.Signals.__members__)
_NEVER_HEARD = ("SIGKILL", "SIGSTOP")


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of `EPTrainer` about checkpoints of a sharded model.

    Attributes:
        async_save: copy what a rank writes to host memory (as many bytes as it writes, kept for the
            next save) and write it while training goes on. False: write at once, one tensor at a time.
        save_hf: write the model as plain transformers loads it into every checkpoint too. The
            first rank gathers it, tensor by tensor, while all wait; `ep checkpoint export` does
            the same later, without the run.
        verify: compare every checksum before a checkpoint is loaded, each rank a part of them. A
            read of the checkpoint more; sizes and small files are always checked.
        stop_signals: names of the signals at which the run saves and stops at the next step. By
            default SIGTERM, and SIGUSR1 where there is one (not on Windows).

    Raises:
        ValueError: a signal that this system doesn't know, or that no program hears.
    """

    async_save: bool = True
    save_hf: bool = False
    verify: bool = True
    stop_signals: tuple[str, ...] = tuple(n for n in ("SIGTERM", "SIGUSR1") if n in _KNOWN)

    def __post_init__(self) -> None:
        for name in self.stop_signals:
            if name in _NEVER_HEARD:
                raise ValueError(
                    f"stop_signals={self.stop_signals!r}: {name} ends or stops a program unheard; use "
                    "SIGTERM."
                )
            if name not in _KNOWN:
                raise ValueError(
                    f"stop_signals={self.stop_signals!r}: {name!r} is no signal of this system; "
                    'names are like "SIGTERM".'
                )
