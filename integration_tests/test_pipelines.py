"""A training step over pipeline stages equals the step of one process, for each schedule and layout.

A sample runs by default, everything with `--all-layouts`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dispatching import dispatching
from equality import all_float64
from pipelines import check_pipeline

from ep_testing import RankPool


def compare(rank: int, sizes: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    with all_float64():
        return check_pipeline(dispatching(**sizes), **options)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_two(ranks: RankPool, schedule: str) -> None:
    errors = ranks.run(compare, {"pp_size": 2, "pp_schedule": schedule}, {}, world=2, timeout=120)
    print(errors)
