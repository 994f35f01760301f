"""The table of supported models is read as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import supported_models
import transformers
from supported_models import WORKS, page, read_table, reason, version


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {
        "AConfig": {"tp=2": WORKS, "tp=1": WORKS},
        "BConfig": {"tp=2": "ValueError: 3 \\| 4", "tp=1": WORKS},
    }
    text = page(results, {"AConfig": "A", "BConfig": "B"}, {"AConfig": "a note"})
    monkeypatch.setattr(supported_models, "PAGE", tmp_path / "page.md")
    supported_models.PAGE.write_text(text)
    assert read_table() == results
    assert version() == transformers.__version__
    assert "1 of 2" in text
    assert "a note" in text


def test_reason_is_what_was_raised() -> None:
    error = AssertionError(
        "2 of 8 ranks failed\n--- rank 0: Traceback (most recent call last):\n  File x\n"
        "RuntimeError: sizes 3 | 4\n\n--- rank 1: gave no answer after another rank failed\n"
    )
    assert reason(error) == "RuntimeError: sizes 3 \\| 4"
    assert reason(AssertionError("differs from one process: {'a': 1.0}")).startswith("differs")
