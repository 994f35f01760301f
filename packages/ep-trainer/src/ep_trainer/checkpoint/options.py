"""What a run can choose about its checkpoints beside `TrainingArguments`."""

from __future__ import annotations

import signal
from dataclasses import dataclass


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
        stop_signals: names of the signals at which the run saves and stops at the next step.

    Raises:
        ValueError: a signal that this system doesn't know.
    """

    async_save: bool = True
    save_hf: bool = False
    verify: bool = True
    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")

    def __post_init__(self) -> None:
        known = {each.name for each in signal.Signals}
        for name in self.stop_signals:
            if name not in known:
                raise ValueError(
                    f"stop_signals={self.stop_signals!r}: {name!r} is no signal of this system; "
                    'names are like "SIGTERM".'
                )
