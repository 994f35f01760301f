"""Exchanges between the ranks of a group that `ep_dispatch.links` makes differentiable.

N = rows sent, R = rows received, H = width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import _all_to_all, _start_all_to_all
from .phase import Phase
from .wire import decode, encode, gradient_dtype

__all__ = ["Flight", "RowExchange", "SlotExchange"]


class Flight:
    """Rows on their way. What is read and written meanwhile lives as long as this or the exchange does."""

    def __init__(
        self,
        x: Tensor,
        group: ProcessGroup,
        send: Sequence[int],
        receive: Sequence[int],
        wire: torch.dtype | None,
        phase: Phase,
    ) -> None:
        self._wire, self._dtype, self._phase = wire, x.dtype, phase
        self._sent = encode(x, wire).contiguous()
        with phase:
            self._work, self._arriving = _start_all_to_all(
                self._sent, group, list(send), list(receive)
            )

    def wait(self) -> Tensor:
        """The rows that came. The host waits with gloo, the current stream with NCCL."""
        with self._phase:
            self._work.wait()
        return decode(self._arriving, self._wire, self._dtype)


@dataclass(frozen=True)
class RowExchange:
    """Rows [N, H] there, `send[p]` to rank p of the group, and [R, H], `receive[p]` from it.

    Attributes:
        group: the ranks.
        send, receive: rows to and from each.
        phase: its name in an error.
        wire: what they are cast to on the way there; `wire.gradient_dtype` of it on the way back.
    """

    group: ProcessGroup
    send: Sequence[int]
    receive: Sequence[int]
    phase: Phase
    wire: torch.dtype | None = None

    def start(self, rows: Tensor) -> Flight:
        """One all-to-all, which goes on by itself."""
        return Flight(rows, self.group, self.send, self.receive, self.wire, self.phase)

    def start_back(self, gradient: Tensor) -> Flight:
        """One all-to-all, the other way, which goes on by itself."""
        wire = gradient_dtype(self.wire)
        phase = self.phase.backward()
        return Flight(gradient, self.group, self.receive, self.send, wire, phase)


@dataclass(frozen=True)
class SlotExchange:
    """Facts of slots, tensors [S] of any dtypes, side by side as bytes in one all-to-all."""

    group: ProcessGroup
    send: Sequence[int]
    receive: Sequence[int]
    phase: Phase

    def there(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the other ranks sent of each: one all-to-all for all tensors."""
        sizes = [x.element_size() for x in tensors]
        pieces = [
            x.contiguous().view(torch.uint8).view(-1, size)
            for x, size in zip(tensors, sizes, strict=True)
        ]
        packed = torch.cat(pieces, dim=1)
        with self.phase:
            parts = _all_to_all(packed, self.group, list(self.send), list(self.receive))
        # Cloned, so that each begins where its dtype may begin.
        return [
            part.reshape(-1).clone().view(x.dtype)
            for part, x in zip(parts.split(sizes, dim=1), tensors, strict=True)
        ]

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of what went there, from that of what came: one all-to-all."""
        with self.phase.backward():
            return _all_to_all(gradient, self.group, list(self.receive), list(self.send))
