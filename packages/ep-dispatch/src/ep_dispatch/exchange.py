"""Exchanges between the ranks of a group that `ep_dispatch.links` makes differentiable.

N = rows sent, R = rows received, H = width of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import _all_to_all, _start_all_to_all
from .keeping import kept, replays
from .phase import Phase
from .wire import decode, encode, gradient_dtype

__all__ = ["Flight", "RowExchange", "SlotExchange"]


class Flight:
    """Rows on their way. What is read and written meanwhile lives as long as this or the exchange does.

    Where a recomputation `replays`, nothing travels: what is kept comes, zeros in place of other rows.
    """

    def __init__(
        self,
        x: Tensor,
        group: ProcessGroup,
        send: Sequence[int],
        receive: Sequence[int],
        wire: torch.dtype | None,
        phase: Phase,
        *,
        keep: bool = False,
    ) -> None:
        self._wire, self._dtype, self._phase, self._keep = wire, x.dtype, phase, keep
        self._zeros: Tensor | None = None
        if replays():
            if not keep:
                self._zeros = x.new_zeros((sum(receive), *x.shape[1:]))
            return
        self._sent = encode(x, wire).contiguous()
        with phase:
            self._work, self._arriving = _start_all_to_all(
                self._sent, group, list(send), list(receive)
            )

    def wait(self) -> Tensor:
        """The rows that came. The host waits with gloo, the current stream with NCCL."""
        if self._zeros is not None:
            return self._zeros
        arrived = kept(self._landed, own=True) if self._keep else self._landed()
        return decode(arrived, self._wire, self._dtype)

    def _landed(self) -> Tensor:
        with self._phase:
            self._work.wait()
        return self._arriving


@dataclass(frozen=True)
class RowExchange:
    """Rows [N, H] there, `send[p]` to rank p of the group, and [R, H], `receive[p]` from it.

    Attributes:
        group: the ranks.
        send, receive: rows to and from each.
        phase: its name in an error.
        wire: what they are cast to on the way there; `wire.gradient_dtype` of it on the way back.
        keep: whether what comes is kept where checkpointing `keep_communicated`.
    """

    group: ProcessGroup
    send: Sequence[int]
    receive: Sequence[int]
    phase: Phase
    wire: torch.dtype | None = None
    keep: bool = True

    def start(self, rows: Tensor) -> Flight:
        """One all-to-all, which goes on by itself."""
        return Flight(
            rows, self.group, self.send, self.receive, self.wire, self.phase, keep=self.keep
        )

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
        """What the other ranks sent of each: one all-to-all for all tensors.

        Kept are weights alone: a recomputation has the routing, so that it asks for nothing else.
        """
        if replays() and all(x.is_floating_point() for x in tensors):
            return [kept(functools.partial(_known, x), own=True) for x in tensors]
        return [
            kept(functools.partial(_known, part), own=True) if part.is_floating_point() else part
            for part in self._there(tensors)
        ]

    def _there(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        sizes = [x.element_size() for x in tensors]
        pieces = [
            x.contiguous().view(torch.uint8).view(-1, size)
            for x, size in zip(tensors, sizes, strict=True)
        ]
        packed = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
        with self.phase:
            parts = _all_to_all(packed, self.group, list(self.send), list(self.receive))
        if len(pieces) == 1:
            return [parts.view(-1).view(tensors[0].dtype)]
        # Cloned, so that each begins where its dtype may begin.
        return [
            part.clone(memory_format=torch.contiguous_format).view(-1).view(x.dtype)
            for part, x in zip(parts.split(sizes, dim=1), tensors, strict=True)
        ]

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of what went there, from that of what came: one all-to-all."""
        with self.phase.backward():
            return _all_to_all(gradient, self.group, list(self.receive), list(self.send))


def _known(x: Tensor) -> Tensor:
    return x
