"""Where transformers' own expert parallelism has a layout, it gives the same numbers as ours.

The same checkpoint, layout and batches; loss and every gradient.  Where it is wrong or refuses (a
TP size above the key-value heads, `tp_plan={}` in a TP group, tokens that meet a TP group's copy
of the experts), the other tests show ours right against one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig as NativeConfig

from ep_plans import full_tensor
from ep_testing import RankPool
from expert_parallel import AutoModelForCausalLM
from expert_parallel.configs import as_config

MOVES_TOKENS = "ep_size" in NativeConfig.__dataclass_fields__  # 5.17 masks routes only
LAYOUTS: list[dict[str, int]] = [{"fsdp_size": 8}, {"tp_size": 4}]
if MOVES_TOKENS:
    LAYOUTS += [
        {"tp_size": 4, "fsdp_size": 2},
        {"tp_size": 4, "fsdp_size": 2, "ep_size": 4},
        {"tp_size": 2, "fsdp_size": 4, "ep_size": 4},
        {"fsdp_size": 8, "ep_size": 4},
        {"fsdp_size": 8, "ep_size": 8},
        {"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 4},
    ]
FAMILIES = ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"]
VOCABULARY = 96


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every layout with one family, every family in one layout; with `--all-layouts` everything."""
    whole = metafunc.config.getoption("--all-layouts")
    cases = [
        (family, layout)
        for family in FAMILIES
        for layout in LAYOUTS
        if whole or family == FAMILIES[0] or layout is LAYOUTS[-2 if MOVES_TOKENS else 0]
    ]
    names = [f"{family}-{'-'.join(map(str, layout.values()))}" for family, layout in cases]
    metafunc.parametrize(("family", "layout"), cases, ids=names)


def step(model: Any, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def native_whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def compare(rank: int, path: str, layout: dict[str, int]) -> dict[str, float]:
    config = as_config(layout)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(3, VOCABULARY, (config.dp_size, 2, 7), generator=generator)
    ids = batches[config.layout.batch_of(rank)]

    native = transformers.AutoModelForCausalLM.from_pretrained(
        path, distributed_config=NativeConfig(**layout)
    ).train()
    ours = AutoModelForCausalLM.from_pretrained(path, distributed_config=layout).train()
    native_loss, native_gradients = step(native, ids)
    loss, gradients = step(ours, ids)
    worst = {"loss": abs(loss - native_loss) / native_loss, "gradient": 0.0}
    assert gradients.keys() == native_gradients.keys()
    for name in gradients:
        expected, found = native_whole(native_gradients[name]), full_tensor(gradients[name])
        assert found.shape == expected.shape, name
        error = ((found - expected).norm() / expected.norm().clamp_min(1e-4)).item()
        assert error < 1e-4, f"{name}: {error}"
        worst["gradient"] = max(worst["gradient"], error)
    return worst


@pytest.mark.time_limit(200)
def test_native_transformers_gives_the_same_numbers(
    ranks: RankPool, family: str, layout: dict[str, int], tmp_path: Path
) -> None:
    inner = "intermediate_size" if family in ("mixtral", "gpt_oss") else "moe_intermediate_size"
    config = tiny_models.FAMILIES[family](**{inner: 32})
    tiny_models.build(config, torch.float32).save_pretrained(tmp_path)
    world = as_config(layout).world_size
    for worst in ranks.run(compare, str(tmp_path), layout, world=world, timeout=150):
        assert worst["loss"] < 1e-5
