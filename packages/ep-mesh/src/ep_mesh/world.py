"""The processes of this run, with `torch.distributed` or without."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

Said = TypeVar("Said")


def world_size() -> int:
    """Ranks of the world; 1 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    """This rank of the world; 0 without `torch.distributed`."""
    return dist.get_rank() if dist.is_initialized() else 0


def gathered(value: Said, group: dist.ProcessGroup | None = None) -> list[Said]:
    """What each rank of `group` (None: the world) says, in their order, on all of them.

    `value` can be pickled. Cost: one all-gather of objects, a host synchronization; none for one rank.
    """
    size = world_size() if group is None else dist.get_world_size(group)
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values
