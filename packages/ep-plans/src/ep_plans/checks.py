"""Checks of a resolved plan against the model's sizes, and of rules that only work together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from ep_dispatch import EPImplementationInterface
from ep_mesh import DistributedConfig
from ep_plans.patterns import is_below, wildcard
from ep_plans.styles import STYLES, Replicate
from ep_plans.styles.base import num_experts_of

_NO_RULE = Replicate()  # without a rule, input and output are whole
# Projections that feed one other, as their modules call them.
_PAIRS = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_b_proj", "kv_b_proj"), "o_proj"),
    (("q_proj", "kv_b_proj"), "o_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
)


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module over the TP ranks.

    Attributes:
        query: query heads.
        key_value: key-value heads.
        copies: consecutive TP ranks that hold the same key-value head; 1: none is copied.
    """

    query: int
    key_value: int
    copies: int


def check_experts(
    model: nn.Module,
    experts: Collection[str],
    cut_weights: Collection[str],
    ep: Mapping[str, str],
    config: DistributedConfig,
) -> None:
    """Experts and all their stacked weights divide over the EP ranks; masking has `ep == tp`.

    Raises:
        ValueError: with the sizes that would fit, or the weights without a rule; or
            `ep_implementation` is unknown or needs ranks that share a batch where they don't.
    """
    masking = [name for name in experts if STYLES[ep[name]].masks]
    if masking and config.ep_size != config.tp_size:
        keys = dict.fromkeys(map(wildcard, masking), "ep_dispatch_experts")
        raise ValueError(
            f"The EP plan's style {ep[masking[0]]!r} for {next(iter(keys))} masks routes and needs "
            f"ep_size == tp_size, got ep_size={config.ep_size}, tp_size={config.tp_size}. Pass "
            f"ep_plan={keys} in DistributedConfig, which moves tokens in any layout, or make the "
            "sizes equal."
        )
    for name in experts:
        module = model.get_submodule(name)
        number = num_experts_of(module)
        if number is None:
            continue
        config.check_experts(number)
        whole = [
            f"{name}.{weight}"
            for weight, p in module.named_parameters(recurse=False)
            if p.ndim > 1 and p.shape[0] == number and f"{name}.{weight}" not in cut_weights
        ]
        if whole:
            raise ValueError(
                f"The EP plan runs the experts of {name} on {config.ep_size} ranks, but leaves "
                f"{', '.join(whole)} whole. Give them the style 'grouped_gemm', or none to {name}."
            )
    if len(masking) < len(experts):
        _check_implementation(config)


def _check_implementation(config: DistributedConfig) -> None:
    name = config.ep_implementation
    shared = config.ep_size == config.tp_size and not (
        config.enable_sequence_parallel and config.tp_size > 1
    )
    if EPImplementationInterface.get(name).needs_shared_batch and not shared:
        raise ValueError(
            f"ep_implementation={name!r} needs an EP group that shares one batch: ep_size == tp_size "
            f"and no sequence parallelism, got ep_size={config.ep_size}, tp_size={config.tp_size}, "
            f"enable_sequence_parallel={config.enable_sequence_parallel}. Use 'all_to_all' or 'auto'."
        )


def check_ep_options(config: DistributedConfig, options: object) -> None:
    """`options` are settings of the config's `ep_implementation`; their values it checks itself.

    Raises:
        ValueError: it has no setting of that name, or they are no dict of names.
    """
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ValueError(
            'ep_options must be a dict of names and values, such as {"num_chunks": 2}, got '
            f"{options!r}."
        )
    name = config.ep_implementation
    known = EPImplementationInterface.get(name).options()
    if unknown := [option for option in options if option not in known]:
        raise ValueError(
            f"ep_options: {', '.join(map(repr, unknown))} is no setting of ep_implementation={name!r}; "
            f"it has {', '.join(map(repr, known)) or 'none'}."
        )


def check_units(fsdp: Collection[str], experts: Collection[str]) -> None:
    """No FSDP unit lies among the experts: every rank has to run it in each step.

    Raises:
        ValueError: names the rule, and the module to give it to.
    """
    for name in fsdp:
        around, _, child = name.rpartition(".")
        path = around.split(".")
        inside = [at for at in experts if is_below(around, [at])]
        if "experts" not in path and not inside:
            continue
        holder = inside[0] if inside else ".".join(path[: path.index("experts")])
        advice = f"Give the rule to {holder!r} instead." if holder else "Leave the rule out."
        raise ValueError(
            f"the FSDP plan makes {name} a unit of its own, but a rank whose {child!r} gets no token would "
            f"not join its collectives, and the others would wait. {advice}"
        )


def check_pairs(model: nn.Module, tp: Mapping[str, str]) -> None:
    """Projections that feed each other are sharded alike.

    Raises:
        ValueError: naming the rules and the two ways in which they fit.
    """
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in tp):
        children = dict(model.get_submodule(parent).named_children())
        for inputs, output in _PAIRS:
            names = (*inputs, output)
            if all(isinstance(children.get(name), nn.Linear) for name in names):
                rules = {name: tp.get(f"{parent}.{name}".lstrip(".")) for name in names}
                if not _fit_together(rules, output):
                    raise ValueError(_misfit(parent, rules, output))


def _fit_together(rules: Mapping[str, str | None], output: str) -> bool:
    styles = {name: STYLES[rule] if rule else _NO_RULE for name, rule in rules.items()}
    wanted = styles.pop(output).input_in_parts
    given = {style.output_in_parts for style in styles.values()}
    return wanted is None or None in given or given == {wanted}


def _misfit(parent: str, rules: Mapping[str, str | None], output: str) -> str:
    told = ", ".join(f"{name}: {style or 'no rule'}" for name, style in rules.items())
    first = " and ".join(name for name in rules if name != output)
    packed = "packed_" if "gate_up_proj" in rules else ""
    return (
        f"The TP rules of {parent} do not fit together ({told}). Either {first} get "
        f"'{packed}colwise' and {output} gets 'rowwise', or {first} get 'colwise_rep' and {output} "
        "gets 'rowwise_split_input' (or none of them gets a rule). Override them together."
    )


def attention_heads(attention: nn.Module, tp_size: int) -> Heads | None:
    """How the heads of an attention module with `q_proj` and `k_proj` spread over `tp_size` ranks.

    Returns None where the module does not tell its head size or heads are not its unit.
    """
    query, key = (getattr(attention, name, None) for name in ("q_proj", "k_proj"))
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int) or query is None or key is None:
        return None
    key_features = getattr(key, "out_features", None)
    query_features = getattr(query, "out_features", None)
    if not isinstance(key_features, int) or not isinstance(query_features, int):
        return None
    if key_features % head_dim or query_features % head_dim:
        return None
    key_value = key_features // head_dim
    groups = getattr(attention, "num_key_value_groups", None)
    heads = key_value * groups if isinstance(groups, int) else query_features // head_dim
    copies = tp_size // key_value if key_value < tp_size and tp_size % key_value == 0 else 1
    return Heads(heads, key_value, copies)


def check_attention(model: nn.Module, tp: Mapping[str, str], tp_size: int) -> None:
    """Every sharded attention has whole heads on each rank.

    Raises:
        ValueError: with the TP sizes that would work.
    """
    for name, style in tp.items():
        parent, _, child = name.rpartition(".")
        if not STYLES[style].keeps_heads:
            continue
        if child == "kv_b_proj":
            _check_latent_heads(parent, model.get_submodule(parent), tp_size)
        if child != "k_proj":
            continue
        heads = attention_heads(model.get_submodule(parent), tp_size)
        if heads is None or _fits(heads, tp_size):
            continue
        sizes = [
            size
            for size in range(1, heads.query + 1)
            if heads.query % size == 0
            and (heads.key_value % size == 0 or size % heads.key_value == 0)
        ]
        raise ValueError(
            f"tp_size={tp_size} does not fit {parent}: {heads.query} query heads and "
            f"{heads.key_value} key-value heads. tp_size must divide the query heads, and divide "
            f"the key-value heads or be a multiple of them: one of {sizes}. Or pass tp_plan={{}} "
            "to leave the dense modules whole."
        )


def _check_latent_heads(name: str, attention: nn.Module, tp_size: int) -> None:
    """Multi-head latent attention: every head has its own keys, so none is copied."""
    heads = getattr(attention, "num_heads", None)
    if isinstance(heads, int) and heads % tp_size:
        sizes = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ValueError(
            f"tp_size={tp_size} does not fit {name}: it must divide the {heads} heads: one of "
            f"{sizes}. Or pass tp_plan={{}} to leave the dense modules whole."
        )


def _fits(heads: Heads, tp_size: int) -> bool:
    divides = heads.key_value % tp_size == 0 or tp_size % heads.key_value == 0
    return heads.query % tp_size == 0 and divides
