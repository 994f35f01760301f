"""The auxiliary load-balancing loss over the global batch.

    E experts of a layer, K experts per token, T tokens of a rank (over all layers)

transformers' loss is `E * sum_e f_e P_e`: of all tokens, `f_e` of the K choices fell on expert
`e`, whose mean probability was `P_e`. It is no mean over tokens, so the mean of the ranks'
values is another loss than the global batch's, and its gradient another gradient.

[Note: one value, one gradient]
`f` and `P` are sums over tokens, so one all-reduce of 2E + 1 numbers gives the global ones.
`f` has no gradient. A rank's logits enter `P` only through its own sum `s_r`, so with
`P_e = global + D * (s_r - s_r.detach()) / tokens` every rank has the value of the global loss,
and D times its own part of the gradient: the mean over the D data shards, which the gradients are
reduced by, is the sum of the parts, whatever D.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_mesh import ParallelMesh
from ep_plans import parallel_state
from ep_plans.sizes import text_config


def load_sums(
    router_logits_TE: Sequence[Tensor], top_k: int, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choices per expert [E], probabilities per expert [E] (differentiable), tokens [].

    Float32, or float64 of such logits. The sums are over the layers too; tokens that `attention_mask` hides
    don't count.
    """
    device = router_logits_TE[0].device
    num_experts = router_logits_TE[0].shape[-1]
    wide = torch.promote_types(router_logits_TE[0].dtype, torch.float32)
    choices = torch.zeros(num_experts, dtype=wide, device=device)
    probabilities = torch.zeros(num_experts, dtype=wide, device=device)
    tokens = torch.zeros((), dtype=wide, device=device)
    for logits_TE in router_logits_TE:
        weights_TE = logits_TE.to(device).softmax(-1)
        mask_T = (
            weights_TE.new_ones(weights_TE.shape[0], dtype=wide)
            if attention_mask is None
            else attention_mask.reshape(-1).to(device, wide)
        )
        chosen_TK = weights_TE.detach().topk(top_k, dim=-1).indices
        choices = choices.index_add(
            0, chosen_TK.reshape(-1), mask_T.repeat_interleave(chosen_TK.shape[1])
        )
        probabilities = probabilities + (weights_TE.to(wide) * mask_T[:, None]).sum(0)
        tokens = tokens + mask_T.sum()
    return choices, probabilities, tokens


def balancing_loss(choices: Tensor, probabilities: Tensor, tokens: Tensor) -> Tensor:
    """The load-balancing loss of transformers, from the sums."""
    return len(choices) * (choices / tokens * (probabilities / tokens)).sum()


def global_balancing_loss(
    choices: Tensor, probabilities: Tensor, tokens: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """The loss over the batches of all ranks of `group`, see the note above.

    One all-reduce of 2E + 1 numbers.
    """
    shards = dist.get_world_size(group)
    sums = torch.cat([choices, probabilities.detach(), tokens.reshape(1)])
    if shards > 1:
        dist.all_reduce(sums, group=group)
    choices_all, probabilities_all, tokens_all = sums.split([len(choices), len(choices), 1])
    tokens_all = tokens_all.clamp(min=1)
    own = shards * (probabilities - probabilities.detach())
    return balancing_loss(choices_all, probabilities_all + own, tokens_all.squeeze(0))


def balancing_loss_of_shards(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same from one vector [2E + 1] of choices, probabilities and tokens, perhaps of no token."""
    experts = (len(sums) - 1) // 2
    choices, probabilities, tokens = sums.split([experts, experts, 1])
    return global_balancing_loss(choices.detach(), probabilities, tokens.detach()[0], group)


@dataclass
class BalancingLoss:
    """Replaces the auxiliary loss in a model's loss by that of the global batch.

    `EPTrainer` does so by itself; this is for a loop of one's own (`BalancingLoss.of(model)`). The
    model's own code adds `coefficient * aux_loss` of its batch. On the first batch the value
    is computed here too, and if the two differ (a model with a formula of its own) it is left as
    the model has it, with a warning.

    Args:
        coefficient: the weight of the auxiliary loss.
        top_k: experts per token.
        mesh: whose `dp` axis holds the batches.
    """

    coefficient: float
    top_k: int
    mesh: ParallelMesh
    _same_formula: bool | None = field(default=None, init=False)

    @classmethod
    def of(cls, model: nn.Module, mesh: ParallelMesh | None = None) -> Self | None:
        """For a model whose config has the coefficient and top-k; None without.

        Args:
            model: a causal language model of transformers.
            mesh: that holds the batches; None: that of the sharded model.

        Raises:
            ValueError: there is no mesh.
        """
        if mesh is None:
            state = parallel_state(model)
            if state is None:
                raise ValueError(
                    f"{type(model).__name__} is not sharded, so nothing tells which ranks hold the other "
                    "batches: call parallelize first, or give the mesh."
                )
            mesh = state.mesh
        text = text_config(model)
        coefficient = getattr(model, "router_aux_loss_coef", None)
        if coefficient is None:
            coefficient = getattr(text, "router_aux_loss_coef", None)
        top_k = getattr(model, "num_experts_per_tok", None)
        if top_k is None:
            top_k = getattr(text, "num_experts_per_tok", None)
        if not coefficient or not top_k:
            return None
        return cls(float(coefficient), int(top_k), mesh)

    def over_global_batch(
        self,
        loss: Tensor,
        outputs: Any,
        attention_mask: Tensor | None = None,
        *,
        weight: int = 1,
        real_rows: tuple[int, int] | None = None,
    ) -> Tensor:
        """`loss` with `weight * aux_loss` of this rank's batch taken out, the global's put in.

        The mean of its gradient over the data shards is then that of one process, see the note above.
        Every rank calls it, for each micro-batch. Nothing is done where the outputs hold no router
        logits: the model adds no auxiliary loss then.

        Args:
            loss: [] of this rank's batch, from these outputs.
            outputs: of the model, asked for router logits.
            attention_mask: of the batch; hidden tokens don't count.
            weight: what the model's loss was multiplied by since.
            real_rows: the first so many of so many rows are in the global batch; None: all are.

        Cost: one all-reduce of 2E + 1 numbers over the data shards; at the first call one more and a
        host synchronization.
        """
        own = outputs.get("aux_loss") if isinstance(outputs, dict) else None
        logits = outputs.get("router_logits") if isinstance(outputs, dict) else None
        if not isinstance(own, Tensor) or not logits:
            return loss
        sums = load_sums(logits, self.top_k, attention_mask)
        if self._same_formula is None:
            self._same_formula = self._agrees(balancing_loss(*sums), own)
        if not self._same_formula:
            return loss
        if real_rows is not None:
            hidden = _without_rows(attention_mask, logits[0], *real_rows)
            sums = load_sums(logits, self.top_k, hidden)
        whole = global_balancing_loss(*sums, self.mesh.group("dp"))
        return loss + self.coefficient * (whole - weight * own).to(loss.device)

    def _agrees(self, ours: Tensor, own: Tensor) -> bool:
        """Whether both are the same number on all ranks."""
        near = torch.isclose(ours.detach(), own.detach().to(ours.dtype), rtol=1e-2, atol=1e-4)
        differ = (~near).to(torch.int32)
        dist.all_reduce(differ, op=dist.ReduceOp.MAX)
        if not differ.item():
            return True
        warnings.warn(
            f"the model's auxiliary loss ({own.item():.6g}) is not the usual one "
            f"({ours.item():.6g}): it stays a mean over the ranks' batches, which is not the "
            "global batch's.",
            stacklevel=4,
        )
        return False


def _without_rows(attention_mask: Tensor | None, logits_TE: Tensor, real: int, rows: int) -> Tensor:
    """The mask [rows, T / rows] with the rows from `real` on hidden."""
    if attention_mask is None:
        attention_mask = logits_TE.new_ones(rows, logits_TE.shape[0] // rows)
    mask = attention_mask.reshape(rows, -1).clone()
    mask[real:] = 0
    return mask
