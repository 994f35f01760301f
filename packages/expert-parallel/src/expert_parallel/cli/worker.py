"""What a rank runs: `python -m expert_parallel.cli.worker JOB`, started by `launch`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expert_parallel.cli.console import one_line
from expert_parallel.cli.launch import first_error, report_error
from expert_parallel.cli.rank import run


def _commands() -> dict[str, Callable[[dict[str, Any]], None]]:
    from expert_parallel.cli import generate, train

    return {"train": train.run, "generate": generate.run}


def main() -> None:
    """Run the job of a file; a failure is reported to the launcher and ends with exit code 1."""
    file = Path(sys.argv[1])
    content = json.loads(file.read_text(encoding="utf-8"))
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if start and os.environ.get("RANK") == "0":
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        reason = first_error(file.parent) or "a rank was ended"
        print(f"restart {start} of at most {most}: {reason}", file=sys.stderr, flush=True)
    try:
        run(_commands()[content["command"]], content["job"])
    except Exception as error:  # noqa: BLE001  # whatever it is, the launcher tells it
        if content["traceback"]:
            traceback.print_exc()
        report_error(file.parent, int(os.environ.get("RANK", "0")), one_line(error))
        # Peers may be waiting for this rank in a collective: don't wait for them at exit.
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
