"""`all_to_all_hierarchical`: a token crosses to another node once, whatever number of its ranks it needs.

P = ranks of the EP group, spread over M nodes with L ranks each, E = experts of a layer.

    [T, H] -copy per node-> -all-to-all between the ranks at one place in each node-> [R1, H]
        -copy per owner in the node-> -all-to-all inside the node-> [R, H] -experts-> [R, H]
        -back inside the node, sum-> [R1, H] -back between nodes, sum-> [T, H]

The two hops are those of DeepEP's kernels for several nodes (https://github.com/deepseek-ai/DeepEP).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .all_to_all import AllToAll
from .implementation import ExpertsForward
from .stage import Stage

__all__ = ["HierarchicalAllToAll"]


class HierarchicalAllToAll(AllToAll):
    """`all_to_all` in two hops: between nodes, then inside each.

    A token is sent once to each node that holds any of its experts, to the rank at the sender's place
    there, which spreads it inside the node; partial sums come back once per node. Worth it where the
    links between nodes are slower than those inside: the rows inside a node are no fewer, and there is one
    more exchange. With one node it is `all_to_all`.

    Args:
        experts_forward: see `EPImplementation`.
        ranks_per_node: L, the ranks of a node, of consecutive global ranks. None: LOCAL_WORLD_SIZE, as
            torchrun sets it.
        settings: see `AllToAll`.

    Raises:
        ValueError: the number of ranks per node is not known, or the EP group has not the same number
            of consecutive ranks on each of its nodes.

    Cost of a forward: that of `all_to_all` for each hop, so two host synchronizations, and one more
    exchange of an integer per slot. Each rank makes two process groups, once for an EP group.
    """

    def __init__(
        self,
        experts_forward: ExpertsForward,
        *,
        ranks_per_node: int | None = None,
        **settings: Any,
    ) -> None:
        self.ranks_per_node = ranks_per_node
        super().__init__(experts_forward, **settings)

    def _make_stages(self) -> Sequence[Stage]:
        size = self.ep_size
        if self.ep_group is None or size == 1:
            return super()._make_stages()
        ranks = dist.get_process_group_ranks(self.ep_group)
        local = _ranks_on_each_node(ranks, self.ranks_per_node)
        if local == size:
            return super()._make_stages()
        place, node = self.ep_rank % local, self.ep_rank // local
        inside = _group(self.ep_group, ranks[node * local : (node + 1) * local])
        across = _group(self.ep_group, ranks[place::local])
        return [
            Stage(across, self.num_experts),
            Stage(inside, self.num_local_experts * local),
        ]


def _ranks_on_each_node(ranks: Sequence[int], ranks_per_node: int | None) -> int:
    """How many of the ranks of an EP group lie on each of its nodes."""
    if ranks_per_node is None:
        launched = os.environ.get("LOCAL_WORLD_SIZE")
        if launched is None:
            raise ValueError(
                "all_to_all_hierarchical must know how many ranks a node has: start with torchrun, which "
                "sets LOCAL_WORLD_SIZE, or pass ranks_per_node."
            )
        ranks_per_node = int(launched)
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node must be at least 1, got {ranks_per_node}.")
    nodes = [rank // ranks_per_node for rank in ranks]
    local = nodes.count(nodes[0])
    expected = [node for node in dict.fromkeys(nodes) for _ in range(local)]
    if nodes != expected:
        raise ValueError(
            "all_to_all_hierarchical needs the same number of consecutive ranks of the EP group on each "
            f"node, got ranks {list(ranks)} with {ranks_per_node} ranks a node, so nodes {nodes}; use "
            '"all_to_all", or an ep_size that divides, or is a multiple of, the ranks of a node.'
        )
    return local


# By EP group, so that the layers of a model share them; an entry goes with its group.
_groups: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup | None]]
_groups = WeakKeyDictionary()


def _group(ep_group: ProcessGroup, ranks: list[int]) -> ProcessGroup | None:
    """The group of some ranks of the EP group; made by those alone, on the first request."""
    if len(ranks) == 1:
        return None
    made = _groups.setdefault(ep_group, {})
    key = tuple(ranks)
    if key not in made:
        made[key] = dist.new_group(ranks, use_local_synchronization=True)
    return made[key]
