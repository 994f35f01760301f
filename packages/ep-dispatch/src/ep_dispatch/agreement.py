"""What the ranks of an EP group must agree on before rows move. It travels with the counts.

Each rank sends every other a few integers beside the rows that it has for it. All read the same
integers, so all reach the same verdict: each continues, or each raises. No rank is left waiting in an
exchange that another has refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .checks import DTYPES
from .links import GradNeeds

__all__ = ["Notice", "agree"]

_DTYPES = (*DTYPES, torch.float8_e4m3fn)
_GRAD, _HIDDEN, _WEIGHTS, _EXPERTS, _REFUSED = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class Notice:
    """What one rank tells the others of its group.

    Attributes:
        rank: its EP rank.
        grad: whether grad mode is on.
        hidden, weights, experts: whether the hidden states, the routing weights, the experts'
            parameters need a gradient.
        tokens: T, the tokens that the rank holds.
        batch: the first EP rank of those that hold the same tokens.
        width: H, or 0 if it is not known yet.
        dtype: of the hidden states, or None if it is not known yet.
        weights_dtype: of the routing weights.
        wire: what its rows are cast to while they travel.
        bound: on the rows that may come, 0 if there is none.
        refused: the rank's own inputs are wrong: it is about to raise.
        bad_ids: some of its expert ids are out of range.
    """

    rank: int = 0
    grad: bool = False
    hidden: bool = False
    weights: bool = False
    experts: bool = False
    tokens: int = 0
    batch: int = 0
    width: int = 0
    dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = None
    wire: torch.dtype | None = None
    bound: int = 0
    refused: bool = False
    bad_ids: bool = False

    LENGTH: ClassVar[int] = 8

    def encode(self) -> list[int]:
        """As integers; the last is for `bad_ids`, which is known on the device."""
        flags = (
            _GRAD * self.grad + _HIDDEN * self.hidden + _WEIGHTS * self.weights
            + _EXPERTS * self.experts + _REFUSED * self.refused
        )  # fmt: skip
        dtypes = sum(
            _code(dtype) << shift
            for dtype, shift in ((self.wire, 8), (self.dtype, 4), (self.weights_dtype, 0))
        )
        facts = [self.rank, flags, self.tokens, self.batch, self.width, dtypes, self.bound]
        return [*facts, int(self.bad_ids)]

    @classmethod
    def decode(cls, values: Sequence[int]) -> Notice:
        """The inverse of `encode`."""
        rank, flags, tokens, batch, width, dtypes, bound, bad_ids = values
        return cls(
            rank=rank,
            grad=bool(flags & _GRAD),
            hidden=bool(flags & _HIDDEN),
            weights=bool(flags & _WEIGHTS),
            experts=bool(flags & _EXPERTS),
            tokens=tokens,
            batch=batch,
            width=width,
            dtype=_dtype(dtypes >> 4 & 15),
            weights_dtype=_dtype(dtypes & 15),
            wire=_dtype(dtypes >> 8),
            bound=bound,
            refused=bool(flags & _REFUSED),
            bad_ids=bool(bad_ids),
        )


def _code(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else 1 + _DTYPES.index(dtype)


def _dtype(code: int) -> torch.dtype | None:
    return None if code == 0 else _DTYPES[code - 1]


def agree(notices: Sequence[Notice]) -> GradNeeds | None:
    """The verdict of a group: which gradients travel, None if grad mode is off.

    Args:
        notices: of all its ranks, in any order.

    Raises:
        RuntimeError: a rank refused its inputs, or the ranks' inputs do not fit together.
    """
    by_rank = {notice.rank: notice for notice in sorted(notices, key=lambda notice: notice.rank)}
    wrong = [rank for rank, notice in by_rank.items() if notice.refused or notice.bad_ids]
    if wrong:
        raise RuntimeError(
            f"ranks {wrong} of the EP group refused their inputs (each says why in an error of its "
            "own); nothing was sent."
        )
    _same(
        "hidden states of one width and dtype, and routing weights of one dtype",
        {rank: (n.width, n.dtype, n.weights_dtype) for rank, n in by_rank.items()},
    )
    _same(
        "one wire_dtype and one bound on rows",
        {rank: (n.wire, n.bound or None) for rank, n in by_rank.items()},
    )
    _same(
        "one grad mode (all with gradients, or all under torch.no_grad)",
        {rank: notice.grad for rank, notice in by_rank.items()},
    )
    tokens = {rank: notice.tokens for rank, notice in by_rank.items()}
    if any(tokens[rank] != tokens[notice.batch] for rank, notice in by_rank.items()):
        shared = {rank: notice.batch for rank, notice in by_rank.items()}
        raise RuntimeError(
            f"ranks that share a batch must hold the same tokens, got {tokens} tokens by EP rank, "
            f"which share them with EP rank {shared}; feed the ranks of a TP group the same batch, or "
            "build with sequence_parallel=True if each holds a slice of it."
        )
    if not notices[0].grad:
        return None
    hidden = any(notice.hidden for notice in notices)
    weights = any(notice.weights for notice in notices)
    experts = any(notice.experts for notice in notices)
    return GradNeeds(hidden=hidden, weights=weights, rows=hidden or weights or experts)


def _same(what: str, values: Mapping[int, object]) -> None:
    if len(set(values.values())) > 1:
        raise RuntimeError(
            f"the ranks of an EP group must have {what}, got {dict(values)} by EP rank."
        )
