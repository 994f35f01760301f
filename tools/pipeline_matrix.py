"""Train a step over pipeline stages in layouts, schedules and ways, each beside one process.

`python tools/pipeline_matrix.py [--full]` prints each case that fails, then the count; the cases are those of
`integration_tests/pipelines.py`, a sample without `--full`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def failures(*, whole: bool) -> dict[str, Any]:
    """How many cases fail, of how many, and the worst error of those that pass."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration_tests"))
    import pipelines

    from ep_testing import RankPool
    from ep_testing.pool import RankError

    pool = RankPool()
    failed: list[str] = []
    worst = 0.0
    cases = pipelines.cases(whole)
    for case in cases:
        try:
            errors = pool.run(pipelines.compare, case, world=pipelines.world_of(case), timeout=240)
            worst = max([worst, *(value for error in errors for value in error.values())])
        except RankError as error:
            failed.append(" ".join(case))
            print(f"{failed[-1]}: {error}", file=sys.stderr, flush=True)
    pool.close()
    return {
        "value": len(failed),
        "unit": "cases",
        "reference": "one process with the global batch: loss, each gradient, norm, clipped AdamW step",
        "conditions": f"{len(cases)} cases of a tiny Qwen3-MoE in float64 on 2 to 8 gloo ranks",
        "failed": failed,
        "worst_error": worst,
    }


def main() -> None:
    """Print what fails."""
    found = failures(whole="--full" in sys.argv[1:])
    print(found)
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
