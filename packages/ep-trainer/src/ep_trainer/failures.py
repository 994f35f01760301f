"""What is told about ranks that fail: who it was, where, and what only follows from that."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

_FOLLOWS = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset)|closed by peer|broken pipe|process group.*abort",
    re.IGNORECASE,
)
"""Words of an error that a collective raises when another rank is gone."""


class PeerError(RuntimeError):
    """Another rank failed; the message names it, its step and what it said."""


@dataclass(frozen=True)
class Failure:
    """What is told about a failure.

    Attributes:
        ranks: who failed.
        text: who, in which step, and how, for the message.
        alive: whether the ranks still run, so that a save under way may end.
    """

    ranks: tuple[int, ...]
    text: str
    alive: bool

    def encoded(self) -> str:
        """As it is told in the store."""
        return json.dumps({"ranks": self.ranks, "text": self.text, "alive": self.alive})

    @classmethod
    def decoded(cls, text: str) -> Failure:
        """From the store."""
        found = json.loads(text)
        return cls(tuple(found["ranks"]), found["text"], found["alive"])


def follows_from_a_peer(error: BaseException) -> bool:
    """Whether an error is what a collective raises when another rank is gone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (
            isinstance(seen, RuntimeError | ValueError) and _FOLLOWS.search(str(seen))
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def standing(thread: int) -> tuple[str, bool]:
    """Where a thread stands, and whether it waits in a collective, as far as its stack tells."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "at its end", False
    stack = traceback.extract_stack(frame)
    waits = any("torch/distributed/" in Path(each.filename).as_posix() for each in stack[-6:])
    inner = [each for each in stack if f"{os.sep}torch{os.sep}" not in each.filename] or stack
    place = inner[-1]
    text = f"{place.filename}:{place.lineno} ({place.name})"
    return (
        f"{text}, which waits in torch.distributed's {stack[-1].name}" if waits else text
    ), waits


def verdict(
    stuck: Mapping[int, Mapping[str, Any]], moving: Mapping[int, str], seconds: float
) -> tuple[tuple[int, ...], str]:
    """Whose fault it is that no step ends, and the words for it.

    Those that are not stuck (the others wait for them), else those in the earliest step, of these
    the ones that wait in no collective, of these the ones at the rarest place.

    Args:
        stuck: by rank its step, what it is doing, where, and whether it waits.
        moving: by rank what others do.
        seconds: how long there was no progress.
    """
    if moving:
        told = "; ".join(f"rank {rank} is in {place}" for rank, place in list(moving.items())[:8])
        return tuple(moving), f"{told}, but {_named(stuck)} waited for {seconds:g} seconds"
    first = min(each["step"] for each in stuck.values())
    late = {rank: each for rank, each in stuck.items() if each["step"] == first}
    late = {rank: each for rank, each in late.items() if not each["waits"]} or late
    places = [each["where"] for each in late.values()]
    fewest = min(places.count(place) for place in places)
    late = {rank: each for rank, each in late.items() if places.count(each["where"]) == fewest}
    told = "; ".join(
        f"rank {rank}, step {each['step']} ({each['doing']}), hangs at {each['where']}"
        for rank, each in list(late.items())[:8]
    )
    others = {rank: each for rank, each in stuck.items() if rank not in late}
    if others:
        rank, each = next(iter(others.items()))
        told += f"; {_named(others)} waited, rank {rank} at {each['where']}"
    return tuple(late), f"{told}: no progress for {seconds:g} seconds"


def _named(ranks: Mapping[int, Any]) -> str:
    names = ", ".join(map(str, list(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def machine() -> str | None:
    """What processes that see each other's ids have in common; None where that isn't known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def is_running(pid: int) -> bool:
    """Whether a process of this machine runs; one that only waits to be collected doesn't."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] not in "ZX"
