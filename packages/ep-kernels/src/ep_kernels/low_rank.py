"""Low-rank terms of expert weights (LoRA), which never become whole matrices.

Shape letters: E experts held here, A and B the sizes of one expert's weight as it is stored, N rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from .spec import ExpertsSpec

_TAKES = "_ep_takes_low_rank"  # on experts: the names of the weights whose terms are understood
_SHOWN = "_ep_low_rank"  # on experts, while they run: the terms


class LowRank(NamedTuple):
    """What is added to a stacked weight [E, A, B]: `scale * left @ right`.

    Attributes:
        left: [E, A, N], of any float dtype; cast to that of the products.
        right: [E, N, B].
        scale: the factor.
    """

    left: Tensor
    right: Tensor
    scale: float


class ExpertsLowRank(NamedTuple):
    """The terms of an experts module's two weights; None where there is none."""

    up: LowRank | None = None
    down: LowRank | None = None

    def tensors(self) -> list[Tensor]:
        """All factors."""
        return [factor for term in self if term is not None for factor in term[:2]]


def takes_low_rank(experts: nn.Module, name: str) -> bool:
    """Whether `module_experts_forward` was made for `experts` and adds terms to the weight `name`."""
    return name in experts.__dict__.get(_TAKES, ())


@contextmanager
def with_low_rank(experts: nn.Module, terms: Mapping[str, LowRank]) -> Iterator[None]:
    """Inside, `experts` run by `module_experts_forward` add these terms to their weights, by name.

    Raises:
        ValueError: `takes_low_rank` says no to a name. Nothing would be added.
    """
    if wrong := [name for name in terms if not takes_low_rank(experts, name)]:
        raise ValueError(
            f"{type(experts).__name__} adds no low-rank term to {', '.join(wrong)}: it is not run by "
            "module_experts_forward, or has no such weight."
        )
    experts.__dict__[_SHOWN] = dict(terms)
    try:
        yield
    finally:
        del experts.__dict__[_SHOWN]


def let_take_low_rank(experts: nn.Module, spec: ExpertsSpec) -> None:
    """Note on `experts` that what runs them reads `low_rank_of`."""
    experts.__dict__[_TAKES] = (spec.up, spec.down)


def low_rank_of(experts: nn.Module, spec: ExpertsSpec) -> ExpertsLowRank | None:
    """The terms that are shown now, None if there are none."""
    terms: Mapping[str, LowRank] = experts.__dict__.get(_SHOWN) or {}
    return ExpertsLowRank(terms.get(spec.up), terms.get(spec.down)) if terms else None
