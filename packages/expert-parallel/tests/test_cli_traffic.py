"""The traffic of a step, against numbers from the formulas by hand.

The model: H = 32, K = 2 of E = 8 experts of 24, 2 layers, 8 heads of 8 and 2 key-value heads, 320
words. A batch is 16 tokens of 2 bytes an element: 32 bytes for each element of a token.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from cli_models import EP_PLAN, SMALL
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from ep_mesh import DistributedConfig
from ep_plans import plan_parameters, resolve_plans
from ep_plans.sizes import experts_per_token
from expert_parallel import parallelize
from expert_parallel.cli.traffic import distinct_other_ranks, step_traffic
from expert_parallel.meta import build_on_meta

FSDP_PLAN = {
    "model.embed_tokens": "free_full_weight",
    "model.layers.*": "free_full_weight",
    "model.norm": "keep_full_weight",
    "lm_head": "keep_full_weight",
}
OTHERS = 3 * (1 - 15 / 28)  # of 4 ranks with 2 experts each: C(6, 2) = 15 of C(8, 2) = 28 miss one


def traffic(settings: Any = None, **fields: Any) -> dict[tuple[str, str], float]:
    config = DistributedConfig(**{"fsdp_over_tp": False, **fields})
    model = build_on_meta(settings or Qwen3MoeConfig(**SMALL))
    plans = resolve_plans(model, config)
    shardings = plan_parameters(model, plans, config)
    found = step_traffic(model, plans, shardings, config, tokens=16, itemsize=2)
    return {(each.axis, each.what): each.sent for each in found}


def test_all_axes_of_a_small_layout() -> None:
    found = traffic(tp_size=2, fsdp_size=2, ep_size=4, ep_plan=EP_PLAN, fsdp_plan=FSDP_PLAN)
    # Per layer the inputs of q, k and v, and the output of o; the embedding, and the head's input.
    reduced = 2 * (3 * 32 + 32) + 32 + 32
    # The head's output; per layer the experts' output and the gradients of their input and weights.
    gathered = 320 + 2 * (32 + 32 + 2)
    # Per layer after the cut over TP: q, k, v, o, head norms, norms, router.
    layers = 2 * (1024 + 256 + 256 + 1024 + 2 * 8 + 2 * 32 + 256)
    embedding = head = 320 * 32 // 2
    assert found == pytest.approx(
        {
            ("tp", "all-reduce"): 2 * reduced * 32 / 2,
            ("tp", "all-gather"): gathered * 32 / 2,
            ("tp", "all-reduce of gradients"): 2 * (2 * 2 * 8) * 2 / 2,
            # Two layers, four passes, half of the tokens on each TP rank.
            ("ep", "dispatch and combine"): 2 * 4 * OTHERS * 32 * 32 / 2,
            ("fsdp", "all-gather of parameters"): (2 * (layers + embedding) + head + 32) * 2 / 2,
            ("fsdp", "reduce-scatter of gradients"): (layers + embedding + head + 32) * 2 / 2,
        }
    )


def test_experts_over_efsdp_in_mixed_precision() -> None:
    found = traffic(fsdp_size=8, ep_size=4, ep_plan=EP_PLAN, fsdp_mixed_precision=True)
    experts = 2 * 8 * (48 * 32 + 32 * 24) // 4  # a rank's quarter of both layers
    assert found["efsdp", "all-gather of parameters"] == 2 * experts * 2 / 2
    assert found["efsdp", "reduce-scatter of gradients"] == experts * 4 / 2
    assert found["ep", "dispatch and combine"] == pytest.approx(2 * 4 * OTHERS * 32 * 32)
    assert not any(axis == "tp" for axis, _ in found)


def test_replicas_reduce_shards() -> None:
    found = traffic(fsdp_size=2, dp_replicate_size=4)
    total = sum(p.numel() for p in build_on_meta(Qwen3MoeConfig(**SMALL)).parameters())
    assert found["fsdp", "reduce-scatter of gradients"] == total * 2 / 2
    assert found["dp_replicate", "all-reduce of gradients"] == 2 * (total / 2) * 2 * 3 / 4


def test_summed_experts_move_no_rows() -> None:
    shared = {"tp_size": 2, "ep_size": 2, "ep_plan": EP_PLAN}
    found = traffic(**shared, ep_implementation="all_reduce")
    assert found["ep", "all-reduce"] == 2 * (2 * (2 * 32 + 2)) * 32 / 2
    assert ("ep", "dispatch and combine") not in found


def test_slices_are_gathered_around_regions() -> None:
    shared = {"tp_size": 2, "ep_size": 2, "ep_plan": EP_PLAN}
    whole, slices = traffic(**shared), traffic(**shared, enable_sequence_parallel=True)
    # An attention a layer is a region, and the stack of layers is one the other way round.
    more = 2 * 32 * (2 + 1) - 2 * (2 * 32 + 2)
    assert slices["tp", "all-gather"] - whole["tp", "all-gather"] == more * 32 / 2


def test_one_rank_sends_nothing() -> None:
    assert traffic() == {}


def test_a_dense_model() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    found = traffic(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4), tp_size=4)
    reduced = (3 + 2) * 32 + 2 * 32 + 2 * 32  # q, k, v, gate, up; o, down; embedding and head
    assert found["tp", "all-reduce"] == 2 * reduced * 32 * 3 / 4
    assert found["tp", "all-gather"] == 64 * 32 * 3 / 4


@pytest.mark.parametrize(
    ("experts", "ranks", "slots"), [(8, 4, 2), (6, 3, 3), (8, 8, 1), (4, 2, 4)]
)
def test_distinct_ranks_are_those_of_brute_force(experts: int, ranks: int, slots: int) -> None:
    choices = list(itertools.combinations(range(experts), slots))
    others = [
        len({expert // (experts // ranks) for expert in choice} - {own})
        for choice in choices
        for own in range(ranks)
    ]
    assert distinct_other_ranks(experts, ranks, slots) == pytest.approx(sum(others) / len(others))


def test_a_config_without_the_number_is_told() -> None:
    with pytest.raises(ValueError, match="experts per token of Linear is not known"):
        experts_per_token(torch.nn.Linear(1, 1))


class Sent(TorchDispatchMode):
    """Bytes that the collectives of this rank send on a ring."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, by the larger side of a collective."""
        if func.namespace == "c10d":
            tensors = tree_flatten(args)[0]
            largest = max(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
            name = func._schema.name.removeprefix("c10d::").strip("_")
            times = 2 if name.startswith("allreduce") else 1
            self.bytes[name.split("_")[0]] += times * largest * (self.ranks - 1) / self.ranks
        return func(*args, **kwargs or {})


def measured(rank: int, fields: dict[str, Any]) -> tuple[float, float, dict[str, float]]:
    torch.manual_seed(0)
    config = DistributedConfig(**{"fsdp_over_tp": False, **fields})
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL)).train()
    plans = resolve_plans(model, config)
    shardings = plan_parameters(model, plans, config)
    found = step_traffic(model, plans, shardings, config, tokens=16, itemsize=4)
    parallelize(model, config)
    ids = torch.arange(16)[None]
    with Sent(config.world_size) as sent:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return sum(each.sent for each in found), sum(sent.bytes.values()), dict(sent.bytes)


@pytest.mark.parametrize(
    "fields",
    [
        {"tp_size": 2},
        {"tp_size": 2, "enable_sequence_parallel": True},
        {"fsdp_size": 2},
        {"fsdp_size": 2, "fsdp_plan": FSDP_PLAN},
        {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce", "ep_plan": EP_PLAN},
    ],
    ids=str,
)
def test_what_is_computed_is_what_the_collectives_move(ranks, fields: dict[str, Any]) -> None:
    for computed, sent, by_kind in ranks.run(measured, fields, world=2):
        assert computed == pytest.approx(sent, rel=0.02), by_kind
