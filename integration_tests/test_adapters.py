"""ep-dispatch inside other systems: the same numbers as with the dispatch that they bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig as NativeConfig

from ep_dispatch.adapters import transformers as adapter
from ep_kernels import module_experts_forward
from ep_testing import RankPool

VOCABULARY = 96
LAYOUTS = [
    {"tp_size": 2, "fsdp_size": 4, "ep_size": 4},
    {"fsdp_size": 8, "ep_size": 8},
    {"tp_size": 4, "fsdp_size": 2, "ep_size": 4},
]


def step(
    path: str, layout: dict[str, int], name: str, ids: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """The loss and the gathered gradients of a model of transformers, and logits without gradients."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, distributed_config=NativeConfig(**layout, ep_implementation=name)
    ).train()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {
        name: parameter.grad.full_tensor()
        if isinstance(parameter.grad, DTensor)
        else parameter.grad
        for name, parameter in model.named_parameters()
    }
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    return loss.item(), gradients, logits


def compare(rank: int, path: str, layout: dict[str, int], kernels: bool) -> None:
    names = adapter.register(module_experts_forward if kernels else None)
    if layout["ep_size"] != layout.get("tp_size", 1):
        names.remove("ep_all_reduce")
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(rank))
    if (tp := layout.get("tp_size", 1)) > 1:
        generator = torch.Generator().manual_seed(rank // tp)
        ids = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
    loss, gradients, logits = step(path, layout, "all_to_all", ids)
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", "2")  # the nodes of the hierarchical one
            ours, found, ours_logits = step(path, layout, name, ids)
        assert abs(ours - loss) < 1e-5 * loss, name
        torch.testing.assert_close(ours_logits, logits, rtol=1e-4, atol=1e-5)
        assert found.keys() == gradients.keys()
        for parameter, expected in gradients.items():
            error = (found[parameter] - expected).norm() / expected.norm().clamp_min(1e-4)
            assert error < 1e-4, f"{name}, {parameter}: {error}"


@pytest.mark.skipif(
    "ep_size" not in NativeConfig.__dataclass_fields__, reason="transformers moves no tokens"
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kernels", [False, True])
def test_transformers_runs_ours_by_name(
    ranks: RankPool, layout: dict[str, int], kernels: bool, tmp_path: Path
) -> None:
    config = tiny_models.FAMILIES["qwen3_moe"](moe_intermediate_size=32)
    tiny_models.build(config, torch.float32).save_pretrained(tmp_path)
    ranks.run(compare, str(tmp_path), layout, kernels, timeout=120)
