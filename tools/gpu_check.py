"""Check and measure on one GPU what CPUs can't: `python tools/gpu_check.py [--out FILE]`.

Prints a line of JSON for each case (name, ok, value, unit, seconds; ok is null for one that was skipped, with
the reason) and a closing line; exits with 1 if any failed. Ends within 8 minutes: a check that has no time
left fails. Each check runs in a process of its own, so that one that crashes or hangs costs the others nothing.
Needs torch with CUDA, cloudpickle, pytest, and transformers 5.17 or newer; this checkout need not be installed.
`--steps` runs others, within as much time: a rank's step of Qwen3-30B-A3B beside its estimate (transformers 5.24,
80 GB). `--dry-run` tries either on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(p) for p in (*sorted(ROOT.glob("packages/*/src")), ROOT / "tools/ep-testing/src")
]

BUDGET, LONGEST = 450.0, 200.0  # seconds of all checks, and of one
CLOSING = "all checks"
COMMAND = [sys.executable, __file__, "--only"]

Line = dict[str, Any]


def load() -> dict[str, Any]:
    """The registry, filled."""
    import gpu_checks
    from gpu_checks import dispatch, experts, speed, step  # noqa: F401

    return gpu_checks.CHECKS


def chosen(steps: bool) -> list[str]:
    """The checks that are run if none is named."""
    known = load()
    from gpu_checks.step import STEPS

    if steps:
        return list(STEPS)
    return [name for name in known if name not in STEPS]


def here(names: list[str], dry: bool) -> Iterator[Line]:
    """The lines of checks that run in this process."""
    import gpu_checks
    import torch

    load()
    place = gpu_checks.Place(torch.device("cpu" if dry else "cuda:0"))
    for name in names:
        yield from gpu_checks.run(name, place)


def apart(name: str, longest: float) -> Iterator[Line]:
    """The lines of a check in a process of its own, which may crash or hang."""
    start = time.monotonic()
    process = subprocess.Popen(
        [*COMMAND, name],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for text in process.stdout:
            lines.put(text)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    problem, closed = None, False
    while True:
        try:
            text = lines.get(timeout=max(0.0, start + longest - time.monotonic()))
        except queue.Empty:
            problem = f"no end within {longest:.0f} s"
            break
        if text is None:
            break
        line = json.loads(text) if text.startswith('{"name"') else {"name": None}
        closed |= line["name"] == CLOSING
        if line["name"] not in (None, CLOSING):
            yield line
    if problem:
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if not closed:
        seconds = round(time.monotonic() - start, 2)
        error = problem or f"the process ended early, exit code {code}"
        yield {"name": name, "ok": False, "error": error, "seconds": seconds}


def all_lines(names: list[str]) -> Iterator[Line]:
    """The lines of all checks, each apart, within the budget."""
    start = time.monotonic()
    for name in names:
        left = start + BUDGET - time.monotonic()
        if left < 10:
            yield {"name": name, "ok": False, "error": "no time was left for it", "seconds": 0.0}
        else:
            yield from apart(name, min(left, LONGEST))


def closing(lines: list[Line], start: float) -> Line:
    """What it all comes to."""
    import torch

    failed = [line["name"] for line in lines if line["ok"] is False]
    return {
        "name": CLOSING,
        "ok": not failed,
        "passed": sum(line["ok"] is True for line in lines),
        "skipped": sum(line["ok"] is None for line in lines),
        "failed": failed,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - start, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command; gives back the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="write the lines to this file too")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--steps", action="store_true", help="a rank's steps, in place of the rest")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks, in this process")
    parser.add_argument("--list", action="store_true", help="name the checks")
    options = parser.parse_args(arguments)
    import torch

    known = load()
    if options.list:
        for name, function in known.items():
            print(f"{name}: {(function.__doc__ or '').splitlines()[0]}")
        return 0
    if unknown := set(options.only or ()) - set(known):
        parser.error(
            f"no check is named {', '.join(sorted(unknown))}; known are {', '.join(known)}"
        )
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --dry-run tries the checks on the CPU")
    start, names = time.monotonic(), options.only or chosen(options.steps)
    in_process = options.dry_run or options.only
    lines: list[Line] = []
    if options.out:
        options.out.write_text("", encoding="utf-8")

    def tell(line: Line) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    for line in here(names, options.dry_run) if in_process else all_lines(names):
        tell(line)
        lines.append(line)
    last = closing(lines, start)
    tell(last)
    return 0 if last["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
