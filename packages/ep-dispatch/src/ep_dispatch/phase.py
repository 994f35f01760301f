"""Names a collective in the error that it raises."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["Phase"]


@dataclass(frozen=True)
class Phase:
    """A context for one collective of a layer: an error, a timeout say, gets a note of whose it was.

    Attributes:
        name: counts, slots, dispatch or combine.
        group: the EP group.
        layer: the full name of the experts module, if it is known.
    """

    name: str
    group: ProcessGroup | None = None
    layer: str | None = None

    def backward(self) -> Phase:
        """The same in backward."""
        return replace(self, name=f"{self.name}, in backward")

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            return
        who = "a rank whose groups are gone" if self.group else "the only rank"
        with suppress(Exception):  # `error` is what counts
            rank = dist.get_rank()
            ranks = [rank] if self.group is None else dist.get_process_group_ranks(self.group)
            who = f"rank {rank}, in the EP group of ranks {ranks}"
        error.add_note(
            f"{who}, layer {self.layer or '(not named)'}, phase: {self.name}. If it timed out, see what "
            "the other ranks of the group do, and at which step."
        )
