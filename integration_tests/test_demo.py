"""The demo, with few steps: it trains, saves, and generates the same text in two other ways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "packages/expert-parallel/examples/demo.py"


@pytest.mark.time_limit(300)
def test_demo(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the demo draws a picture")
    done = subprocess.run(
        [sys.executable, str(DEMO), str(tmp_path), "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "training.png").stat().st_size > 10_000
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()
    assert (tmp_path / "sharded.txt").read_text() == (tmp_path / "plain.txt").read_text()
    assert "step 3/3" in done.stdout
