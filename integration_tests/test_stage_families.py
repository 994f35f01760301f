"""Every family is split into stages that give the whole model's output and gradients, or is refused.

In one process: each stage's model is a copy of which the rest was taken away, and the stages are run
one after the other. A few families by default, all of them with `--all-layouts`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from equality import relative_error
from families import Family, build, family_names
from torch import Tensor

from ep_mesh import DistributedConfig
from ep_plans import Pipeline
from ep_plans.splitting import find_parts
from ep_plans.stage_forward import stage_forward
from ep_plans.stages import keep_stages, plan_stages

SAMPLE = (
    "DeepseekV4Config",  # several residual streams, joined after the layers
    "GlmMoeDsaConfig",  # refused
    "GptOssConfig",  # layer types
    "Llama4TextConfig",  # asks the embedding where it is
    "NemotronHConfig",  # other names for embedding, layers and norm; state spaces
    "Qwen4ExpTextConfig",
    "GraniteMoeHybridConfig",  # factors on embeddings and logits
)
# What is carried from layer to layer beside the hidden states, or what lies outside the layers.
REFUSED = {
    "Dots3NoteVisionConfig": "token embedding",
    "Gemma4TextConfig": "per_layer_inputs",
    "Glm5NextTextConfig": "topk_indices",
    "GlmMoeDsaConfig": "topk_indices",
    "HYV4Config": "topk_indices",
    "HYV4VLTextConfig": "topk_indices",
    "Inkling2LoopTextConfig": "4 loops",
    "Inkling2TextConfig": "block_states",
    "MistralLarge4TextConfig": "topk_indices",
    "OpenAIPrivacyFilterConfig": "score",
    "Qwen3OmniMoeTalkerTextConfig": "codec_embedding",
    "ZayaConfig": "prev_router_hidden_states",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--all-layouts")
        names = [name for name in family_names() if whole or name in SAMPLE]
        metafunc.parametrize("family", names)


def test_the_stages_of_a_family_are_the_model(family: str) -> None:
    found = build(family)
    if family in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[family]):
            find_parts(found.model)
        return
    inputs = found.inputs(0)
    found.model.config.use_cache = False
    expected = found.loss(inputs)
    expected.backward()
    gradients = {name: p.grad for name, p in found.model.named_parameters()}
    loss, summed = run_stages(found, inputs)
    assert relative_error(loss.detach(), expected.detach()) < found.tolerance
    scale = max(float(g.norm()) for g in gradients.values() if g is not None)
    for name, gradient in gradients.items():
        other = summed[name]
        if gradient is None or other is None:
            assert (gradient is None) == (other is None), name
        else:
            error = float((other - gradient).norm())
            assert error < found.tolerance * max(float(gradient.norm()), 1e-4 * scale), name


def run_stages(found: Family, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss, and each parameter's gradient, summed over the stages that hold it."""
    config = DistributedConfig(pp_size=2)
    stages = plan_stages(found.model, config)
    found.model.zero_grad()
    models = [copy.deepcopy(found.model) for _ in range(2)]
    pipelines = [Pipeline.of(model, stages, place) for place, model in enumerate(models)]
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    passed: Any = (inputs["input_ids"],)
    held: dict[str, list[Tensor]] = {}
    for place, (model, pipeline) in enumerate(zip(models, pipelines, strict=True)):
        keep_stages(model, pipeline)
        known = {**rest, "input_ids": inputs["input_ids"]} if place else rest
        passed = stage_forward(model, pipeline, place)(*passed, **known)
    stage = Family(found.name, _Answers(passed, models[1]))  # type: ignore[arg-type]
    loss = stage.loss(inputs)
    loss.backward()
    for model in models:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                held.setdefault(name, []).append(parameter.grad)
    names = {name for name, _ in found.model.named_parameters(remove_duplicate=False)}
    return loss, {name: sum(held[name]) if name in held else None for name in names}  # type: ignore[misc]


class _Answers:
    """Gives an output that was computed."""

    def __init__(self, output: Any, model: torch.nn.Module) -> None:
        self.output, self.model = output, model

    def __call__(self, **_: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_what_is_no_list_of_layers_is_refused() -> None:
    sizes = {"num_layers": 2, "d_model": 16, "d_ff": 16, "num_heads": 2, "vocab_size": 32}
    with torch.device("meta"):
        both = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
        vision = transformers.AutoModelForImageTextToText.from_config(_llava())
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        find_parts(both)
    with pytest.raises(ValueError, match="belongs to no layer"):
        find_parts(vision)


def _llava() -> transformers.PreTrainedConfig:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**small, num_attention_heads=2, vocab_size=32),
        vision_config=transformers.CLIPVisionConfig(**small, num_attention_heads=2, image_size=28),
    )
