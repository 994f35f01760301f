"""Checks of a resolved plan against the model's sizes, and of rules that only work together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from ep_mesh import DistributedConfig

_SHARDED = "colwise"
_GATHERED = ("colwise_rep", "colwise_gather_output")
_SPLIT_INPUT = ("rowwise_rep", "rowwise_split_input")


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


def num_experts_of(experts: nn.Module) -> int | None:
    """The experts that a module holds, from `num_experts` or its first stacked weight."""
    number = getattr(experts, "num_experts", None)
    if isinstance(number, int):
        return number
    stacked = [p for p in experts.parameters(recurse=False) if p.ndim == 3]
    return stacked[0].shape[0] if stacked else None


def check_experts(
    model: nn.Module, experts: Iterable[str], ep: Mapping[str, str], config: DistributedConfig
) -> None:
    """Experts divide over the EP ranks, and a masking plan has `ep_size == tp_size`.

    Raises:
        ValueError: with the sizes that would fit.
    """
    masking = [name for name in experts if ep[name] == "moe_tp_experts"]
    if masking and config.ep_size != config.tp_size:
        raise ValueError(
            f"The EP rule {masking[0]!r}: 'moe_tp_experts' masks routes and needs ep_size == "
            f"tp_size, got ep_size={config.ep_size}, tp_size={config.tp_size}. Override it with "
            "'ep_dispatch_experts', which moves tokens in any layout, or make the sizes equal."
        )
    for name in experts:
        module = model.get_submodule(name)
        number = num_experts_of(module)
        if number is not None:
            config.check_experts(number)


def check_pairs(tp: Mapping[str, str]) -> None:
    """Projections that feed each other are sharded alike.

    Raises:
        ValueError: naming the rules and the two ways in which they fit.
    """
    parents: dict[str, dict[str, str]] = {}
    for name, style in tp.items():
        parent, _, child = name.rpartition(".")
        parents.setdefault(parent, {})[child] = style
    for parent, rules in parents.items():
        for inputs, output in (
            (("q_proj", "k_proj", "v_proj"), "o_proj"),
            (("gate_proj", "up_proj"), "down_proj"),
        ):
            if output in rules and all(name in rules for name in inputs):
                _check_pair(parent, {name: rules[name] for name in (*inputs, output)}, output)


def _check_pair(parent: str, rules: dict[str, str], output: str) -> None:
    inputs = [style for name, style in rules.items() if name != output]
    sharded = all(style == _SHARDED for style in inputs) and rules[output] == "rowwise"
    gathered = all(style in _GATHERED for style in inputs) and rules[output] in _SPLIT_INPUT
    known = {_SHARDED, "rowwise", *_GATHERED, *_SPLIT_INPUT}
    if sharded or gathered or not set(rules.values()) <= known:
        return
    first = ", ".join(name for name in rules if name != output)
    raise ValueError(
        f"The TP rules of {parent} do not fit together: {rules}. Either {first} are all 'colwise' "
        f"and {output} is 'rowwise', or {first} are all 'colwise_rep' and {output} is "
        "'rowwise_split_input'. Override them together."
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
        if style != _SHARDED or not name.endswith(".k_proj"):
            continue
        parent = name.rpartition(".")[0]
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


def _fits(heads: Heads, tp_size: int) -> bool:
    divides = heads.key_value % tp_size == 0 or tp_size % heads.key_value == 0
    return heads.query % tp_size == 0 and divides
