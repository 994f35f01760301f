"""The figure of failing ranks: the demo's model trains on, whatever happens to its ranks.

A sample by default; `python tools/figures.py random_kill_lost_runs --full` restarts 20 times.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration_tests"))

SEED = 1


def random_kill_lost_runs(full: bool = False) -> dict[str, Any]:
    """Runs under failing ranks that are not bitwise the undisturbed one, or didn't name the rank."""
    import faults

    world, count = (4, 20) if full else (2, 3)
    steps = 4 * count + 10
    drawn = faults.random_faults(count, world, SEED)
    with tempfile.TemporaryDirectory() as made:
        folders = [Path(made) / name for name in ("undisturbed", "disturbed")]
        for folder in folders:
            faults.prepare(folder)
        whole = faults.run(folders[0], steps, world, [], timeout=600)
        found = faults.run(folders[1], steps, world, drawn, timeout=600)
    same = found.losses == whole.losses and found.weights == whole.weights
    told = not found.untold
    return {
        "value": int(not (same and told and found.restarts == count)),
        "unit": "runs",
        "reference": "the undisturbed run in the same layout: every loss and all weights bitwise",
        "conditions": (
            f"the demo's model, {world} ranks under torchrun, {steps} steps, a checkpoint each "
            f"{faults.SAVE_STEPS}; {found.restarts} restarts: "
            + ", ".join(
                f"{sum(fault.kind == kind for fault in drawn)} x {kind}" for kind in faults.KINDS
            )
        ),
        "restarts": found.restarts,
        "killed_while_saving": found.in_saves,
        "final_loss": [found.losses.get(str(steps)), whole.losses.get(str(steps))],
        "slowest_stop_s": round(max(found.stopped), 1),
        "untold": found.untold,
    }


FIGURES = {random_kill_lost_runs.__name__: random_kill_lost_runs}
