"""A sharded parameter as a lazy tensor that the first rank reads from the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ep_mesh.world import gathered as told_by_all
from ep_mesh.world import own_rank
from ep_plans import local, parallel_state
from ep_plans.boxes import Box, intersection, lengths, numel, pieces, positions, whole_box
from ep_plans.shards import holders
from expert_parallel.lazy import LazyTensor, Node, block

ROOT = 0  # the rank that gathers


class Held(NamedTuple):
    """A tensor, and which ranks send which of its boxes.

    Attributes:
        shape: of the whole tensor.
        dtype: its dtype.
        parts: the box of each rank that sends one.
    """

    shape: torch.Size
    dtype: torch.dtype
    parts: dict[int, Box]


class GatheredTensor(Node):
    """A parameter, or buffer, of which each rank holds a box.

    Reading is collective: every rank reads the same boxes of the same tensors in the same order,
    the root into real memory and the others into meta tensors. A part goes from one rank that
    holds it straight to the root; copies are not sent.

    Args:
        held: which ranks send, and what.
        local: what this rank holds; None: nothing, another pipeline stage does.
        device: where parts are received.
    """

    def __init__(self, held: Held, local: torch.Tensor | None, device: torch.device) -> None:
        super().__init__(held.shape, held.dtype)
        self.rank = own_rank()
        self.parts, self.local, self.device = held.parts, local, device

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Send this rank's part of the box, or receive all parts."""
        for rank, held in self.parts.items():
            part = intersection(box, held)
            if not numel(part):
                continue
            if self.rank == ROOT:
                if rank == ROOT:
                    assert self.local is not None
                    received = _taken(self.local, positions(part, held))
                else:
                    received = torch.empty(lengths(part), dtype=self.dtype, device=self.device)
                    dist.recv(_as_bytes(received), src=rank)
                for place, inside in pieces(positions(part, box)):
                    block(out, place).copy_(block(received, inside))
            elif self.rank == rank:
                assert self.local is not None
                sent = _taken(self.local, positions(part, held)).contiguous()
                dist.send(_as_bytes(sent), dst=ROOT)


def gathered(tensors: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, LazyTensor]:
    """Lazy tensors over the parts of a model's tensors, those of all its pipeline stages.

    With stages one gather of names, shapes and holders over the `pp` axis: every rank must call.
    """
    state = parallel_state(model)
    pipeline = None if state is None else state.pipeline
    if state is None or pipeline is None:
        return {n: LazyTensor(_node(t, held_parts(t, ROOT))) for n, t in tensors.items()}
    # Of each stage the rank at the root's place is asked before the others.
    peers = state.mesh.layout.group("pp", ROOT)
    leader = peers[state.mesh.coordinate("pp")]
    own = {name: held_parts(tensor, leader) for name, tensor in tensors.items()}
    found: dict[str, LazyTensor] = {}
    for place, stage in enumerate(told_by_all(own, state.mesh.group("pp"))):
        for name, held in stage.items():
            if name not in found:
                mine = place == state.mesh.coordinate("pp")
                node = GatheredTensor(held, None, state.mesh.device)
                found[name] = LazyTensor(_node(tensors[name], held) if mine else node)
    # Names that are not the model's come last, stage by stage.
    order = {name: at for at, name in enumerate(pipeline.tensors)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def held_parts(tensor: torch.Tensor, leader: int) -> Held:
    """Which ranks send a tensor's parts; `leader` has a whole copy if there are any."""
    if isinstance(tensor, DTensor):
        parts = _one_holder_each(holders(tensor), leader)
    else:
        parts = {leader: whole_box(tensor.shape)}
    return Held(tensor.shape, tensor.dtype, parts)


def _node(tensor: torch.Tensor, held: Held) -> GatheredTensor:
    here = local(tensor).detach()
    return GatheredTensor(held, here, here.device)


def _one_holder_each(boxes: dict[int, Box], leader: int) -> dict[int, Box]:
    """One rank per distinct box: the first, which the leader is of those that hold its box.

    Nothing for ranks whose mesh does not have the leader: another replica sends.
    """
    if leader not in boxes:
        return {}
    by_box = {box: rank for rank, box in sorted(boxes.items(), reverse=True) if numel(box)}
    return {rank: box for box, rank in sorted(by_box.items(), key=lambda item: item[1])}


def _taken(local: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a local tensor: a view where it is one block."""
    blocks = pieces(box)
    if len(blocks) == 1:
        return block(local, blocks[0][0])
    taken = torch.empty(lengths(box), dtype=local.dtype, device=local.device)
    for place, target in blocks:
        block(taken, target).copy_(block(local, place))
    return taken


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
