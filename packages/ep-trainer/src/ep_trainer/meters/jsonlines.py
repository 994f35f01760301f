"""Logs as a file of JSON lines."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ep_trainer.meters.base import Meter


class JsonLines(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Appends each log to a file, one JSON object a line; only the first rank writes.

    A line has `step`, `epoch`, `time` (seconds since 1970), what was logged, and the `details` of
    `meters`. Numbers that aren't finite are null. A line is written by one call, so that a reader
    never sees half of one, and what earlier runs wrote stays.

    Args:
        path: the file; its folder is made.
        meters: whose details stand in the lines of training.
    """

    def __init__(self, path: str | Path, meters: Sequence[Meter] = ()) -> None:
        self.path, self.meters = Path(path), tuple(meters)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write a line."""
        if not state.is_world_process_zero or logs is None:
            return
        entry = {"step": state.global_step, "epoch": state.epoch, "time": time.time(), **logs}
        if "loss" in logs:
            for meter in self.meters:
                entry |= meter.details()
        append_line(self.path, entry)


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append `entry` as one line, by one write."""
    line = json.dumps(_plain(entry), allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        written = os.write(file, line)
        while written < len(line):  # a full disk or a signal
            written += os.write(file, line[written:])
    finally:
        os.close(file)


def _plain(value: Any) -> Any:
    """What JSON knows; a tensor or a number of numpy as a number, others by their names."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "item") and getattr(value, "size", None) != 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
