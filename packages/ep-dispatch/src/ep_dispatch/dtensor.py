"""DTensor inputs: an implementation works on this rank's plain tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

__all__ = ["like_input", "local_inputs"]


def _placement(sequence_parallel: bool) -> Placement:
    return Shard(0) if sequence_parallel else Replicate()


def local_inputs(
    inputs: Sequence[Tensor], tp_group: ProcessGroup | None, sequence_parallel: bool
) -> list[Tensor]:
    """This rank's plain tensors: the whole batch, or its slice of tokens with `sequence_parallel`.

    Cost: none for plain tensors and for DTensors placed so already, else one redistribution over
    `tp_group` each.

    Raises:
        ValueError: a DTensor on other ranks than those of `tp_group`.
    """
    return [_local(x, tp_group, sequence_parallel) if isinstance(x, DTensor) else x for x in inputs]


def _local(x: DTensor, tp_group: ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    mesh = x.device_mesh
    if mesh.size() > 1:
        ranks = mesh.mesh.flatten().tolist()
        expected = [dist.get_rank()] if tp_group is None else dist.get_process_group_ranks(tp_group)
        if mesh.ndim != 1 or ranks != list(expected):
            raise ValueError(
                f"a DTensor input must live on a one-dimensional mesh of the ranks that share the "
                f"batch, {list(expected)}, got a mesh of {mesh.ndim} dimensions over {ranks}; pass "
                "`x.to_local()` or `x.full_tensor()`, whichever holds this rank's tokens."
            )
    target = [_placement(sequence_parallel)] * mesh.ndim
    return x.redistribute(placements=target).to_local()


def like_input(output: Tensor, hidden_states: Tensor, sequence_parallel: bool) -> Tensor:
    """`output` as a DTensor of the hidden states' mesh, shape and placement, if those were one."""
    if not isinstance(hidden_states, DTensor):
        return output
    mesh = hidden_states.device_mesh
    placed = DTensor.from_local(
        output,
        mesh,
        [_placement(sequence_parallel)] * mesh.ndim,
        run_check=False,
        shape=hidden_states.shape,
        stride=(hidden_states.shape[1], 1),
    )
    if any(placement.is_partial() for placement in hidden_states.placements):
        return placed  # an output is never a sum that is still to be done
    return placed.redistribute(placements=hidden_states.placements)
