"""Exchanges between the ranks of a group that `links.exchange_linked` makes differentiable.

N = rows sent, R = rows received, H = width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import _all_to_all
from .wire import backward_dtype, decode, encode

__all__ = ["Exchange", "RowExchange", "SlotExchange"]


class Exchange(Protocol):
    """A way there for several tensors, and back for the gradient of each."""

    def there(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the other ranks sent of each."""
        ...

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of what went there, from that of what came."""
        ...


@dataclass(frozen=True)
class RowExchange:
    """Rows [N, H] there, `send[p]` to rank p of the group, and [R, H], `receive[p]` from it.

    Attributes:
        group: the ranks.
        send, receive: rows to and from each.
        wire: what they are cast to on the way there; `wire.backward_dtype` of it on the way back.
    """

    group: ProcessGroup
    send: Sequence[int]
    receive: Sequence[int]
    wire: torch.dtype | None = None

    def there(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One all-to-all for each tensor."""
        return [_move(x, self.group, self.send, self.receive, self.wire) for x in tensors]

    def back(self, gradient: Tensor) -> Tensor:
        """One all-to-all, the other way."""
        wire = backward_dtype(self.wire)
        return _move(gradient, self.group, self.receive, self.send, wire)


@dataclass(frozen=True)
class SlotExchange:
    """Facts of slots, tensors [S] of any dtypes, side by side as bytes in one all-to-all."""

    group: ProcessGroup
    send: Sequence[int]
    receive: Sequence[int]

    def there(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One all-to-all for all tensors."""
        sizes = [x.element_size() for x in tensors]
        pieces = [
            x.contiguous().view(torch.uint8).view(-1, size)
            for x, size in zip(tensors, sizes, strict=True)
        ]
        packed = torch.cat(pieces, dim=1)
        parts = _all_to_all(packed, self.group, list(self.send), list(self.receive))
        # Cloned, so that each begins where its dtype may begin.
        return [
            part.reshape(-1).clone().view(x.dtype)
            for part, x in zip(parts.split(sizes, dim=1), tensors, strict=True)
        ]

    def back(self, gradient: Tensor) -> Tensor:
        """One all-to-all, the other way."""
        return _all_to_all(gradient, self.group, list(self.receive), list(self.send))


def _move(
    x: Tensor,
    group: ProcessGroup,
    send: Sequence[int],
    receive: Sequence[int],
    wire: torch.dtype | None,
) -> Tensor:
    arrived = _all_to_all(encode(x, wire), group, list(send), list(receive))
    return decode(arrived, wire, x.dtype)
