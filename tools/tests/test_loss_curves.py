from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import loss_curves
import pytest


def test_kept_curves_are_compared_and_drawn(tmp_path: Path) -> None:
    settings = loss_curves.Settings(steps=3)
    curves = {name: [4.0, 3.0, 2.0] for name in loss_curves.LAYOUTS}
    curves["tp=8"] = [4.0, 3.003, 2.0]
    for name, losses in curves.items():
        what = {"sizes": loss_curves.LAYOUTS[name], **asdict(settings)}
        loss_curves.kept_file(tmp_path, name, settings).write_text(
            json.dumps({"what": what, "loss": losses})
        )
    found = loss_curves.curves(tuple(curves), settings, tmp_path)
    assert found == curves
    off = loss_curves.differences(found)
    assert off["tp=8"] == pytest.approx([0, 1e-3, 0])
    assert loss_curves.apart_from(off["tp=8"]) == 2
    assert loss_curves.apart_from(off["tp=4, fsdp=2"]) is None
    assert loss_curves.ONE not in off
    loss_curves.draw(found, found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
