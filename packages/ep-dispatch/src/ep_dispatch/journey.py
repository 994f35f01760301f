"""The way of rows through the exchanges of `all_to_all`, in two halves between which others may work.

T = tokens of this rank, H = hidden size, R = rows received.
"""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from .exchange import RowExchange
from .links import Trip, start_linked, wait_linked

__all__ = ["Journey", "Legs"]

Legs = Generator[tuple[Tensor, RowExchange], Tensor, Tensor]
"""Gives rows and the exchange that they shall take, gets what came, and returns the last rows."""


class Journey:
    """Rows that take one exchange after the other.

    `start` sends them off on the first. `finish` waits for it, and runs those that follow: a second hop
    can begin only when the first has arrived.

    Args:
        legs: the exchanges, and the work between them.
        linked: whether their gradients go back; if not, the link passes by.
    """

    def __init__(self, legs: Legs, *, linked: bool) -> None:
        self._legs, self._linked = legs, linked
        self._trip: Trip | None = None
        self._rows: Tensor | None = None

    def start(self, link: Tensor | None) -> Tensor | None:
        """Begin; gives the link as it goes on."""
        return self._go(link, None)

    def finish(self, link: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """End; gives the link as it goes on, and the last rows."""
        while (trip := self._trip) is not None:
            self._trip = None
            after, rows = wait_linked(link if self._linked else None, trip)
            link = self._go(link if after is None else after, rows)
        last, self._rows = self._rows, None
        assert last is not None
        return link, last

    def _go(self, link: Tensor | None, rows: Tensor | None) -> Tensor | None:
        try:
            leaving, exchange = next(self._legs) if rows is None else self._legs.send(rows)
        except StopIteration as end:
            self._rows = end.value
            return link
        after, self._trip = start_linked(link if self._linked else None, leaving, exchange)
        return link if after is None else after
