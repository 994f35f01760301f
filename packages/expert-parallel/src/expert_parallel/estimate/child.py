"""A process that simulates what it reads, and writes what it finds: pickles, from and to its parent."""

from __future__ import annotations

import os
import pickle
import sys

from .pipelines import step_of
from .report import Estimate, estimate_of
from .search import answer_of
from .simulate import Setting


def main() -> None:
    """Answer one request: a `Setting`, or a list of tasks of a search."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed meanwhile is no answer
    asked = pickle.loads(sys.stdin.buffer.read())
    if isinstance(asked, list):
        out.write(pickle.dumps([answer_of(task) for task in asked]))
    else:
        out.write(pickle.dumps(_one(asked)))
    out.close()


def _one(setting: Setting) -> tuple[ValueError | None, Estimate | None]:
    try:
        return None, estimate_of(setting, step_of(setting)[0])
    except ValueError as error:
        return error, None


if __name__ == "__main__":
    main()
