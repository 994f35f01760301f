"""Collectives as a tracker sees them: which group, and what a rank sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_mesh import ParallelMesh

from ._compat import group_named
from .operators import tensors_of

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_AXES = ("dp_replicate", "fsdp", "fsdp_tp", "efsdp", "tp", "ep", "pp", "dp", "world")
_KINDS = (
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("broadcast", "broadcast"),
    ("send", "send"),
)


@dataclass(frozen=True)
class Call:
    """One collective of this rank, or a message that it sends.

    Attributes:
        kind: all_gather, all_to_all, send, ...
        axis: the axes of the layout whose groups have these ranks.
        sent: bytes to each rank of the group, in its order; a ring's share where all send alike.
        ranks: the group.
    """

    kind: str
    axis: str
    sent: tuple[float, ...]
    ranks: tuple[int, ...]

    def split(self, rank: int, per_node: int) -> tuple[float, float]:
        """Bytes inside the node of `rank`, and out of it."""
        node = rank // per_node
        inside = outside = 0.0
        for other, size in zip(self.ranks, self.sent, strict=True):
            if other != rank:
                inside, outside = (
                    (inside + size, outside)
                    if other // per_node == node
                    else (inside, outside + size)
                )
        if outside and self.kind not in ("all_to_all", "send"):
            # A ring of a node's ranks leaves it once: each of them carries its part.
            nodes = len({other // per_node for other in self.ranks})
            here = len(self.ranks) // nodes
            total = inside + outside
            return total * (here - 1) / max(1, here), total / max(1, here)
        return inside, outside


def call_of(
    func: Any, args: Sequence[Any], result: Any, axis: Callable[[tuple[int, ...]], str]
) -> Call | None:
    """The collective that an operator is, None if it is none, or of one rank."""
    name = func.overloadpacket.__name__
    kind = next((kind for part, kind in _KINDS if part in name), None)
    group = _group(args)
    if kind is None or group is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1:
        return None
    if kind == "send":
        size = float(sum(x.nbytes for x in tensors_of(args)))
        sent = tuple(size if place == args[2] else 0.0 for place in range(len(ranks)))
        return Call(kind, axis(ranks), sent, ranks)
    return Call(kind, axis(ranks), _sent(func, kind, args, result, len(ranks)), ranks)


def axis_of(mesh: ParallelMesh, ranks: Sequence[int]) -> str:
    """The names of the axes whose group of this rank has these ranks; `ep` for a part of its group."""
    names = [
        axis
        for axis in _AXES
        if mesh.size(axis) == len(ranks)
        and tuple(dist.get_process_group_ranks(mesh.group(axis))) == tuple(ranks)
    ]
    wide = [name for name in names if name not in ("dp", "world")]
    if names:
        return "=".join(wide or names[:1])
    # `all_to_all_hierarchical` has one group between nodes and one in each.
    inside = set(ranks) < set(dist.get_process_group_ranks(mesh.group("ep")))
    return "ep" if inside else "other"


def _group(args: Sequence[Any]) -> dist.ProcessGroup | None:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                group: dist.ProcessGroup = dist.ProcessGroup.unbox(value)
            except RuntimeError:  # a reduction, not a group
                continue
            return group
    names = [value for value in args if isinstance(value, str)]
    return group_named(names[-1]) if names else None


def _sent(func: Any, kind: str, args: Sequence[Any], result: Any, ranks: int) -> tuple[float, ...]:
    tensors = list(tensors_of(args))
    functional = func.namespace != "c10d"
    if kind == "all_to_all":
        source = tensors[0] if functional else tensors[1]
        splits = args[2] if functional else args[4]
        row = source.nbytes / max(1, source.shape[0])
        if not splits:
            return (source.nbytes / ranks,) * ranks
        return tuple(row * size for size in splits)
    size = float(tensors[0].nbytes)
    if kind == "all_gather":  # from the whole
        whole = float(sum(x.nbytes for x in tensors_of(result))) if functional else size
        return (whole / ranks,) * ranks
    if kind == "reduce_scatter":
        whole = size if functional else float(tensors[1].nbytes)
        return (whole / ranks,) * ranks
    return (2 * size / ranks,) * ranks
