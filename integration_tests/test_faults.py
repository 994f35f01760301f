"""The law of failing ranks: a run that is killed and started again is the run that wasn't.

More of it, at random, in `tools/figures.py random_kill_lost_runs --full`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import faults
import pytest

from ep_testing import RankPool

STEPS = 6


@pytest.mark.time_limit(200)
def test_a_rank_killed_in_a_save_costs_the_steps_since_the_last_one(
    ranks: RankPool, tmp_path: Path
) -> None:
    faults.prepare(tmp_path / "killed")
    shutil.copytree(tmp_path / "killed", tmp_path / "whole")
    whole = ranks.run(faults.train, str(tmp_path / "whole"), STEPS, 2, world=2, timeout=90)
    # In the second save: the first checkpoint is there.
    fault = faults.Fault("kill in a save", 1, 3)
    found = faults.run(tmp_path / "killed", STEPS, 2, [fault], timeout=90)
    assert (found.restarts, found.in_saves, found.untold) == (1, 1, [])
    assert found.losses == whole[0]["losses"]
    assert found.weights == [each["weights"] for each in whole]
    assert {path.name for path in (tmp_path / "killed" / "run").iterdir()} == {
        "checkpoint-4",
        "checkpoint-6",
    }
