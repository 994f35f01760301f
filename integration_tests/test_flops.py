"""FLOPs of a model, from its weights' shapes, against torch's count of what runs.

`FlopCounterMode` counts every product of a forward, attention without the causal half. It is exact
where a model consists of what `ep_plans.flops` counts; elsewhere the differences are those stated.
"""

from __future__ import annotations

import contextlib

import pytest
import tiny_models
import torch
from families import build, family_names
from torch.utils.flop_counter import FlopCounterMode

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import ModelFlops, model_flops, parallelize
from ep_testing import RankPool
from expert_parallel.meta import build_on_meta

ROWS, LENGTH = 2, 12
# What these compute beside products with weights and attention: scans of linear attention and state
# spaces, convolutions, indexers, loops over layers; or not all of their weights are met by a token.
MORE = {
    "AXK2Config",
    "BailingHybridConfig",
    "DeepseekV32Config",
    "DeepseekV4Config",
    "Dots3NoteTextConfig",
    "Ernie4_5_VL_MoeTextConfig",
    "Ernie4_5_VLMoeTextConfig",
    "Glm5NextTextConfig",
    "GlmMoeDsaConfig",
    "GraniteMoeHybridConfig",
    "HYV4Config",
    "HYV4VLTextConfig",
    "Inkling2LoopTextConfig",
    "Inkling2TextConfig",
    "InklingTextConfig",
    "JambaConfig",
    "KimiLinearConfig",
    "LaraMiniConfig",
    "Lfm2MoeConfig",
    "Llama4TextConfig",  # in transformers each of its experts takes all tokens
    "MiniMaxConfig",
    "MistralLarge4TextConfig",
    "NemotronHConfig",
    "OpenAIPrivacyFilterConfig",
    "Qwen3_5MoeTextConfig",
    "Qwen3NextConfig",
    "Qwen4ExpTextConfig",
    "ZayaConfig",
}
NO_TEXT = {"Dots3NoteVisionConfig", "Qwen3OmniMoeTalkerTextConfig"}  # take no tokens alone
SAMPLE = ("Cohere2MoeConfig", "GraniteMoeSharedConfig", "Gemma4TextConfig")


def counted(model: torch.nn.Module, *, backward: bool = False) -> int:
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 90
    counter = FlopCounterMode(display=False)
    with counter, contextlib.nullcontext() if backward else torch.no_grad():
        output = model(input_ids=ids, use_cache=False)
        if backward:
            output.logits.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("on_meta", [False, True])
def test_forward_is_what_torch_counts(name: str, on_meta: bool) -> None:
    config = tiny_models.FAMILIES[name]()
    model = tiny_models.build(config, torch.float32).eval()
    told = model_flops(build_on_meta(config) if on_meta else model)
    tokens = ROWS * LENGTH
    assert told.at(LENGTH, causal=False).forward * tokens == counted(model)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_training_is_what_torch_counts(name: str) -> None:
    """Backward takes twice the forward, but what would be the input's gradient of frozen layers."""
    model = tiny_models.build(tiny_models.FAMILIES[name](), torch.float32).train()
    told = model_flops(model).at(LENGTH, causal=False)
    assert told.training == 3 * told.forward
    assert told.training * ROWS * LENGTH == counted(model, backward=True)
    for part, parameter in model.named_parameters():
        # What is frozen in the last layer has a gradient that passes it.
        if "layers.1." in part and parameter.ndim > 1 and "gate.weight" not in part:
            parameter.requires_grad_(False)
    frozen = model_flops(model).at(LENGTH, causal=False)
    assert 2 * told.forward < frozen.training < told.training
    assert frozen.training * ROWS * LENGTH == counted(model, backward=True)


def test_the_head_is_not_the_embedding() -> None:
    config = tiny_models.qwen3_moe(tie_word_embeddings=True)
    tied = model_flops(build_on_meta(config)).at(LENGTH)
    assert tied.head == 2 * config.hidden_size * config.vocab_size
    assert tied.router == 2 * 2 * config.hidden_size * config.num_experts


def test_shared_experts_and_dense_layers_are_told_apart() -> None:
    config = tiny_models.deepseek_v3()
    found = model_flops(build_on_meta(config)).at(LENGTH)
    one = 2 * 3 * config.hidden_size * config.moe_intermediate_size
    assert found.experts == config.num_experts_per_tok * one
    assert found.shared_experts == config.n_shared_experts * one
    assert found.dense == 2 * 3 * config.hidden_size * config.intermediate_size


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        names = [name for name in family_names() if name not in NO_TEXT]
        if not metafunc.config.getoption("--all-layouts"):
            names = [name for name in names if name in SAMPLE]
        metafunc.parametrize("family", names)


def test_every_family(family: str) -> None:
    model = build(family).model.float().eval()
    ratio = counted(model) / (model_flops(model).at(LENGTH, causal=False).forward * ROWS * LENGTH)
    if family in MORE:
        assert ratio != 1
    else:
        assert ratio == pytest.approx(1)


def of_sharded(rank: int) -> list[ModelFlops]:
    found = []
    for sizes in ({"tp_size": 2, "ep_size": 2}, {"tp_size": 2}, {"fsdp_size": 2, "ep_size": 2}):
        config = DistributedConfig(**sizes)
        model = tiny_models.build(tiny_models.deepseek_v3(), torch.float32)
        parallelize(model, ParallelMesh(config.layout), config)
        found.append(model_flops(model))
    return found


def test_a_sharded_model_computes_the_same(ranks: RankPool) -> None:
    expected = model_flops(tiny_models.build(tiny_models.deepseek_v3(), torch.float32))
    for found in ranks.run(of_sharded, world=2):
        assert found == [expected] * 3
