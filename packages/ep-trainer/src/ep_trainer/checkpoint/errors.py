"""Errors of checkpoints, and ranks that reach one verdict about them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ep_mesh.world import gathered


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, of another model or of another program.

    The message names the file and the key.
    """


def exchange(
    value: Any, error: BaseException | None, what: str, group: dist.ProcessGroup | None
) -> list[Any]:
    """What every rank has to say, by rank; if one has an error, raise on all of them.

    Args:
        value: this rank's word; anything that can be pickled.
        error: what went wrong on this rank.
        what: what is being done, for the message.
        group: whose ranks call; None: the world.

    Raises:
        CheckpointError: another rank failed; names it and what it said.

    Costs one all-gather of objects.
    """
    mine = None if error is None else f"{type(error).__name__}: {error}"
    said = gathered((value, mine), group)
    if error is not None:
        raise error
    return _checked(said, what)


def collect(
    value: Any, error: BaseException | None, what: str, group: dist.ProcessGroup | None
) -> list[Any]:
    """As `exchange`, but the first rank alone hears what was said, and alone raises.

    `settle` must follow. Costs one gather of objects.
    """
    mine = None if error is None else f"{type(error).__name__}: {error}"
    said: list[Any] = [(value, mine)]
    if dist.is_initialized():
        if dist.get_rank() != 0:
            dist.gather_object((value, mine), None, group=group)
            return []
        said = [None] * dist.get_world_size(group)
        dist.gather_object((value, mine), said, group=group)
    return _checked(said, what)


def settle(
    error: BaseException | None, firsts: BaseException | None, group: dist.ProcessGroup | None
) -> None:
    """Raise on every rank if the first one says so.

    Args:
        error: what went wrong on this rank, if something did.
        firsts: what the first rank raises; not looked at on others.
        group: whose ranks call; None: the world.

    Costs one broadcast of an object.
    """
    word = [None if firsts is None else str(firsts)]
    if dist.is_initialized():
        dist.broadcast_object_list(word, src=0, group=group)
    if error is not None:
        raise error
    if word[0] is not None:
        raise firsts or CheckpointError(word[0])


def _checked(said: list[Any], what: str) -> list[Any]:
    for rank, (_, message) in enumerate(said):
        if message is not None:
            raise CheckpointError(f"{what} failed on rank {rank}: {message}")
    return [each for each, _ in said]
