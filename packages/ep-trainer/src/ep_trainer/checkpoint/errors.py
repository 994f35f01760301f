"""Errors of checkpoints, and ranks that reach one verdict about them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


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
    said: list[Any] = [(value, mine)]
    if dist.is_initialized():
        said = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, (value, mine), group=group)
    failed = [(rank, message) for rank, (_, message) in enumerate(said) if message is not None]
    if error is not None:
        raise error
    if failed:
        rank, message = failed[0]
        raise CheckpointError(f"{what} failed on rank {rank}: {message}")
    return [each for each, _ in said]
