"""A whole model over every kind of layout equals one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from toy_decoder import MASKING, SINKS, TP_PLAN, ToyConfig
from toy_equality import check_equal

from ep_mesh import DistributedConfig
from ep_testing.pool import RankPool

Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]

# toy config, distributed config, what differs in the check
LAYOUTS: dict[str, list[Case]] = {
    "tp": [
        ({}, {"tp_size": 8}, {}),
        ({}, {"tp_size": 8, "fsdp_over_tp": False}, {}),
        ({}, {"tp_size": 8, "ep_size": 8}, {}),
        ({"bias": True, "sinks": True, "base_model_tp_plan": TP_PLAN | SINKS}, {"tp_size": 8}, {}),
    ],
    "tp_fsdp": [
        ({}, {"tp_size": 2, "fsdp_size": 4}, {}),
        ({}, {"tp_size": 4, "fsdp_size": 2, "ep_size": 4}, {}),
        ({}, {"tp_size": 4, "fsdp_size": 2, "ep_size": 8}, {}),
        ({"bias": True}, {"tp_size": 2, "fsdp_size": 4, "ep_size": 4}, {}),
        ({}, {"tp_size": 2, "fsdp_size": 4, "ep_size": 4, "fsdp_over_tp": False}, {}),
        ({}, {"tp_size": 2, "fsdp_size": 4, "ep_size": 4, "tp_plan": {}}, {}),
    ],
    "fsdp": [
        ({}, {"fsdp_size": 8}, {}),
        (
            {},
            {
                "fsdp_size": 8,
                "ep_size": 4,
                "fsdp_plan": {"model.layers.*.mlp.experts": "keep_full_weight"},
            },
            {},
        ),
        ({}, {"fsdp_size": 8, "ep_size": 8}, {}),
    ],
    "hsdp": [
        ({}, {"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}, {}),
        ({}, {"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 4}, {}),
        ({}, {"tp_size": 2, "dp_replicate_size": 4, "ep_size": 2, "fsdp_over_tp": False}, {}),
        ({}, {"fsdp_size": 2, "dp_replicate_size": 4, "ep_size": 2}, {}),
    ],
    "masking": [
        ({"base_model_ep_plan": MASKING}, {"tp_size": 4, "fsdp_size": 2, "ep_size": 4}, {}),
        ({"base_model_ep_plan": MASKING}, {"tp_size": 2, "fsdp_size": 4, "ep_size": 2}, {}),
    ],
    # More ranks than rows: some hold nothing of a weight, of the vocabulary, of the experts.
    "uneven": [
        (
            {"intermediate_size": 10, "moe_intermediate_size": 6, "vocab_size": 11},
            {"tp_size": 8},
            {},
        ),
        (
            {"intermediate_size": 5, "moe_intermediate_size": 3, "vocab_size": 9},
            {"tp_size": 4, "fsdp_size": 2, "ep_size": 4},
            {},
        ),
        ({"num_experts": 4}, {"fsdp_size": 8, "ep_size": 2}, {}),
        ({"num_experts": 4}, {"tp_size": 2, "fsdp_size": 4, "ep_size": 2}, {}),
    ],
    "one_token": [
        ({}, {"tp_size": 4, "fsdp_size": 2, "ep_size": 8}, {"size": 1, "length": 1}),
        ({}, {"fsdp_size": 8, "ep_size": 8}, {"size": 1, "length": 1}),
    ],
    "kv_copies": [
        ({"num_key_value_heads": 4}, {"tp_size": 8, "ep_size": 8}, {}),
        ({"num_key_value_heads": 2, "bias": True}, {"tp_size": 8}, {}),
        ({"num_key_value_heads": 1}, {"tp_size": 4, "fsdp_size": 2, "ep_size": 4}, {}),
        (
            {"num_key_value_heads": 2},
            {"tp_size": 4, "dp_replicate_size": 2, "fsdp_over_tp": False},
            {},
        ),
    ],
    "tied": [
        ({"tied": True}, {"tp_size": 8}, {}),
        ({"tied": True}, {"fsdp_size": 8, "ep_size": 8}, {}),
        ({"tied": True, "vocab_size": 13}, {"tp_size": 4, "fsdp_size": 2, "ep_size": 4}, {}),
        ({"tied": True}, {"tp_size": 2, "fsdp_size": 4, "ep_size": 4, "tp_plan": {}}, {}),
    ],
    "accumulation": [
        ({}, {"tp_size": 2, "fsdp_size": 4, "ep_size": 4}, {"micro": 3}),
        ({}, {"tp_size": 2, "fsdp_size": 4, "ep_size": 4}, {"micro": 3, "deferred": True}),
        ({}, {"tp_size": 8, "ep_size": 8, "fsdp_over_tp": False}, {"micro": 2}),
        ({}, {"tp_size": 2, "fsdp_size": 4, "ep_size": 8}, {"micro": 2, "deferred": True}),
        (
            {},
            {"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 4},
            {"micro": 2, "deferred": True},
        ),
    ],
    "ep_options": [
        (
            {},
            {"tp_size": 2, "fsdp_size": 4, "ep_size": 4},
            {"ep_options": {"num_chunks": 3}, "micro": 2},
        ),
        (
            {},
            {"fsdp_size": 8, "ep_size": 4},
            {"ep_options": {"max_rows": 16}, "micro": 2, "deferred": True},
        ),
    ],
}


def run(rank: int, case: Case) -> None:
    toy, sizes, check = case
    check_equal(ToyConfig(**toy), DistributedConfig(**sizes), **check)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_equals_one_process(ranks: RankPool, kind: str) -> None:
    for case in LAYOUTS[kind]:
        ranks.run(run, case)
