"""Every MoE family of the installed transformers, loaded sharded, equals one process.

A tiny random checkpoint of each is loaded in two layouts and runs forward and backward; the loss
and every gathered gradient must equal those of the unsharded model on the same global batch. A
few families are run, chosen for what is peculiar about them; with `--all-layouts` all are, and each
must do what the table in the docs says of it.
"""

from __future__ import annotations

import pytest
import supported_models
import torch
import transformers
from families import build, family_names
from sharded_families import LAYOUTS, compare

from ep_kernels import ExpertsSpec, module_experts_forward, why_not
from ep_kernels.activation import is_silu_gated
from ep_mesh import DistributedConfig
from ep_plans import resolve_plans
from ep_testing import RankError, RankPool

SAMPLE = (
    "DeepseekV4Config",  # its first layers route by a table of token ids
    "Ernie4_5_VLMoeTextConfig",  # two sets of experts in one layer
    "Gemma4TextConfig",  # tied embeddings; experts beside a dense MLP
    "Glm5NextTextConfig",  # layers of two kinds under one pattern
    "InklingTextConfig",  # bare stacked shared experts
    "MuseSparkTextConfig",  # experts with a norm of their own
    "NemotronHConfig",  # ungated experts
    "OpenAIPrivacyFilterConfig",  # transposed weights, biases, no TP plan
    "Qwen3VLMoeTextConfig",  # head norms without a rule
    "Step3p7TextConfig",  # experts that only their own code can run
    "ZayaConfig",  # one expert per token, no TP plan
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        names = family_names()
        if not metafunc.config.getoption("--all-layouts"):
            names = [name for name in names if name in SAMPLE]
        metafunc.parametrize("family", names)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(ranks: RankPool, family: str, layout: str) -> None:
    said = supported_models.read_table().get(family, {}).get(layout, supported_models.WORKS)
    if said == supported_models.WORKS:
        compare(ranks, family, LAYOUTS[layout])
        return
    with pytest.raises(AssertionError) as caught:
        compare(ranks, family, LAYOUTS[layout])
    assert supported_models.reason(caught.value) == said, "the table in the docs is out of date"


@pytest.mark.skipif(
    transformers.__version__ != supported_models.version(),
    reason="the table in the docs is of another transformers",
)
def test_table_has_every_family() -> None:
    assert list(supported_models.read_table()) == family_names()


@pytest.mark.parametrize("name", family_names())
def test_every_family(name: str) -> None:
    """Its plans find all experts, and `ep_kernels` computes what these do.

    Without ranks, so that it runs for all families, of both generations of plans.
    """
    model = build(name).model
    experts = {
        part: module
        for part, module in model.named_modules()
        if part.endswith("experts") and hasattr(module, "num_experts")
    }
    check_plans(model, experts)
    check_experts(name, next(iter(experts.values())))


def check_plans(model: torch.nn.Module, experts: dict[str, torch.nn.Module]) -> None:
    dispatches = "ep_dispatch_experts" in (model.config.base_model_ep_plan or {}).values()
    tp = 1 if dispatches and not model.config.base_model_tp_plan else 2
    plans = resolve_plans(model, DistributedConfig(tp_size=tp, fsdp_size=4, ep_size=2))
    assert experts
    assert set(plans.experts) == set(experts)
    for part, module in experts.items():
        stacked = [name for name, p in module.named_parameters() if p.ndim == 3]
        assert stacked
        assert {plans.ep[f"{part}.{name}"] for name in stacked} == {"grouped_gemm"}


def check_experts(name: str, experts: torch.nn.Module) -> None:
    """On what is recognised, and by the wrapper of what is not, some slots skipped."""
    assert (why_not(experts) is None) == (name not in ("Step3p7TextConfig", "Llama4TextConfig"))
    if name == "Llama4TextConfig":
        return  # takes every token: `ep_plans` has an adapter of its own
    count, parameters = experts.num_experts, list(experts.parameters())
    generator = torch.Generator().manual_seed(0)
    dtype = parameters[0].dtype
    width = experts.down_proj.shape[2 if getattr(experts, "is_transposed", False) else 1]
    rows = torch.randn(11, width, generator=generator).to(dtype)
    ids = torch.randint(0, count + 1, (11, 2), generator=generator)
    weights = torch.rand(11, 2, generator=generator).to(dtype)
    valid = ids < count
    with torch.no_grad():
        out = module_experts_forward(experts)(rows, ids, weights)
        expected = experts(rows, ids.masked_fill(~valid, 0), weights.masked_fill(~valid, 0))
    # Some compute parts in float32 though the model is in float64.
    assert float((out - expected).norm() / expected.norm()) < 1e-5


def test_silu_of_a_config_is_fused() -> None:
    """The activation's passes are one for `hidden_act="silu"`, whatever class that makes."""
    experts = build("Qwen3MoeConfig").model.model.layers[0].mlp.experts
    spec = ExpertsSpec.from_module(experts)
    assert spec is not None
    assert is_silu_gated(spec)


def test_the_comparison_sees_a_wrong_gradient(ranks: RankPool) -> None:
    """So that a family that passes has been compared."""
    import sharded_families

    exact = sharded_families.one_process

    def wrong(*args: object) -> sharded_families.Expected:
        expected = exact(*args)  # type: ignore[arg-type]
        gradient = expected.gradients["model.layers.1.mlp.gate.weight"]
        assert gradient is not None
        gradient *= 1.001
        return expected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_families, "one_process", wrong)
        with pytest.raises(AssertionError, match=r"mlp\.gate\.weight") as caught:
            compare(ranks, "Qwen3MoeConfig", LAYOUTS["tp=2, fsdp=4, ep=4"])
    assert not isinstance(caught.value, RankError)
