"""What comes later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Pending"]

ResultT = TypeVar("ResultT")


class Pending(Generic[ResultT]):
    """Rows on their way. Wait once, in the same order on all ranks.

    The tensors that are sent and received live until then. One that is dropped instead, on all ranks of
    the group, costs nothing more: its exchange ends by itself, torch keeps the tensors until it has,
    and nothing goes back in backward.
    """

    def __init__(self, end: Callable[[], ResultT]) -> None:
        self._end: Callable[[], ResultT] | None = end

    def wait(self) -> ResultT:
        """Wait for the rows (the host with gloo, the current stream with NCCL), and give the result.

        Raises:
            RuntimeError: it was waited for before.
        """
        if self._end is None:
            raise RuntimeError("these rows were waited for already; keep what `wait` gave.")
        end, self._end = self._end, None
        return end()
