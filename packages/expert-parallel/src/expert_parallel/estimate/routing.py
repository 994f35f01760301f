"""Which experts the tokens of a simulated batch choose.

T = tokens of a batch, K = experts per token, E = experts of a layer.
"""

from __future__ import annotations

import zlib
from typing import Literal, get_args

import torch
from torch import Tensor

RoutingModel = Literal["balanced", "multinomial", "zipf"]


def check_routing_model(routing: str) -> None:
    """Raise a ValueError unless there is such a model."""
    if routing not in get_args(RoutingModel):
        raise ValueError(
            f"routing={routing!r} is unknown; known are {', '.join(get_args(RoutingModel))}."
        )


def draw_experts(
    routing: RoutingModel,
    tokens: int,
    slots: int,
    experts: int,
    *,
    seed: int,
    layer: str,
    batch: int,
) -> Tensor:
    """The experts of each token: [T, K] int64, K different ones, the same in every process.

    Args:
        routing: `balanced`: each expert as often as any other, in random combinations;
            `multinomial`: each token K experts, all equally likely; `zipf`: the n-th most popular expert
            of a layer is 1/n times as likely as the most popular one, drawn without repetition.
        tokens: T.
        slots: K.
        experts: E.
        seed: of the simulation.
        layer: the layer's name; each draws for itself.
        batch: which batch; the ranks that hold one draw the same.
    """
    generator = torch.Generator().manual_seed(
        (seed * 1_000_003 + zlib.crc32(layer.encode()) * 8191 + batch) % 2**63
    )
    if routing == "balanced":
        per_round = experts // slots  # tokens that use (nearly) every expert once
        rounds = -(-tokens // per_round)
        order = torch.rand(rounds, experts, generator=generator).argsort(1)
        return order[:, : per_round * slots].reshape(-1, slots)[:tokens].contiguous()
    logits = torch.zeros(experts)
    if routing == "zipf":
        rank = torch.randperm(experts, generator=generator) + 1
        logits = -rank.float().log()
    uniform = torch.rand(tokens, experts, generator=generator).clamp_(1e-9, 1 - 1e-7)
    gumbel = -(-uniform.log()).log()
    return (logits + gumbel).topk(slots, dim=1).indices
