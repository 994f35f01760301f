"""An experts module's own code as the function that `ep_dispatch` calls.

Shapes: R rows, H hidden size, J expert slots per row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ep_dispatch import ExpertsForward
from ep_dispatch.links import join_parameters
from ep_plans.styles.base import local, local_parameters


def own_experts_forward(experts: nn.Module) -> ExpertsForward:
    """Run `experts` by its own forward on the valid (row, slot) pairs.

    Works for every module whose forward takes `(hidden_states, top_k_index, top_k_weights)`, and
    for Llama 4's. Cost: one host sync per call. A kernel package gives faster functions.
    """
    # The method of the class: the instance's may be replaced by the one that calls us.
    forward = type(experts).forward.__get__(experts)
    sorted_rows_only = getattr(experts, "is_transposed", False) and not hasattr(experts, "config")

    def run(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        number = int(experts.num_experts)  # type: ignore[arg-type]
        row, slot = (index < number).nonzero(as_tuple=True)
        weight = weights[row, slot].unsqueeze(-1)
        ids = index[row, slot]
        chosen = rows[row]
        if row.numel() == 0:
            out = chosen * weight
        elif sorted_rows_only:
            out = _transposed_experts(experts, chosen, ids) * weight
        else:
            with local_parameters(experts):
                out = forward(chosen, ids.unsqueeze(-1), weight)
        # Half types are summed in float32.
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros(rows.shape, dtype=wide).index_add(0, row, out.to(wide))
        # Other ranks wait for the gradient of every parameter, that of unused ones too.
        trained = [p for p in experts.parameters() if p.requires_grad]
        return join_parameters(total.to(rows.dtype), trained)

    return run


def _transposed_experts(experts: nn.Module, rows: Tensor, ids: Tensor) -> Tensor:
    """A gated MLP per expert over weights [E, H, 2I] and [E, I, H]; rows in any order."""
    gate_up, down = (local(experts._parameters[n]) for n in ("gate_up_proj", "down_proj"))  # type: ignore[arg-type]
    out = rows.new_zeros((rows.shape[0], down.shape[-1]))
    for expert in range(gate_up.shape[0]):
        here = (ids == expert).nonzero().squeeze(-1)
        gate, up = (rows[here] @ gate_up[expert]).chunk(2, dim=-1)
        out = out.index_add(0, here, (up * experts.act_fn(gate)) @ down[expert])  # type: ignore[operator]
    return out
