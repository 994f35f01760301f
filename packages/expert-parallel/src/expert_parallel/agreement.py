"""Ranks that reach one verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


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
    told = agree(error)
    if error is not None:
        raise error
    if told is not None:
        rank, message = told
        raise OtherRankError(f"{what} failed on rank {rank}: {message}")


def agree(error: BaseException | None) -> tuple[int, str] | None:
    """The first rank that has an error, and its message; None if none has. All ranks must call."""
    mine = None if error is None else f"{type(error).__name__}: {error}"
    if not dist.is_initialized():
        return None if mine is None else (0, mine)
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, mine)
    return next(((rank, text) for rank, text in enumerate(messages) if text is not None), None)
