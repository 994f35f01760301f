"""Llama 4: only the selected tokens reach an expert.

The released block scales a copy of every token for every expert (by zero where the expert was not
selected) and runs all of them. Its experts have no bias, so a row of zeros gives zeros, and running
the selected rows alone is the same function at 1/E of the work.

Shapes: T tokens of this rank, H hidden size, K experts per token, E experts of the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ep_dispatch import EPImplementation
from ep_plans.styles.base import Context, Forward, Scope, Style, around_forward, local
from ep_plans.styles.experts import build_implementation, check_dispatched


class DispatchLlama4(Style):
    """`ep_implementation` brings Llama 4's experts their selected tokens."""

    scope = Scope.EXPERTS
    dispatches = True

    def check(self, model: nn.Module, name: str) -> None:
        """The number of experts is known."""
        check_dispatched(model, name)

    def prepare(self, context: Context) -> EPImplementation:
        """Build the implementation."""
        # What the released class does not say about its weights [E, H, 2I] and [E, I, H].
        facts = {
            "has_gate": True,
            "has_bias": False,
            "is_transposed": True,
            "is_concatenated": True,
        }
        context.module.__dict__.update(facts)
        return build_implementation(context)

    def install(self, context: Context) -> None:
        """Replace the forward of the experts and of the block around them."""
        experts, block = context.module, context.parent
        implementation: EPImplementation = context.prepared

        def run_experts(forward: Forward, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return implementation(local(hidden), index, weights)

        def run_block(forward: Forward, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
            router: Any = block.router
            shared: Any = block.shared_expert
            scores, logits = router(hidden)  # [T, E], zero where not selected
            index = torch.topk(logits, router.top_k, dim=1).indices  # [T, K]
            # The score goes in before the expert's nonlinearity, so it cannot be a routing weight.
            rows = hidden.unsqueeze(1) * scores.gather(1, index).unsqueeze(-1)  # [T, K, H]
            ones = rows.new_ones((rows.shape[0] * router.top_k, 1))
            routed = experts(rows.flatten(0, 1), index.reshape(-1, 1), ones)
            return shared(hidden) + routed.view_as(rows).sum(dim=1), logits

        around_forward(experts, run_experts)
        around_forward(block, run_block)
