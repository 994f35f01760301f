"""Patterns of plans: `model.layers.*.mlp.experts` names that module of every layer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def wildcard(name: str) -> str:
    """`name` with each layer number replaced by `*`."""
    return _NUMBER.sub("*", name)


def rule_for(name: str, rules: Mapping[str, str]) -> str | None:
    """The style that `rules` give to a module or parameter by its own name, a number before `*`."""
    exact = rules.get(name)
    return exact if exact is not None else rules.get(wildcard(name))


def is_below(name: str, roots: Iterable[str]) -> bool:
    """Whether `name` is one of `roots` or lies inside one."""
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names of `known` most like `name`, best first."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.4)
