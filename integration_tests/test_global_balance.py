"""The auxiliary loss in a loop of one's own: that of all ranks' batches, whose gradient the routers get."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from dispatching import dispatching, name_of
from equality import all_float64, relative_error
from test_trainer import build
from torch import Tensor

from ep_mesh import DistributedConfig
from ep_plans import full_tensor, parallel_state
from ep_testing import RankPool
from ep_trainer import BalancingLoss
from expert_parallel import parallelize

LAYOUTS = [
    dispatching(fsdp_size=4, ep_size=4),
    dispatching(tp_size=2, fsdp_size=2, ep_size=4),
    dispatching(tp_size=2, fsdp_size=2, ep_size=4, enable_sequence_parallel=True),
    dispatching(fsdp_size=2, dp_replicate_size=2, ep_size=2),
]
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 1.0}


def batch_of(shard: int) -> dict[str, Tensor]:
    """Two rows of eight tokens, of which fewer are shown on later shards, and as many labels on each."""
    ids = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(shard))
    mask = torch.ones_like(ids)
    mask[:, 8 - shard :] = 0
    labels = torch.where(torch.arange(8) < 4, ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def on_rank(rank: int, sizes: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The errors of the loss and of each gradient; the latter with the model's own loss too."""
    with all_float64():
        plain = build(**AUXILIARY).double()
        model = parallelize(copy.deepcopy(plain), DistributedConfig(**sizes))
        plain.set_experts_implementation("eager")  # grouped_mm is not for float64
        layout = parallel_state(model).mesh.layout
        batches = [batch_of(shard) for shard in range(layout.data_parallel_size)]
        whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        expected = plain(**whole, use_cache=False)
        expected.loss.backward()
        batch = batches[layout.batch_of(rank)]
        balancing = BalancingLoss.of(model)
        errors: dict[str, list[float]] = {}
        for is_global in (True, False):
            model.zero_grad()
            outputs = model(**batch, use_cache=False)
            loss = outputs.loss
            if is_global:
                loss = balancing.over_global_batch(loss, outputs, batch["attention_mask"])
                own = outputs.loss - outputs.aux_loss
                errors["aux"] = [abs(float(loss - own - expected.aux_loss))] * 2
            loss.backward()
            for name, parameter in model.named_parameters():
                grad = dict(plain.named_parameters())[name].grad
                error = relative_error(full_tensor(parameter.grad), grad)
                errors.setdefault(name, []).append(error)
    return {name: (first, second) for name, (first, second) in errors.items()}


@pytest.mark.parametrize("sizes", LAYOUTS, ids=name_of)
def test_gradients_are_those_of_one_process(ranks: RankPool, sizes: dict[str, Any]) -> None:
    for errors in ranks.run(on_rank, sizes, world=4):
        assert max(found for found, _ in errors.values()) < 1e-12
        routers = [own for name, (_, own) in errors.items() if name.endswith("mlp.gate.weight")]
        assert min(routers) > 1e-3, "the ranks' own losses are another one"


def without_coefficient(rank: int) -> bool:
    model = parallelize(build(router_aux_loss_coef=0.0), DistributedConfig())
    return BalancingLoss.of(model) is None


def test_without_a_layout_or_a_coefficient(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM is not sharded"):
        BalancingLoss.of(build())
    assert ranks.run(without_coefficient, world=1) == [True]
