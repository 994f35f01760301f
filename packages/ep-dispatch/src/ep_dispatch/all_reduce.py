"""`all_reduce`: every rank runs its experts on the whole shared batch, and a sum puts the parts together.

T = tokens of the batch, H = hidden size, K = experts per token, P = ranks of the EP group.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from . import checks
from .checkpointing import CheckpointMemory
from .implementation import EPImplementation, ExpertsForward
from .links import join_parameters, new_link, share_linked, sum_linked
from .routing import SKIPPED, local_routes

__all__ = ["AllReduce"]


class AllReduce(EPImplementation):
    """Every rank runs its experts on the whole batch, other ranks' routes masked; an all-reduce sums.

    Needs an EP group that shares one batch. No token moves and nothing is read back to the host, so a
    decoding step can be captured in a CUDA graph. The ranks' parts are summed in the hidden states'
    dtype.

    Each rank checks its own inputs, and nobody asks the others: where one raises, the others wait for it.
    Expert ids out of range are an error on the CPU; on a device, where looking would be a host
    synchronization, and under torch.compile such a slot is skipped.

    Inside `torch.utils.checkpoint.checkpoint(use_reentrant=False)` the recomputation uses the expert ids of
    the forward, as `AllToAll` does.

    Cost: one all-reduce of [T, H]; in backward one all-reduce each of the gradients of hidden states
    and routing weights, if needed. The experts' own cost grows with the whole batch.
    """

    needs_shared_batch: ClassVar[bool] = True

    def __init__(self, experts_forward: ExpertsForward, **settings: Any) -> None:
        super().__init__(experts_forward, **settings)
        self._memory = CheckpointMemory[Tensor]()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Mask, run the experts, sum."""
        if problem := checks.inputs_problem(hidden_states, top_k_index, top_k_weights):
            raise ValueError(problem)
        at_hand = top_k_index.device.type == "cpu" and not torch.compiler.is_compiling()
        if at_hand and top_k_index.numel():
            low, high = (bound.item() for bound in top_k_index.aminmax())
            if low < SKIPPED or high >= self.num_experts:
                raise ValueError(checks.ids_problem(top_k_index, self.num_experts))
        top_k_index = self._memory.kept(top_k_index)
        rows, weights, link = hidden_states, top_k_weights, None
        if self.ep_group is not None and self.ep_size > 1:
            # The ranks share the batch and its history, so they need the same gradients.
            needs = hidden_states.requires_grad, top_k_weights.requires_grad
            if torch.is_grad_enabled() and any(needs):
                link = new_link(hidden_states.device)
            link, (rows, weights) = share_linked(
                link, (rows, weights), needs, self.ep_group, self.phase("dispatch")
            )
        ids, foreign = local_routes(top_k_index, self.ep_rank, self.num_local_experts)
        # Masked before anything multiplies: an expert must not see the weight of a route that is not
        # its own, nor that weight its expert's gradient.
        partial = self.run_experts(rows, ids, weights.masked_fill(foreign, 0))
        if torch.is_grad_enabled():
            # Which experts got a token is not known to the host, so all parameters are joined.
            partial = join_parameters(partial, self.expert_parameters())
        partial = partial.to(hidden_states.dtype)
        if self.ep_group is None or self.ep_size == 1:
            return partial
        if link is None and partial.requires_grad:
            link = new_link(partial.device)
        with self.phase("combine"):
            return sum_linked(link, partial, self.ep_group)
