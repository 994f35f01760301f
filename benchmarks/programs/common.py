"""What the programs share: the path of `tools`, and how they write what they found."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tools"))


def main(measure: Callable[..., Any], *names: str) -> None:
    """Call `measure` with the arguments of the command line; JSON to `--out`, or printed."""
    parser = argparse.ArgumentParser()
    for name in names:
        parser.add_argument(name)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    text = json.dumps(measure(*(getattr(given, name) for name in names)))
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text, encoding="utf-8")
