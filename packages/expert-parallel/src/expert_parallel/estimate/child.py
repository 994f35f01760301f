"""A process that simulates what it reads, and writes what it finds: pickles, from and to its parent."""

from __future__ import annotations

import os
import pickle
import sys

from .report import Estimate, estimate_of
from .simulate import simulate


def main() -> None:
    """Answer one request."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed meanwhile is no answer
    setting = pickle.loads(sys.stdin.buffer.read())
    answer: tuple[ValueError | None, Estimate | None]
    try:
        answer = None, estimate_of(setting, simulate(setting))
    except ValueError as error:
        answer = error, None
    out.write(pickle.dumps(answer))
    out.close()


if __name__ == "__main__":
    main()
