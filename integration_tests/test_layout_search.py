"""A search of layouts over the tiny model of each MoE family: choices, or a reason for each layout."""

from __future__ import annotations

import pytest
import torch
from families import family_names, tiny_config

from expert_parallel.estimate import search
from expert_parallel.estimate.search import layouts_of
from expert_parallel.meta import build_on_meta

SAMPLE = (
    "DeepseekV4Config",  # its first layers route by a table of token ids
    "Gemma4TextConfig",  # tied embeddings; experts beside a dense MLP
    "NemotronHConfig",  # ungated experts, layers of several kinds
    "OpenAIPrivacyFilterConfig",  # no TP plan
    "Qwen3MoeConfig",
    "Step3p7TextConfig",  # experts that only their own code can run
)


@pytest.mark.parametrize("family", family_names())
def test_each_layout_is_a_choice_or_has_a_reason(family: str, all_layouts: bool) -> None:
    if family not in SAMPLE and not all_layouts:
        pytest.skip("with --all-layouts")
    config = tiny_config(family)
    try:
        build_on_meta(config)
    except ValueError:
        pytest.skip("no model class by itself")
    found = search(config, 2, sequence_length=16, dtype=torch.float32, processes=1)
    others = [*found.refused, *found.not_estimated]
    named = {choice.config.layout for choice in found.choices}
    assert len(named) + len({one.layout.removesuffix(" all_reduce") for one in others}) >= len(
        list(layouts_of(2))
    )
    assert all(one.reason and one.detail for one in others)
    for choice in found.choices:
        assert choice.static_bytes <= choice.estimate.peak.bytes <= found.memory_bytes
        assert choice.estimate.unique_tokens_per_second_per_device > 0
