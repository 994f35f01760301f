"""Adapters of fused experts, written for each expert, are the same adapters to who reads a tensor per expert.

The reference is a checkpoint with a tensor per expert of which PEFT's own merge has changed the weights:
each changes by the product of the two factors that the file has under its name, and no other changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dispatching import dispatching
from safetensors.torch import load_file
from tiny_models import FAMILIES, build
from torch import Tensor

from ep_testing import RankPool
from expert_parallel import load_lora, parallelize, save_lora
from expert_parallel.lora.adding import lora_state

peft = pytest.importorskip("peft")

from test_lora import VOCAB, by_peft


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


def written(rank: int, family: str, adapters: str, out: str, sizes: dict[str, Any]) -> None:
    model = parallelize(build(FAMILIES[family]()), sizes)
    save_lora(load_lora(model, adapters), out, per_expert=True)


# With ranks that differ (mixtral), parts of the experts alone, a router.
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe"])
def test_each_experts_factors_are_the_change_of_its_weight(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    by_peft(family, modules_to_save=None).save_pretrained(tmp_path / "peft")
    out = tmp_path / "per_expert"
    sizes = dispatching(tp_size=2, fsdp_size=2, ep_size=4)
    ranks.run(written, family, str(tmp_path / "peft"), str(out), sizes, world=4)

    build(FAMILIES[family]()).save_pretrained(tmp_path / "base")
    adapted = by_peft(family, tmp_path / "peft")
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    expected = adapted(input_ids=ids, use_cache=False).logits
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    base, merged = weights_of(tmp_path / "base"), weights_of(tmp_path / "merged")
    factors = weights_of(out)
    config = peft.LoraConfig.from_pretrained(out)
    assert any(".experts.7." in name for name in factors)
    assert config.init_lora_weights is True, "what has no factors in the file must not be changed"
    for name, weight in base.items():
        own = f"base_model.model.{name.removesuffix('.weight')}"
        change = torch.zeros_like(weight)
        if f"{own}.lora_A.weight" in factors:
            a, b = factors.pop(f"{own}.lora_A.weight"), factors.pop(f"{own}.lora_B.weight")
            assert len(a) == b.shape[1] == config.r
            change = b @ a * (config.lora_alpha / config.r)
            assert change.norm() > 0.1
        torch.testing.assert_close(merged[name] - weight, change, atol=1e-12, rtol=1e-9)
    assert not factors, "every factor has a weight in the checkpoint"

    if family == "qwen3_moe":  # PEFT itself reads files of this form
        again = by_peft(family, out)
        torch.testing.assert_close(again(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_experts_that_checkpoints_hold_fused_are_refused(tmp_path: Path, family: str) -> None:
    by_peft(family, modules_to_save=None).save_pretrained(tmp_path / "peft")
    model = load_lora(build(FAMILIES[family]()), tmp_path / "peft")
    with pytest.raises(
        ValueError, match=r"experts.down_proj is fused in the checkpoints of .* too"
    ):
        save_lora(model, tmp_path / "out", per_expert=True)
    assert not (tmp_path / "out").exists()


def test_other_scales_are_refused(tmp_path: Path) -> None:
    family = "qwen3_moe"
    by_peft(family, modules_to_save=None).save_pretrained(tmp_path / "peft")
    model = load_lora(build(FAMILIES[family]()), tmp_path / "peft")
    state = lora_state(model)
    assert state is not None
    object.__setattr__(state.targets.layers[0], "scale", 7.0)
    with pytest.raises(ValueError, match=r"are scaled by \[1.6666.*, 7.0\]"):
        save_lora(model, tmp_path / "out", per_expert=True)


def test_modules_that_train_whole_are_refused(tmp_path: Path) -> None:
    by_peft("qwen3_moe").save_pretrained(tmp_path / "peft")
    model = load_lora(build(FAMILIES["qwen3_moe"]()), tmp_path / "peft")
    with pytest.raises(ValueError, match=r"modules_to_save=\['mlp.gate'"):
        save_lora(model, tmp_path / "out", per_expert=True)
