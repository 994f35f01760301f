"""Run a program of `benchmarks/programs` and read the numbers that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"


def numbers(program: str, *arguments: str) -> Any:
    """What `program ARGUMENTS --out FILE` writes; its error, if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "numbers.json"
        command = [sys.executable, str(PROGRAMS / program), *arguments, "--out", str(out)]
        subprocess.run(command, check=True, timeout=600)
        return json.loads(out.read_text(encoding="utf-8"))
