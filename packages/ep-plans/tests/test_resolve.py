"""From plans and overrides to rules: pure, so no processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toy_decoder import (
    ATTENTION,
    DISPATCH,
    EXPERT_WEIGHTS,
    FSDP_PLAN,
    MASKING,
    SINKS,
    TP_EXPERTS,
    TP_PLAN,
    ToyConfig,
    ToyForCausalLM,
)

from ep_mesh import DistributedConfig
from ep_plans import Plans, plan_parameters, resolve_plans
from ep_plans.checks import attention_heads
from ep_plans.patterns import nearest, rule_for, wildcard
from ep_plans.styles import STYLES

ATTN, MLP, MOE = "model.layers.1.self_attn", "model.layers.0.mlp", "model.layers.1.mlp"


def toy(**changes: Any) -> ToyForCausalLM:
    with torch.device("meta"):
        return ToyForCausalLM(ToyConfig(**changes))


def resolve(model: nn.Module | None = None, **sizes: Any) -> Plans:
    return resolve_plans(toy() if model is None else model, DistributedConfig(**sizes))


# -- patterns


def test_a_star_stands_for_layer_numbers_only() -> None:
    assert wildcard("model.layers.12.mlp.experts.3.w1") == "model.layers.*.mlp.experts.*.w1"
    assert wildcard("h.0") == "h.*"
    assert wildcard("0.weight") == "*.weight"
    assert wildcard("layer2.conv1d") == "layer2.conv1d"


def test_a_number_wins_over_a_star() -> None:
    rules = {"layers.*.a": "colwise", "layers.3.a": "rowwise"}
    assert rule_for("layers.3.a", rules) == "rowwise"
    assert rule_for("layers.4.a", rules) == "colwise"
    assert rule_for("layers.4.b", rules) is None


def test_the_nearest_come_first() -> None:
    assert nearest("q_prj", ["k_proj", "q_proj", "mlp"])[0] == "q_proj"
    assert nearest("something else", ["q_proj"]) == []


# -- what the model brings


def test_plans_of_classes_and_configs_merge_with_full_paths() -> None:
    plans = resolve(tp_size=2)
    assert plans.tp_rules == {
        "lm_head": "colwise_gather_output",
        "model.embed_tokens": "embedding_rowwise",
    } | {f"model.{key}": style for key, style in TP_PLAN.items()}
    assert plans.ep_rules == {f"model.{key}": style for key, style in DISPATCH.items()}
    assert plans.fsdp_rules == {"lm_head": "keep_full_weight"} | {
        f"model.{key}": style for key, style in FSDP_PLAN.items()
    }


def test_a_base_model_has_short_paths() -> None:
    plans = resolve(toy().model, tp_size=2, ep_size=2)
    assert plans.tp["layers.0.self_attn.q_proj"] == "colwise"
    assert plans.ep["layers.1.mlp.experts"] == "ep_dispatch_experts"


def test_sizes_switch_rules_on() -> None:
    assert resolve() == Plans(fsdp=resolve().fsdp, **{n: getattr(resolve(), n) for n in RULES})
    dense = resolve(tp_size=2)
    assert dense.tp[f"{MOE}.experts"] == "moe_tp_experts"
    assert dense.tp[f"{MOE}.experts.gate_up_proj"] == "packed_colwise"
    assert dense.ep == {}
    experts = resolve(fsdp_size=2, ep_size=2)
    assert experts.tp == {}
    assert experts.ep[f"{MOE}.experts.gate_up_proj"] == "grouped_gemm"
    assert experts.experts == [f"{MOE}.experts"]


RULES = ("tp_rules", "ep_rules", "fsdp_rules")


def test_ep_rules_win_over_tp_rules_and_what_is_below_them() -> None:
    plans = resolve(tp_size=2, ep_size=2)
    assert not any(name.startswith(f"{MOE}.experts") for name in plans.tp)
    assert plans.tp[f"{ATTN}.q_proj"] == "colwise"
    assert plans.tp[f"{MOE}.shared_expert.gate_proj"] == "colwise"
    assert plans.tp_rules["model.layers.*.mlp.experts"] == "moe_tp_experts"  # still shown


def test_a_module_rule_is_its_own_parameters_rule_and_not_its_childrens() -> None:
    plans = resolve(toy(bias=True), tp_size=2)
    assert plans.tp[f"{ATTN}.q_proj.weight"] == plans.tp[f"{ATTN}.q_proj.bias"] == "colwise"
    local = resolve(
        toy(sinks=True, base_model_tp_plan=TP_PLAN | {"layers.*.self_attn": "local_params"}),
        tp_size=2,
    )
    assert local.tp[f"{ATTN}.sinks"] == "local_params"
    assert local.tp[f"{ATTN}.q_norm"] == "replicated_with_grad_allreduce"


def test_a_parameters_rule_wins_over_its_modules() -> None:
    plans = resolve(toy(sinks=True, base_model_tp_plan=TP_PLAN | SINKS), tp_size=2)
    assert plans.tp[f"{ATTN}.sinks"] == "colwise"
    assert plans.tp[ATTN] == "local_params"


def test_the_embedding_is_sharded_where_the_rest_is() -> None:
    assert resolve(tp_size=2).tp["model.embed_tokens.weight"] == "embedding_rowwise"
    assert resolve(tp_size=2, ep_size=2, tp_plan={}).tp == {}
    kept = resolve(tp_size=2, tp_plan={"model.embed_tokens": "replicate"})
    assert kept.tp["model.embed_tokens"] == "replicate"


def test_a_tied_weight_is_cut_once_over_the_vocabulary() -> None:
    plans = resolve(toy(tied=True), tp_size=2, fsdp_size=2)
    assert plans.tp["model.embed_tokens"] == "embedding_rowwise"
    assert plans.tp["lm_head"] == "colwise_gather_output"
    assert "lm_head" not in plans.fsdp
    assert plans.fsdp["model.embed_tokens"] == "keep_full_weight"


def test_fsdp_units_come_innermost_first() -> None:
    names = list(resolve(fsdp_size=2).fsdp)
    depths = [name.count(".") for name in names]
    assert depths == sorted(depths, reverse=True)
    assert set(names) == {
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head",
    }  # fmt: skip


def test_no_expert_is_a_unit_of_its_own() -> None:
    """A rank whose expert gets no token would not join its collectives."""
    model = toy()
    experts = model.model.layers[1].mlp.experts
    experts.norm = nn.LayerNorm(4, device="meta")
    whole = {"model.layers.*.mlp.experts": "free_full_weight"}
    rule = {"model.layers.*.mlp.experts.norm": "free_full_weight"}
    for sizes in ({}, {"ep_size": 2}):
        assert f"{MOE}.experts" in resolve(model, fsdp_size=2, fsdp_plan=whole, **sizes).fsdp
        with pytest.raises(ValueError, match=r"'norm' gets no token .* Give the rule to 'model"):
            resolve(model, fsdp_size=2, fsdp_plan=rule, **sizes)
    one_by_one = nn.Sequential()
    one_by_one.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    one_by_one.first = nn.Linear(4, 4)
    for key in ("experts.*", "experts.1"):
        with pytest.raises(ValueError, match=r"experts\.[01] a unit of its own"):
            resolve(one_by_one, fsdp_size=2, fsdp_plan={key: "free_full_weight"})
    assert resolve(one_by_one, fsdp_size=2, fsdp_plan={"first": "free_full_weight"}).fsdp


# -- overrides


def test_an_override_replaces_one_rule_and_keeps_the_rest() -> None:
    plans = resolve(tp_size=2, tp_plan={"model.layers.*.self_attn.q_norm": "replicate"})
    assert plans.tp[f"{ATTN}.q_norm"] == "replicate"
    assert plans.tp[f"{ATTN}.k_norm"] == "replicated_with_grad_allreduce"
    assert plans.tp_rules["model.layers.*.self_attn.q_norm"] == "replicate"


def test_an_override_of_one_layer() -> None:
    plans = resolve(tp_size=2, tp_plan={"model.layers.0.self_attn.q_norm": "replicate"})
    assert plans.tp["model.layers.0.self_attn.q_norm"] == "replicate"
    assert plans.tp["model.layers.1.self_attn.q_norm"] == "replicated_with_grad_allreduce"


def test_auto_and_none_are_the_models_own_plan() -> None:
    assert resolve(tp_size=2, tp_plan="auto") == resolve(tp_size=2)


def test_an_empty_plan_is_no_tp_rule_at_all() -> None:
    plans = resolve(tp_size=2, ep_size=2, tp_plan={})
    assert plans.tp == plans.tp_rules == {}
    assert plans.experts == [f"{MOE}.experts"]


def test_the_deprecated_flag_means_experts_only() -> None:
    with pytest.warns(FutureWarning):
        config = DistributedConfig(tp_size=2, enable_expert_parallel=True)
    plans = resolve_plans(toy(), config)
    assert plans.tp == {}
    assert plans.experts == [f"{MOE}.experts"]


def test_a_plan_for_a_model_that_brings_none() -> None:
    bare = {"base_model_tp_plan": None, "base_model_ep_plan": None}
    plan = {f"model.{key}": style for key, style in DISPATCH.items()}
    assert resolve(toy(**bare), fsdp_size=2, ep_size=2, ep_plan=plan).experts == [f"{MOE}.experts"]
    with pytest.raises(ValueError, match=r"ep_size=2, but ToyForCausalLM brings no ep_plan. Pass"):
        resolve(toy(**bare), fsdp_size=2, ep_size=2)


def test_a_tp_size_needs_a_plan_unless_ranks_share_a_batch_for_the_experts() -> None:
    class Plain(nn.Linear):
        pass

    with pytest.raises(ValueError, match=r"tp_size=2, but Plain brings no tp_plan"):
        resolve(Plain(2, 2), tp_size=2)
    assert resolve(toy(base_model_tp_plan=None), tp_size=2, ep_size=2).tp.keys() == {
        "lm_head", "lm_head.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "key", "near"),
    [
        ("tp_plan", "model.layers.*.self_attn.q_prj", "'model.layers.*.self_attn.q_proj'"),
        ("ep_plan", "model.layers.*.mlp.expert", "'model.layers.*.mlp.experts'"),
        ("fsdp_plan", "model.layer.*", "'model.layers.*'"),
        ("tp_plan", "layers.*.self_attn.q_proj", "'model.layers.*.self_attn.q_proj'"),
        ("tp_plan", "model.layers.7.self_attn.q_proj", "'model.layers.1.self_attn.q_proj'"),
        ("tp_plan", "???", "none is alike"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest(plan: str, key: str, near: str) -> None:
    with pytest.raises(ValueError, match="matches no module") as error:
        resolve(tp_size=2, fsdp_size=2, ep_size=2, **{plan: {key: "colwise"}})
    assert f"{plan} key {key!r} matches no module" in str(error.value)
    assert near in str(error.value)


def test_a_key_may_name_a_rule_of_the_plan_that_no_module_has() -> None:
    dense_only = toy(first_dense=2)
    plans = resolve(dense_only, tp_size=2, tp_plan={"model.layers.*.mlp.experts": "replicate"})
    assert plans.tp_rules["model.layers.*.mlp.experts"] == "replicate"


@pytest.mark.parametrize(
    ("plan", "known"),
    [
        ("tp_plan", ["colwise", "rowwise_split_input", "mla_kv_a_proj"]),
        ("ep_plan", ["ep_dispatch_experts", "grouped_gemm"]),
        ("fsdp_plan", ["free_full_weight", "keep_full_weight"]),
    ],
)
def test_an_unknown_style_lists_the_known(plan: str, known: list[str]) -> None:
    with pytest.raises(ValueError, match=r"unknown style 'colwize'") as error:
        resolve(**{plan: {"model.norm": "colwize"}})
    assert all(style in str(error.value) for style in known)
    if plan == "tp_plan":
        assert "Did you mean 'colwise'?" in str(error.value)


# -- both generations of expert plans


def test_masking_needs_ranks_that_share_a_batch() -> None:
    model = toy(base_model_ep_plan=MASKING)
    plans = resolve(model, tp_size=2, ep_size=2)
    assert plans.ep[f"{MOE}.gate"] == "ep_router"
    assert plans.ep[f"{MOE}.experts"] == "moe_tp_experts"
    with pytest.raises(ValueError, match=r"'moe_tp_experts'.*ep_size=4, tp_size=2") as error:
        resolve(model, tp_size=2, fsdp_size=2, ep_size=4)
    # The override that it names works.
    override = {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
    assert f"ep_plan={override}" in str(error.value)
    plans = resolve(model, tp_size=2, fsdp_size=2, ep_size=4, ep_plan=override)
    assert plans.ep[f"{MOE}.experts"] == "ep_dispatch_experts"


def test_beside_dispatch_a_router_rule_is_ignored() -> None:
    model = toy(base_model_ep_plan=MASKING)
    plans = resolve(
        model,
        tp_size=2,
        fsdp_size=2,
        ep_size=4,
        ep_plan={"model.layers.*.mlp.experts": "ep_dispatch_experts"},
    )
    assert f"{MOE}.gate" not in plans.ep
    assert plans.ep[f"{MOE}.experts"] == "ep_dispatch_experts"
    assert plans.ep_rules["model.layers.*.mlp.gate"] == "ep_router"


def test_an_ep_plan_that_runs_no_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no rule of the EP plan .* runs the experts"):
        resolve(toy(base_model_ep_plan=EXPERT_WEIGHTS), fsdp_size=2, ep_size=2)


def test_dense_rules_of_an_ep_plan_work_over_the_tp_axis() -> None:
    model = toy(base_model_ep_plan=DISPATCH | ATTENTION)
    plans = resolve(model, tp_size=2, fsdp_size=2, ep_size=4, tp_plan={})
    assert plans.tp[f"{ATTN}.q_proj.weight"] == "colwise"
    assert not any("self_attn" in name for name in plans.ep)
    assert resolve(model, fsdp_size=4, ep_size=4).tp == {}


def test_experts_must_divide() -> None:
    with pytest.raises(ValueError, match=r"6"):
        resolve(toy(num_experts=6), fsdp_size=4, ep_size=4)


def test_an_implementation_must_be_known_and_fit() -> None:
    with pytest.raises(ValueError, match=r"'all_to_al' names no registered .*'all_to_all'"):
        resolve(fsdp_size=2, ep_size=2, ep_implementation="all_to_al")
    sizes = {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"}
    assert resolve(**sizes).experts
    with pytest.raises(ValueError, match=r"'all_reduce' needs .* enable_sequence_parallel=True"):
        DistributedConfig(**sizes, enable_sequence_parallel=True)


# -- rules that only work together


@pytest.mark.parametrize(
    "override",
    [
        {"self_attn.q_proj": "colwise_rep"},
        {"self_attn.o_proj": "rowwise_split_input"},
        {"self_attn.o_proj": "replicate"},
        {"self_attn.k_proj": "replicate", "self_attn.v_proj": "replicate"},
        {"mlp.gate_proj": "colwise_gather_output"},
        {"mlp.shared_expert.down_proj": "rowwise_rep"},
    ],
)
def test_rules_that_do_not_fit_are_refused_with_those_that_do(override: dict[str, str]) -> None:
    rules = {f"model.layers.*.{key}": style for key, style in override.items()}
    with pytest.raises(ValueError, match="do not fit together") as error:
        resolve(tp_size=2, tp_plan=rules)
    text = str(error.value)
    for words in ("'colwise'", "'rowwise'", "'colwise_rep'", "'rowwise_split_input'", "together"):
        assert words in text
    assert next(iter(override)).split(".")[-1] in text


@pytest.mark.parametrize(
    ("inputs", "output"), [("colwise_rep", "rowwise_split_input"), ("replicate", "replicate")]
)
def test_the_whole_set_of_rules_fits(inputs: str, output: str) -> None:
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj"), inputs) | {"o_proj": output}
    plan = {f"model.layers.*.self_attn.{key}": style for key, style in attention.items()}
    assert resolve(tp_size=2, tp_plan=plan).tp[f"{ATTN}.o_proj"] == output


def test_a_packed_projection_feeds_a_cut_one() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 4)

    plan = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
    assert resolve(Packed(), tp_size=2, tp_plan=plan).tp["down_proj"] == "rowwise"
    with pytest.raises(ValueError, match="gate_up_proj get 'packed_colwise'"):
        resolve(Packed(), tp_size=2, tp_plan={"gate_up_proj": "packed_colwise"})


# -- heads


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("key_value", [1, 2, 4, 8])
def test_too_few_key_value_heads_are_copied(tp_size: int, key_value: int) -> None:
    model = toy(num_key_value_heads=key_value)
    plans = resolve(model, tp_size=tp_size)
    copies = max(1, tp_size // key_value)
    shardings = plan_parameters(model, plans, DistributedConfig(tp_size=tp_size))
    cut = shardings[f"{ATTN}.k_proj.weight"].cut
    assert (1 if cut is None else cut.copies) == copies
    query = shardings[f"{ATTN}.q_proj.weight"].cut
    assert query is None or query.copies == 1


@pytest.mark.parametrize(
    ("heads", "key_value", "tp_size", "sizes"),
    [(8, 8, 3, [1, 2, 4, 8]), (6, 2, 4, [1, 2, 6]), (6, 3, 2, [1, 3, 6]), (4, 2, 8, [1, 2, 4])],
)
def test_heads_that_fit_neither_way_are_told_the_sizes(
    heads: int, key_value: int, tp_size: int, sizes: list[int]
) -> None:
    model = toy(num_attention_heads=heads, num_key_value_heads=key_value)
    with pytest.raises(ValueError, match=r"does not fit model\.layers\.0\.self_attn") as error:
        resolve(model, tp_size=tp_size)
    assert f"{heads} query heads and {key_value} key-value heads" in str(error.value)
    assert str(sizes) in str(error.value)
    for size in sizes:
        resolve(model, tp_size=size)
    gathered = {
        f"model.layers.*.self_attn.{name}": "replicate"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    resolve(model, tp_size=tp_size, tp_plan=gathered)


def test_heads_of_latent_attention_must_divide() -> None:
    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 6
            self.kv_b_proj, self.o_proj = nn.Linear(4, 24), nn.Linear(24, 4)

    plan = {"kv_b_proj": "colwise", "o_proj": "rowwise"}
    with pytest.raises(ValueError, match=r"tp_size=4 .* the 6 heads: one of \[1, 2, 3, 6\]"):
        resolve(
            nn.ModuleDict({"attn": Latent()}),
            tp_size=4,
            tp_plan={f"attn.{k}": s for k, s in plan.items()},
        )
    assert resolve(Latent(), tp_size=3, tp_plan=plan).tp["kv_b_proj"] == "colwise"


def test_heads_are_unknown_without_a_head_size() -> None:
    assert attention_heads(nn.Module(), 2) is None


# -- where parameters go


def test_what_fsdp_cannot_take_stays_whole() -> None:
    model = toy(sinks=True).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.sinks.data = layer.self_attn.sinks.data.float()
        layer.self_attn.q_norm.weight.data = layer.self_attn.q_norm.weight.data.float()
    model.model.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16, device="meta"))
    config = DistributedConfig(tp_size=2, fsdp_size=2)
    shardings = plan_parameters(model, resolve_plans(model, config), config)
    sinks, scale = shardings[f"{ATTN}.sinks"], shardings["model.scale"]
    assert sinks.data_axis is scale.data_axis is None
    assert sinks.mean_over == scale.mean_over == "dp"
    assert sinks.float32
    assert not scale.float32
    norm = shardings[f"{ATTN}.q_norm.weight"]  # alone in its module: a unit of its own
    assert norm.float32
    assert norm.data_axis == "fsdp_tp"
    assert not any(
        s.mean_over for n, s in shardings.items() if "sinks" not in n and "scale" not in n
    )


def test_modules_that_the_model_keeps_in_float32() -> None:
    model = toy()
    model._keep_in_fp32_modules_strict = {"mlp.gate.weight"}
    gate = f"{MOE}.gate.weight"

    def kept(**sizes: Any) -> bool:
        config = DistributedConfig(fsdp_size=2, **sizes)
        return plan_parameters(model, resolve_plans(model, config), config)[gate].float32

    assert not kept()
    assert kept(fsdp_mixed_precision=True)
    model.to(torch.bfloat16)
    assert kept()


@pytest.mark.parametrize(("given", "hidden", "expected"), [
    (None, 16, True), (True, 16, True), (False, 16, False),
])  # fmt: skip
def test_replicated_parameters_are_sharded_over_tp_where_it_pays(
    given: bool | None, hidden: int, expected: bool
) -> None:
    model = toy(hidden_size=hidden)
    config = DistributedConfig(tp_size=2, fsdp_over_tp=given)
    shardings = plan_parameters(model, resolve_plans(model, config), config)
    assert (shardings["model.norm.weight"].data_axis == "fsdp_tp") is expected


def test_replicated_parameters_stay_where_little_is_to_be_gained() -> None:
    # Norms and a router of 8 experts beside a large vocabulary: below one percent.
    model = toy(vocab_size=50_000, intermediate_size=4000)
    config = DistributedConfig(tp_size=2)
    shardings = plan_parameters(model, resolve_plans(model, config), config)
    assert {s.data_axis for s in shardings.values()} == {None}


def test_a_rule_of_a_container_covers_the_parameters_in_it() -> None:
    model = toy()
    config = DistributedConfig(
        tp_size=2, tp_plan={"model.layers.*.input_layernorm": "sequence_parallel"}
    )
    shardings = plan_parameters(model, resolve_plans(model, config), config)
    assert shardings["model.layers.0.input_layernorm.weight"].partial_over == "tp"
    model.model.layers[0].input_layernorm.inner = nn.Sequential(nn.Linear(4, 4, device="meta"))
    shardings = plan_parameters(model, resolve_plans(model, config), config)
    assert shardings["model.layers.0.input_layernorm.inner.0.weight"].partial_over == "tp"
    assert shardings["model.layers.0.post_attention_layernorm.weight"].partial_over is None


# -- what a style needs is checked before anything is touched


@pytest.mark.parametrize(
    ("key", "style", "words"),
    [
        ("model.norm", "colwise_rep", "`out_features`, got Norm"),
        ("model.norm", "embedding_rowwise", "`num_embeddings`, got Norm"),
        ("model.norm", "embedding_colwise", "`embedding_dim`, got Norm"),
        ("model.layers.*.self_attn.k_norm", "mla_kv_a_proj", "`qk_rope_head_dim`"),
    ],
)
def test_a_style_on_the_wrong_module(key: str, style: str, words: str) -> None:
    model = toy()
    before = dict(model.named_parameters()), model.state_dict().keys()
    with pytest.raises(ValueError, match="the style") as error:
        resolve(model, tp_size=2, tp_plan={key: style})
    assert words in str(error.value)
    assert style.partition("_")[0] in str(error.value)
    assert (dict(model.named_parameters()), model.state_dict().keys()) == before


def test_every_style_of_released_plans_is_known() -> None:
    released = {
        "colwise", "rowwise", "colwise_rep", "colwise_gather_output", "rowwise_rep",
        "rowwise_split_input", "packed_colwise", "packed_rowwise", "embedding_rowwise",
        "embedding_colwise", "sequence_parallel", "replicated_with_grad_allreduce",
        "mla_kv_a_proj", "local_params", "all_reduce", "replicate", "moe_identity_expert",
        "moe_tp_experts", "ep_router", "grouped_gemm", "ep_dispatch_experts",
    }  # fmt: skip
    assert released <= STYLES.keys()


def test_tp_experts_are_a_set_of_rules() -> None:
    plans = resolve(tp_size=2)
    found = {f"layers.*.mlp.{n.removeprefix(f'{MOE}.')}": s for n, s in plans.tp.items()}
    assert TP_EXPERTS.items() <= found.items()
