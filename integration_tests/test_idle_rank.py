"""A rank whose experts get no token communicates in the same order as the others.

Activation checkpointing runs a layer again in the middle of its backward, at the first saved tensor
that is asked for.  Collectives of that second forward must not change places with those of the
backward, which they do if one rank's graph asks for its first saved tensor later than another's.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ep_mesh import DistributedConfig
from ep_plans import full_tensor
from ep_testing import RankPool
from expert_parallel import parallelize

MASKED = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}


def gradients(
    rank: int, plan: dict[str, str] | None, own: bool, checkpointing: bool
) -> dict[str, torch.Tensor]:
    import ep_plans
    from ep_mesh import ParallelMesh

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=32,
            hidden_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            num_experts=4,
            num_experts_per_tok=1,
        )
    )
    config = DistributedConfig(tp_size=2, ep_size=2, ep_plan=plan)
    if own:
        ep_plans.parallelize(model, ParallelMesh(config.layout), config)
    else:
        parallelize(model, config)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.full((2, 5), 7)  # one token only, so one expert, on one rank
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: full_tensor(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("plan", [None, MASKED], ids=["own plan", "masked"])
@pytest.mark.parametrize("own", [True, False], ids=["module", "kernels"])
def test_checkpointing_changes_no_gradient(
    ranks: RankPool, plan: dict[str, str] | None, own: bool
) -> None:
    plain = ranks.run(gradients, plan, own, False, world=2)
    again = ranks.run(gradients, plan, own, True, world=2)
    for name, expected in plain[0].items():
        for found in (plain[1], *again):
            torch.testing.assert_close(
                found[name], expected, msg=lambda text, n=name: f"{n}: {text}"
            )
