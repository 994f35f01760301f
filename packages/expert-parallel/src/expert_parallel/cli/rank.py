"""How a job runs on one of several ranks."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expert_parallel.cli.console import is_first_rank


def quiet_unless_first() -> None:
    """Let one rank speak: the others' output and warnings go nowhere (errors are reported)."""
    if is_first_rank():
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def run(command: Callable[[dict[str, Any]], None], job: dict[str, Any]) -> None:
    """Run a job on this rank, and leave the process group in order."""
    import torch.distributed as dist

    quiet_unless_first()
    command(job)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
