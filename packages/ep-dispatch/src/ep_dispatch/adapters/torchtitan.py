"""Our `all_to_all` as a token dispatcher of torchtitan: no fork, one line of its configuration.

    --override.imports ep_dispatch.adapters.torchtitan.all_to_all

replaces its all-to-all dispatcher in every MoE layer. In code, or for one layer, the config is a field:

    from ep_dispatch.adapters.torchtitan import EPTokenDispatcher

    layer.moe.routed_experts.token_dispatcher = EPTokenDispatcher.Config(num_experts=64, top_k=6)

A token crosses once to each rank that holds any of its experts, where torchtitan's sends one row per
slot; the experts' weighted outputs are summed there, and one row comes back.

T = tokens of this rank, D = model dimension, K = experts per token, E = experts of a layer,
e = local experts, R = routed tokens of the local experts (torchtitan's letters).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_dispatch import _compat
from ep_dispatch.all_to_all import AllToAll
from ep_dispatch.plan import ReceivedRows, Ticket

__all__ = ["DispatchMetadata", "EPTokenDispatcher", "all_to_all"]

_theirs, _override = _compat.torchtitan_token_dispatchers()


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchMetadata:
    """What `EPTokenDispatcher.combine` needs of one `dispatch`. Nothing is kept on the dispatcher."""

    received: ReceivedRows
    ticket: Ticket


class EPTokenDispatcher(_theirs.BaseEPTokenDispatcher):  # type: ignore[misc, name-defined]
    """Dispatch and combine by `ep_dispatch.AllToAll`, as torchtitan's `RoutedExperts` calls them.

    torchtitan shards the tokens over TP and CP before its MoE, so no rank holds another's tokens. Without
    an EP mesh it reorders locally, as torchtitan's own all-to-all dispatcher does then.

    Runs in torchtitan's `partial_dtensor` and `spmd_types` backends. Our collectives do not declare types
    to `debug.spmd_typechecking`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_theirs.BaseEPTokenDispatcher.Config):  # type: ignore[misc, name-defined]
        """The fields of torchtitan's own: `num_experts` (E) and `top_k` (K)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.implementation: AllToAll | None = None

    def init_buffer(self) -> None:
        """Build the implementation for the EP mesh that was wired."""
        if self.ep_mesh is None:
            return
        group = self.ep_mesh.get_group()
        if self.num_experts % group.size():
            raise ValueError(
                f"the EP mesh must divide the experts, got {self.num_experts} experts over "
                f"{group.size()} ranks."
            )
        self.implementation = AllToAll(
            _experts_are_theirs,
            num_local_experts=self.num_experts // group.size(),
            ep_group=group,
        )

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        """Bring the tokens to their experts.

        Returns:
            [R, D], rows grouped by local expert; [e] int64, the rows of each; what `combine` takes.

        Cost: `AllToAll.prepare` and `.dispatch`: one all-to-all of integers and one host
        synchronization, one all-to-all of scores, one of rows. The counts that torchtitan has made
        (`num_local_tokens_per_expert_E`) are counted again, so ids repeated in a token are right.
        """
        if self.implementation is None:
            return _theirs.LocalTokenDispatcher.dispatch(  # type: ignore[no-any-return]
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        plan = self.implementation.prepare(topk_expert_ids_TK, topk_scores_TK, hidden_states=x_TD)
        received, ticket = self.implementation.dispatch(x_TD, plan)
        ends_e = received.offsets.to(torch.int64)
        counts_e = torch.diff(ends_e, prepend=ends_e.new_zeros(1))
        return received.by_expert(), counts_e, DispatchMetadata(received=received, ticket=ticket)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """Weight the experts' outputs, sum them per token, and bring them back: [T, D].

        Weighted in float32 as torchtitan does it. Cost: one all-to-all of rows.
        """
        if self.implementation is None:
            return _theirs.LocalTokenDispatcher.combine(  # type: ignore[no-any-return]
                self, routed_output_RD, metadata, x_TD
            )
        received: ReceivedRows = metadata.received
        weighted = routed_output_RD.to(torch.promote_types(torch.float32, routed_output_RD.dtype))
        weighted = (weighted * received.weights[:, None]).to(routed_output_RD.dtype)
        return self.implementation.combine(received.sum(weighted), metadata.ticket)


def _experts_are_theirs(*_: Tensor) -> Tensor:
    raise RuntimeError("torchtitan's RoutedExperts runs the experts, between dispatch and combine.")


@_override(  # type: ignore[untyped-decorator]
    target=_theirs.AllToAllTokenDispatcher.Config,
    description="ep-dispatch: a token crosses once to each rank that holds any of its experts.",
)
def all_to_all(cfg: Any) -> Any:
    """Replace torchtitan's all-to-all dispatcher by ours: a target of `--override.imports`."""
    return EPTokenDispatcher.Config(num_experts=cfg.num_experts, top_k=cfg.top_k)
