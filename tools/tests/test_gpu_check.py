from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gpu_check
import gpu_checks
import pytest
import torch
from gpu_checks import Case, Found, Place, Skip, at_most
from gpu_checks.step import STEPS

from ep_dispatch import EPImplementationInterface


def test_every_check_runs_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiny sizes; what needs CUDA says so. Each check has lines, and none fails."""
    registry, out = EPImplementationInterface, tmp_path / "lines"
    built_in = {name: registry.get(name) for name in registry._built_in}
    monkeypatch.setattr(registry, "_classes", built_in)  # without those of other tests
    assert gpu_check.main(["--dry-run", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert out.read_text() == printed
    *lines, closing = map(json.loads, printed.splitlines())
    assert {line["name"].split(":")[0] for line in lines} == set(gpu_checks.CHECKS) - set(STEPS)
    for line in lines:
        assert "skipped" in line if line["ok"] is None else {"value", "unit"} <= set(line)
    assert closing["passed"] == sum(line["ok"] is True for line in lines) > 30
    for name in ("all_to_all", "all_reduce", "auto", "all_to_all_hierarchical"):
        assert any(line["name"] == f"one_rank: {name}, laws" and line["ok"] for line in lines)


def test_a_step_of_one_rank_runs_beside_its_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and native transformers', though nothing that the other ranks would send is there."""
    assert len(gpu_check.chosen(steps=True)) == 3
    assert gpu_check.main(["--dry-run", "--only", "step_tp4_fsdp2"]) == 0
    *lines, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(lines) == 6
    assert all(line["ok"] for line in lines)
    kernels = [line["both"][1] for line in lines if line["name"].endswith(" kernels")]
    assert min(kernels) > 100


def test_a_case_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(place: Place) -> Iterator[Case]:
        yield "raises", lambda: 1 / 0  # type: ignore[return-value]
        yield "skips", place.need_cuda  # type: ignore[misc]
        yield "is NaN", lambda: at_most(gpu_checks.worst([1.0, float("nan")]), 2.0, "")
        yield "is right", lambda: Found(True, 1.0, "rows")
        raise Skip("no more")

    monkeypatch.setitem(gpu_checks.CHECKS, "planted", planted)
    lines = list(gpu_checks.run("planted", Place(torch.device("cpu"))))
    assert [line["ok"] for line in lines] == [False, None, False, True, None]
    assert "ZeroDivisionError" in lines[0]["error"]
    assert lines[-1]["name"] == "planted"
    assert gpu_check.closing(lines, time.monotonic())["failed"] == [
        "planted: raises",
        "planted: is NaN",
    ]


@pytest.mark.parametrize(
    ("end", "error"),
    [("os._exit(3)", "exit code 3"), ("time.sleep(60)", "no end within 1 s"), (None, None)],
)
def test_a_check_that_crashes_or_hangs_is_told(
    monkeypatch: pytest.MonkeyPatch, end: str | None, error: str | None
) -> None:
    line = {"name": "x: case", "ok": True}
    closing = json.dumps({"name": gpu_check.CLOSING})
    code = (
        f"import os, time; print({json.dumps(line)!r}, flush=True); {end or f'print({closing!r})'}"
    )
    monkeypatch.setattr(gpu_check, "COMMAND", [sys.executable, "-c", code])
    found = list(gpu_check.apart("x", 1))
    assert found[0] == line
    assert [one["error"].endswith(str(error)) for one in found[1:]] == [True] * (error is not None)


def test_without_a_gpu_it_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main([])
    assert "--dry-run" in capsys.readouterr().err
