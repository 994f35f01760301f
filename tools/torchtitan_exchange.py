"""Dispatch and combine of torchtitan's MoE, by its own all-to-all dispatcher and by ours in its place.

Needs torchtitan 0.3.0 with what its MoE imports (spmd_types, triton, tyro).
"""

from __future__ import annotations

from typing import Any

import moe_layer
import torch
from torch import Tensor


def build(sizes: moe_layer.Sizes) -> list[moe_layer.Layer]:
    """Torchtitan's dispatcher, and ours: each there and back, with experts that compute nothing."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from ep_dispatch.adapters.torchtitan import EPTokenDispatcher

    set_spmd_backend(
        "partial_dtensor"
    )  # the other one exchanges lists, which gloo takes in equal sizes only
    mesh, _ = moe_layer.meshes(moe_layer.RANKS)

    def layer(kind: Any) -> moe_layer.Layer:
        dispatcher = kind.Config(num_experts=sizes.experts, top_k=sizes.top_k).build()
        dispatcher.wire_meshes(ep_mesh=mesh)

        def run(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            counts = ids.reshape(-1).bincount(minlength=sizes.experts)
            rows, _, metadata = dispatcher.dispatch(hidden, weights, ids, counts)
            out: Tensor = dispatcher.combine(rows.clone(), metadata, hidden)
            return out

        return run

    return [layer(AllToAllTokenDispatcher), layer(EPTokenDispatcher)]


def measure(rank: int, sizes: moe_layer.Sizes) -> tuple[list[float], list[int]]:
    """Seconds of forward and backward, and the bytes that this rank sends: torchtitan's, ours."""
    layers, given = build(sizes), moe_layer.inputs(rank, sizes)
    none = torch.nn.Identity()  # no parameters
    work = [lambda f=f: moe_layer.step(none, f, given) for f in layers]
    seconds = moe_layer.timed(rank, work, repeats=9)
    sent = []
    for run in work:
        with moe_layer.SentBytes(moe_layer.RANKS, rank) as counted:
            run()
        sent.append(counted.sent)
    return seconds, sent
