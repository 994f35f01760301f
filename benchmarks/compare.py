"""Compare what asv kept of two commits: `python compare.py BASE HEAD`; exits with 1 if anything grew too much.

How much is too much for which series stands in `factors.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Series = dict[str, float]
Factors = list[tuple[str, float | None]]


@dataclass(frozen=True)
class Change:
    """A series that both commits have, or that the later one lost (`after` is nan).

    Attributes:
        name: benchmark and parameters.
        before: value at the base.
        after: value at the head.
        factor: the growth that is allowed; None: any.
    """

    name: str
    before: float
    after: float
    factor: float | None

    @property
    def worse(self) -> bool:
        """Whether it grew by more than its factor, or is not measured any more."""
        if math.isnan(self.after):
            return True
        return self.factor is not None and self.after > self.before * self.factor

    def __str__(self) -> str:
        grown = self.after / self.before if self.before else math.nan
        allowed = "" if self.factor is None else f", {self.factor:g} allowed"
        return f"{self.name}: {self.before:.6g} -> {self.after:.6g} ({grown:.3f} times{allowed})"


def series(content: dict[str, Any]) -> Series:
    """The values of one of asv's result files by benchmark and parameters; nan where one failed."""
    found: Series = {}
    for name, row in content["results"].items():
        fields = dict(zip(content["result_columns"], row, strict=False))
        combinations = list(product(*(fields.get("params") or [])))
        values = fields["result"] or [None] * len(combinations)
        for combination, value in zip(combinations, values, strict=True):
            if _skipped(value):
                continue
            arguments = ", ".join(text.strip("'") for text in combination)
            found[f"{name}({arguments})"] = math.nan if value is None else float(value)
    return found


def _skipped(value: Any) -> bool:
    """asv writes NaN where a combination of parameters does not exist, null where it failed."""
    return isinstance(value, float) and math.isnan(value)


def factor_of(name: str, factors: Factors) -> float | None:
    """The factor of the first pattern found in a name.

    Raises:
        ValueError: none is.
    """
    for pattern, factor in factors:
        if re.search(pattern, name):
            return factor
    raise ValueError(f"no pattern of factors.json is found in {name!r}: add one.")


def compare(before: Series, after: Series, factors: Factors) -> list[Change]:
    """What became of each series that the base has a value of."""
    return [
        Change(name, value, after.get(name, math.nan), factor_of(name, factors))
        for name, value in before.items()
        if not math.isnan(value)
    ]


def results(folder: Path, commit: str) -> Series:
    """What asv kept of a commit.

    Raises:
        SystemExit: nothing.
    """
    files = sorted(folder.glob(f"*/{commit[:8]}-*.json"))
    if not files:
        sys.exit(f"{folder} holds no results of {commit}: nox -s bench -- run {commit[:8]}^!")
    found: Series = {}
    for file in files:
        found |= series(json.loads(file.read_text(encoding="utf-8")))
    return found


def _commit(name: str) -> str:
    command = ["git", "rev-parse", "--verify", f"{name}^{{commit}}"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name!r} is no commit here: {done.stderr.strip()}")
    return done.stdout.strip()


def main() -> None:
    """Print what changed by more than a hundredth, regressions last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base")
    parser.add_argument("head")
    parser.add_argument("--results", type=Path, default=HERE.parent / ".asv" / "results")
    given = parser.parse_args()
    factors: Factors = json.loads((HERE / "factors.json").read_text(encoding="utf-8"))["factors"]
    before, after = (results(given.results, _commit(name)) for name in (given.base, given.head))
    changes = compare(before, after, factors)
    worse = [change for change in changes if change.worse]
    for change in changes:
        if change not in worse and abs(change.after - change.before) > 0.01 * abs(change.before):
            print(f"  {change}")
    for change in worse:
        print(f"REGRESSION {change}")
    print(f"{len(changes)} series compared, {len(worse)} regressions")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
