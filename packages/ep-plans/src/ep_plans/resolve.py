"""From a model and a configuration to the rules that apply, checked before anything is touched.

The order: collect the plans that the model brings, lay the overrides over them, keep what the sizes
switch on, let EP rules win over TP rules, expand `*`, check styles and rules that must go together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ep_mesh import DistributedConfig
from ep_plans._compat import class_plan
from ep_plans.checks import check_attention, check_experts, check_pairs, check_units
from ep_plans.families import family_plan, family_style
from ep_plans.patterns import is_below, nearest, rule_for, wildcard
from ep_plans.styles import FSDP_STYLES, STYLES, Scope

PLAN_NAMES = ("tp_plan", "ep_plan", "fsdp_plan")
# What the norm over each head is called, by the projection that it follows.
_HEAD_NORMS = {
    "q_proj": ("q_norm", "q_layernorm", "query_layernorm"),
    "k_proj": ("k_norm", "k_layernorm", "key_layernorm"),
}


@dataclass(frozen=True)
class Plans:
    """The rules that apply to one model.

    Attributes:
        tp: concrete module or parameter name to style, for the TP axis.
        ep: the same for the expert axis.
        fsdp: module name to FSDP style, innermost modules first.
        tp_rules: the merged TP plan with `*`, as the model shows it, also where it is not applied.
        ep_rules: the merged EP plan.
        fsdp_rules: the merged FSDP plan.
    """

    tp: dict[str, str] = field(default_factory=dict)
    ep: dict[str, str] = field(default_factory=dict)
    fsdp: dict[str, str] = field(default_factory=dict)
    tp_rules: dict[str, str] = field(default_factory=dict)
    ep_rules: dict[str, str] = field(default_factory=dict)
    fsdp_rules: dict[str, str] = field(default_factory=dict)

    @property
    def experts(self) -> list[str]:
        """The names of the modules whose experts are spread over the expert axis."""
        return [name for name, style in self.ep.items() if STYLES[style].scope is Scope.EXPERTS]

    @property
    def masked(self) -> list[str]:
        """Those of `experts` that get local ids, other ranks' routes masked, of one batch."""
        return [name for name in self.experts if STYLES[self.ep[name]].masks]


def resolve_plans(model: nn.Module, config: DistributedConfig) -> Plans:
    """The rules that `config` applies to `model`; neither is changed.

    Args:
        model: a model that brings plans as transformers models do (`config.base_model_tp_plan` and
            so on, class-level `_tp_plan`), or none. On any device, meta included.
        config: sizes and overrides.

    Raises:
        ValueError: an override key matches nothing, a style is unknown, a size asks for a plan that
            does not exist, rules that must go together do not, experts or heads do not divide.
            The text names the values and what would fit.
    """
    names = _Names(model)
    rules = {plan: _merged(model, plan, config, names) for plan in PLAN_NAMES}
    for plan, merged in rules.items():
        _check_styles(plan, merged)

    tp_rules = dict(rules["tp_plan"]) if config.tp_size > 1 else {}
    ep_rules = dict(rules["ep_plan"]) if config.ep_size > 1 else {}
    _require_plans(model, config, tp_rules, ep_rules)

    ep = {
        name: family_style(model, name, style) if name in names.modules else style
        for name, style in _expand(ep_rules, names).items()
    }
    if config.ep_size > 1:
        if not any(STYLES[style].scope is Scope.EXPERTS for style in ep.values()):
            raise ValueError(
                f"ep_size={config.ep_size}, but no rule of the EP plan {ep_rules} runs the experts "
                f"of {type(model).__name__}: add a rule with the style 'ep_dispatch_experts' for "
                "the experts module and 'grouped_gemm' for its weights, or set ep_size=1."
            )
        ep = _without_ignored_routers(ep)
    # A dense rule of the EP plan shards over the TP axis: ranks of an EP group hold different batches.
    dense = {name: style for name, style in ep.items() if _is_dense(name, style, ep)}
    ep = {name: style for name, style in ep.items() if name not in dense}
    tp = {
        name: style
        for name, style in _expand(tp_rules, names).items()
        if not is_below(name, (*ep, *dense))
    }
    if config.tp_size > 1:
        tp.update(dense)
    tp = _with_tied_partner(model, tp, names)
    tp = _with_head_norms(tp, names)
    tp = _with_whole_inputs(tp)

    plans = Plans(
        tp=tp,
        ep=ep,
        fsdp=_fsdp(model, rules["fsdp_plan"], names),
        tp_rules=rules["tp_plan"],
        ep_rules=rules["ep_plan"],
        fsdp_rules=rules["fsdp_plan"],
    )
    cut = [name for name, style in ep.items() if STYLES[style].scope is Scope.EXPERT_WEIGHT]
    check_experts(model, plans.experts, cut, ep, config)
    check_units(plans.fsdp, plans.experts)
    check_pairs(model, tp)
    check_attention(model, tp, config.tp_size)
    for name, style in (*tp.items(), *ep.items()):
        if name in names.modules:
            STYLES[style].check(model, name)
    return plans


class _Names:
    """The modules and parameters of a model, and their patterns."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.patterns = {wildcard(name) for name in (*self.modules, *self.parameters)}


def _declared(model: nn.Module, plan: str) -> dict[str, str]:
    """The plan that the model's classes and configs bring, with full paths."""
    merged: dict[str, str] = {}
    # Innermost first, so that an outer module's word wins.
    for name, module in reversed(list(model.named_modules())):
        if not hasattr(module, "base_model_prefix"):
            continue
        own = class_plan(module, plan)
        config = getattr(module, "config", None)
        if getattr(module, "base_model", None) is module:
            own.update(getattr(config, f"base_model_{plan}", None) or {})
            embedding = getattr(module, "embed_tokens", None)
            # One with children (a norm) would run them on partial outputs.
            leaf = isinstance(embedding, nn.Embedding) and not any(embedding.children())
            if plan == "tp_plan" and own and leaf:
                own = {"embed_tokens": "embedding_rowwise", **own}
        if (ours := family_plan(module, plan)) is not None:
            own = ours
        prefix = f"{name}." if name else ""
        merged.update({f"{prefix}{key}": style for key, style in own.items()})
    return merged


def _merged(
    model: nn.Module, plan: str, config: DistributedConfig, names: _Names
) -> dict[str, str]:
    declared = _declared(model, plan)
    override = getattr(config, plan)
    if not isinstance(override, Mapping):
        return declared
    if plan == "tp_plan" and not override:
        return {}
    known = names.patterns | set(names.modules) | set(names.parameters) | set(declared)
    for key in override:
        if key not in known:
            near = ", ".join(map(repr, nearest(key, known))) or "none is alike"
            raise ValueError(
                f"{plan} key {key!r} matches no module, parameter or rule of "
                f"{type(model).__name__}. Nearest: {near}."
            )
    return {**declared, **override}


def _check_styles(plan: str, rules: Mapping[str, str]) -> None:
    known = FSDP_STYLES if plan == "fsdp_plan" else STYLES
    for key, style in rules.items():
        if style not in known:
            near = nearest(str(style), known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{plan} rule {key!r} has the unknown style {style!r}.{hint} "
                f"Known: {', '.join(sorted(known))}."
            )


def _require_plans(
    model: nn.Module, config: DistributedConfig, tp: Mapping[str, str], ep: Mapping[str, str]
) -> None:
    for axis, rules in (("tp", tp), ("ep", ep)):
        size = getattr(config, f"{axis}_size")
        given = getattr(config, f"{axis}_plan")
        if size > 1 and not rules and given != {}:
            # TP ranks that share a batch for the experts alone need no TP rule.
            if axis == "tp" and config.ep_size > 1:
                continue
            raise ValueError(
                f"{axis}_size={size}, but {type(model).__name__} brings no {axis}_plan. Pass "
                f"{axis}_plan={{...}} in DistributedConfig, or set {axis}_size=1."
            )


def _expand(rules: Mapping[str, str], names: _Names) -> dict[str, str]:
    """Concrete names: each module's own parameters, then the module itself."""
    expanded: dict[str, str] = {}
    for module_name, module in names.modules.items():
        module_rule = rule_for(module_name, rules) if module_name else None
        for parameter, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{parameter}" if module_name else parameter
            style = rule_for(name, rules) or module_rule
            if style is not None:
                expanded[name] = style
        if module_rule is not None:
            expanded[module_name] = module_rule
    return expanded


def _without_ignored_routers(ep: dict[str, str]) -> dict[str, str]:
    """Dispatch needs global expert ids, so beside it a router rule of a masking plan is dropped."""
    if not any(STYLES[style].dispatches for style in ep.values()):
        return ep
    return {name: style for name, style in ep.items() if STYLES[style].scope is not Scope.ROUTER}


def _is_dense(name: str, style: str, ep: Mapping[str, str]) -> bool:
    roots = [root for root, s in ep.items() if STYLES[s].scope is Scope.EXPERTS]
    return STYLES[style].scope is Scope.DENSE and not is_below(name, roots)


def _tied_embeddings(model: nn.Module, names: _Names) -> tuple[str, str] | None:
    """The names of the input embedding and of an output head that shares its weight."""
    get_input = getattr(model, "get_input_embeddings", None)
    get_output = getattr(model, "get_output_embeddings", None)
    if get_input is None or get_output is None:
        return None
    try:
        embedding, head = get_input(), get_output()
    except (NotImplementedError, AttributeError):
        return None
    found = {module: name for name, module in names.modules.items()}
    if embedding not in found or head not in found:
        return None
    tied: Mapping[str, Any] = getattr(model, "all_tied_weights_keys", None) or {}
    head_key, embedding_key = f"{found[head]}.weight", f"{found[embedding]}.weight"
    shared = getattr(embedding, "weight", None) is getattr(head, "weight", object())
    if shared or tied.get(head_key) == embedding_key or tied.get(embedding_key) == head_key:
        return found[embedding], found[head]
    return None


def _with_tied_partner(model: nn.Module, tp: dict[str, str], names: _Names) -> dict[str, str]:
    """A weight shared by embedding and head is cut once, over the vocabulary, for both."""
    pair = _tied_embeddings(model, names)
    if pair is None or not any(name in tp for name in pair):
        return tp
    embedding, head = pair
    return {
        **tp,
        f"{embedding}.weight": "embedding_rowwise",
        embedding: "embedding_rowwise",
        f"{head}.weight": "colwise_gather_output",
        head: "colwise_gather_output",
    }


def _with_head_norms(tp: dict[str, str], names: _Names) -> dict[str, str]:
    """A norm over single heads, of which each rank has some, sees a part of its gradient.

    Some released plans (Qwen3-VL-MoE, Qwen3-Omni-MoE, GLM-4 MoE) shard the heads and have no rule
    for the norms, whose gradient is then too small by the heads of the other ranks.
    """
    found = dict(tp)
    for name, style in tp.items():
        attention, _, child = name.rpartition(".")
        if child not in _HEAD_NORMS or not STYLES[style].keeps_heads:
            continue
        head_dim = getattr(names.modules[attention], "head_dim", None)
        for norm in (f"{attention}.{norm}" for norm in _HEAD_NORMS[child]):
            weight = getattr(names.modules.get(norm), "weight", None)
            if norm not in tp and weight is not None and tuple(weight.shape) == (head_dim,):
                found[norm] = "replicated_with_grad_allreduce"
    return found


def _with_whole_inputs(tp: dict[str, str]) -> dict[str, str]:
    """An attention output projection whose attention is whole takes its features of a whole input.

    In hybrid models one pattern covers layers of several kinds, and shards the projections before it
    in some of them only (GLM-5-Next's linear attention has no rule but this one).
    """
    found = dict(tp)
    for name, style in tp.items():
        attention, _, child = name.rpartition(".")
        if child == "o_proj" and style == "rowwise":
            inside = [n for n in tp if is_below(n, [attention]) and not is_below(n, [name])]
            if not inside:
                found[name] = "rowwise_split_input"
                found[f"{name}.weight"] = "rowwise_split_input"
    return found


def _fsdp(model: nn.Module, rules: Mapping[str, str], names: _Names) -> dict[str, str]:
    plan = {
        name: style
        for name in names.modules
        if name and (style := rule_for(name, rules)) is not None
    }
    if (pair := _tied_embeddings(model, names)) is not None:
        # One parameter, one FSDP unit: the embedding's, kept whole if the head wants it so.
        embedding, head = pair
        head_style = plan.pop(head, None)
        if embedding in plan and head_style == "keep_full_weight":
            plan[embedding] = "keep_full_weight"
    return dict(_innermost_first(plan))


def _innermost_first(plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield from sorted(plan.items(), key=lambda item: item[0].count("."), reverse=True)
