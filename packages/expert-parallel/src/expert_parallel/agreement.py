"""Ranks that reach one verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ep_mesh.world import gathered


class OtherRankError(RuntimeError):
    """This rank was fine, another one was not; the message holds what it said."""


@contextmanager
def all_or_none(what: str) -> Iterator[None]:
    """Run the body on every rank of the world; if it raised on one, raise on all.

    The body must not communicate after a point where it may raise on some ranks only.

    Args:
        what: what is being done, for the message.

    Raises:
        OtherRankError: on ranks whose body was fine, with the first failed rank's message.

    Costs one gather of small objects, which is a host synchronization.
    """
    error: BaseException | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
        error = caught
    raise_together(error, what)


def raise_together(
    error: BaseException | None, what: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raise `error` here and `OtherRankError` elsewhere, or nothing if no rank has one.

    Every rank of `group` (None: the world) must call.
    """
    if dist.is_initialized():
        mine = None if error is None else f"{type(error).__name__}: {error}"
        messages = gathered(mine, group)
        failed = [rank for rank, message in enumerate(messages) if message is not None]
        if failed and error is None:
            rank = dist.get_process_group_ranks(group)[failed[0]]
            raise OtherRankError(f"{what} failed on rank {rank}: {messages[failed[0]]}")
    if error is not None:
        raise error
