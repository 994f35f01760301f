"""A sharded parameter as a lazy tensor that the first rank reads from the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from expert_parallel.boxes import Box, intersection, lengths, numel, pieces, positions, whole_box
from expert_parallel.lazy import LazyTensor, Node, block
from expert_parallel.shards import holders

ROOT = 0  # the rank that gathers


class GatheredTensor(Node):
    """A parameter, or buffer, of which each rank holds a box.

    Reading is collective: every rank reads the same boxes of the same tensors in the same order,
    the root into real memory and the others into meta tensors. A part goes from one rank that
    holds it straight to the root; copies are not sent.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.rank = dist.get_rank() if dist.is_initialized() else ROOT
        if isinstance(tensor, DTensor):
            self.local = tensor.to_local().detach()
            self.parts = _one_holder_each(holders(tensor))
        else:
            # Whole on every rank: the root has its own.
            self.local = tensor.detach()
            self.parts = {ROOT: whole_box(tensor.shape)}

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Send this rank's part of the box, or receive all parts."""
        for rank, held in self.parts.items():
            part = intersection(box, held)
            if not numel(part):
                continue
            if self.rank == ROOT:
                if rank == ROOT:
                    received = _taken(self.local, positions(part, held))
                else:
                    received = torch.empty(
                        lengths(part), dtype=self.dtype, device=self.local.device
                    )
                    dist.recv(_as_bytes(received), src=rank)
                for place, local in pieces(positions(part, box)):
                    block(out, place).copy_(block(received, local))
            elif self.rank == rank:
                sent = _taken(self.local, positions(part, held)).contiguous()
                dist.send(_as_bytes(sent), dst=ROOT)


def gathered(tensor: torch.Tensor) -> LazyTensor:
    """A lazy tensor over the parts of `tensor`."""
    return LazyTensor(GatheredTensor(tensor))


def _one_holder_each(boxes: dict[int, Box]) -> dict[int, Box]:
    """One rank per distinct box: the root if it holds it, else the first.

    Nothing for ranks whose mesh does not have the root: another replica sends.
    """
    if ROOT not in boxes:
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
