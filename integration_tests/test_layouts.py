"""Every layout gives the single-process model's loss, gradients, gradient norm and clipped step.

In float64, with model code that computes in float32 on purpose widened too, so that what is left is
the order of sums: a wrong factor or a forgotten reduction is many orders of magnitude above the bound.
A sample runs by default, everything with `--all-layouts`.
"""

from __future__ import annotations

import pytest
import torch
from dispatching import dispatching
from equality import all_float64, batches, check_equal
from tiny_models import FAMILIES, build

from ep_kernels import module_experts_forward
from ep_mesh import DistributedConfig
from ep_testing.pool import RankPool

# tp, fsdp, dp_replicate of eight ranks.
DENSE = [(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2)]
EXPERTS = 8  # of every tiny model
SAMPLE = {
    "qwen3_moe": [
        (8, 1, 1, 8),
        (4, 2, 1, 4),
        (4, 2, 1, 8),
        (2, 4, 1, 4),
        (1, 8, 1, 4),
        (2, 2, 2, 4),
    ],
    "gpt_oss": [(8, 1, 1, 8), (2, 4, 1, 8)],
    "mixtral": [(1, 8, 1, 8)],
    "deepseek_v3": [(4, 2, 1, 8)],
    "llama4": [(4, 2, 1, 4), (1, 8, 1, 8), (2, 4, 1, 1)],
    "qwen2_moe": [(2, 4, 1, 4)],
}


def every_layout() -> list[tuple[int, int, int, int]]:
    """All dense layouts with all legal sizes of the expert axis."""
    return [
        (tp, fsdp, replicas, ep)
        for tp, fsdp, replicas in DENSE
        for ep in (1, 2, 4, 8)
        if ep == 1 or (ep % tp == 0 and fsdp * tp % ep == 0 and EXPERTS % ep == 0)
    ]


def cases(whole: bool) -> list[tuple[str, dict[str, object]]]:
    """The families and configurations to run."""
    chosen = {name: every_layout() for name in FAMILIES} if whole else SAMPLE
    found: list[tuple[str, dict[str, object]]] = []
    for family, layouts in chosen.items():
        for tp, fsdp, replicas, ep in layouts:
            sizes: dict[str, object] = {
                "tp_size": tp,
                "fsdp_size": fsdp,
                "dp_replicate_size": replicas,
                "ep_size": ep,
            }
            found.append((family, sizes))
            if whole and ep > 1:
                found.append((family, sizes | {"ep_implementation": "all_to_all"}))
            if ep > 1 and ep == tp:
                found.append((family, sizes | {"ep_implementation": "all_reduce"}))
            if tp > 1 and (whole or ep == 4):
                found.append((family, sizes | {"enable_sequence_parallel": True}))
                found.append((family, sizes | {"tp_plan": {}, "fsdp_over_tp": replicas == 1}))
    return found


def config_of(family: str, options: dict[str, object]) -> DistributedConfig:
    """As shipped; where a shipped plan masks routes and can't (transformers 5.17), with dispatch."""
    masks = options.get("ep_size") == options["tp_size"] and "ep_implementation" not in options
    ours = family == "llama4"
    return DistributedConfig(**(options if masks or ours else dispatching(**options)))  # type: ignore[arg-type]


def compare_float32(rank: int, family: str, options: dict[str, object]) -> dict[str, float]:
    torch.set_num_threads(1)
    config = config_of(family, options)
    make = FAMILIES[family]
    return check_equal(
        lambda: build(make(), torch.float32),
        config,
        batches(config, make().vocab_size),
        tolerance=1e-5,
        experts_forward=module_experts_forward,
    )


def compare(rank: int, family: str, options: dict[str, object]) -> dict[str, float]:
    torch.set_num_threads(1)
    config = config_of(family, options)
    make = FAMILIES[family]
    ids = batches(config, make().vocab_size)
    with all_float64():
        return check_equal(
            lambda: build(make()),
            config,
            ids,
            tolerance=1e-10,
            experts_forward=module_experts_forward,
        )


@pytest.mark.time_limit(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_equal_one_process(ranks: RankPool, all_layouts: bool, family: str) -> None:
    for name, options in cases(all_layouts):
        if name == family:
            errors = ranks.run(compare, family, options, timeout=120)
            worst = {key: max(error[key] for error in errors) for key in errors[0]}
            print(family, options, {key: f"{value:.1e}" for key, value in worst.items()})


@pytest.mark.parametrize("family", FAMILIES)
def test_released_code_in_float32(ranks: RankPool, family: str) -> None:
    """The model code as it is, float32 and all."""
    sizes = {"tp_size": 2, "fsdp_size": 4, "ep_size": 4}
    ranks.run(compare_float32, family, sizes, timeout=120)


@pytest.mark.parametrize("tp", [1, 2])
def test_symmetric_memory(ranks: RankPool, tp: int) -> None:
    """Rows written into other ranks' memory, chosen by name; backward with FSDP2 and TP."""
    sizes = {"tp_size": tp, "fsdp_size": 4 // tp, "ep_size": 4}
    options = sizes | {"ep_implementation": "symmetric_memory"}
    ranks.run(compare, "qwen3_moe", options, world=4, timeout=120)
