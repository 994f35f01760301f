"""Start the ranks of a job on this machine, and tell of the rank that failed first."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_WORKER = "expert_parallel.cli.worker"


class JobError(RuntimeError):
    """A rank of a job failed; the message is that rank's, or how it ended."""


def under_launcher() -> bool:
    """Whether torchrun (or another launcher) started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    command: str,
    job: dict[str, Any],
    processes: int,
    folder: Path | None = None,
    *,
    traceback: bool = False,
    restarts: int = 0,
) -> None:
    """Run `command` with `job` on `processes` ranks of this machine, and wait.

    Args:
        command: a command of `expert_parallel.cli.worker`.
        job: what it needs, as JSON.
        processes: how many ranks.
        folder: where files of the job may be passed to the ranks; None: one made for it.
        traceback: let a rank that fails print where.
        restarts: how often all ranks are started again after one of them failed.

    Raises:
        JobError: a rank failed.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="ep-") as made:
            return launch(
                command, job, processes, Path(made), traceback=traceback, restarts=restarts
            )
    file = folder / "job.json"
    content = {"command": command, "job": job, "traceback": traceback}
    file.write_text(json.dumps(content), encoding="utf-8")
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    # What failed is told by us, in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
    )
    try:
        elastic_launch(config, sys.executable)("-m", _WORKER, str(file))
    except ChildFailedError as error:
        raise JobError(first_error(folder) or _how_it_ended(error)) from None
    except SignalException as error:
        raise JobError(f"stopped by {error.sigval.name}") from None
    return None


def report_error(folder: Path, rank: int, message: str) -> None:
    """Called by a rank that fails: leave the reason where `launch` finds it."""
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    told = {"rank": rank, "start": start, "time": time.time(), "message": message}
    (folder / f"error-{rank}.json").write_text(json.dumps(told), encoding="utf-8")


def first_error(folder: Path) -> str | None:
    """What `report_error` left first, in the last start of the ranks; None: nothing."""
    errors = [json.loads(file.read_text("utf-8")) for file in folder.glob("error-*.json")]
    if not errors:
        return None
    last = max(error["start"] for error in errors)
    errors = [error for error in errors if error["start"] == last]
    first = min(errors, key=lambda error: error["time"])
    message: str = first["message"]
    if all(error["message"] == message for error in errors):
        return message
    return f"rank {first['rank']}: {message}"


def _how_it_ended(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"rank {rank} was ended by {name}{hint}"
    return f"rank {rank} ended with exit code {failure.exitcode}"
