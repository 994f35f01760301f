"""What the counts of a log say about the balance, as arithmetic.

    E experts of a layer, P ranks of an EP group, W ranks of the world

[Note: what imbalance costs]
The ranks of an EP group wait in each layer for the one whose experts got most rows. With `r` the
rows of a rank in a layer, a group spends `m = sum_layers max_ranks(r) / sum_layers mean_ranks(r)`
times what its experts would take if all ranks had the same. If these are a share `f` of a balanced
step, the step takes `1 + f (m - 1)` instead of 1, and `f (m - 1) / (1 + f (m - 1))` of it is lost.
Where no share was measured, `f` is the experts' part of the model's FLOPs. The rows are those of
all steps since the last log together, in which peaks of single steps even out: the estimate is a
lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerLoad:
    """How one layer's experts were loaded.

    Attributes:
        layer: the name of the experts module.
        max_over_mean: the most loaded expert, in shares of an even load; E / K at worst.
        entropy: of the shares, over that of even ones: 1 is even, 0 is one expert alone.
        idle: experts that got no token.
        rank_max_over_mean: rows of the most loaded rank over the mean of its EP group, in the
            worst group.
    """

    layer: str
    max_over_mean: float
    entropy: float
    idle: int
    rank_max_over_mean: float


def layer_load(layer: str, counts_E: Tensor, rows_W: Tensor, ep_size: int) -> LayerLoad | None:
    """The balance of a layer; None if none of its experts was asked for anything.

    Args:
        layer: its name.
        counts_E: tokens of each expert.
        rows_W: rows of each rank; groups of `ep_size` consecutive ranks hold the layer's experts,
            and those without any row belong to other stages.
        ep_size: P.
    """
    total = counts_E.sum().item()
    if not total:
        return None
    shares_E = counts_E / total
    number = len(counts_E)
    entropy = -(shares_E * shares_E.clamp(min=1e-300).log()).sum().item()
    groups = rows_W.view(-1, ep_size)
    means = groups.mean(1)
    ratios = groups.amax(1)[means > 0] / means[means > 0]
    return LayerLoad(
        layer,
        shares_E.amax().item() * number,
        entropy / math.log(number) if number > 1 else 1.0,
        int((counts_E == 0).sum()),
        ratios.amax().item() if len(ratios) else 1.0,
    )


def waiting_factor(rows_LW: Tensor, ep_size: int) -> float:
    """The m of the note above, of the EP group that waits most.

    Args:
        rows_LW: rows of each rank in each layer, of groups of `ep_size` consecutive ranks.
        ep_size: P.
    """
    groups = rows_LW.view(rows_LW.shape[0], -1, ep_size)
    most, mean = groups.amax(2).sum(0), groups.mean(2).sum(0)
    ratios = most[mean > 0] / mean[mean > 0]
    return ratios.amax().item() if len(ratios) else 1.0


def lost_share(factor: float, experts_share: float) -> float:
    """The part of a step that the wait for the most loaded ranks takes, see the note above."""
    more = experts_share * (factor - 1)
    return more / (1 + more)


def worst_layers(loads: Sequence[LayerLoad], number: int) -> list[LayerLoad]:
    """The layers whose ranks, then experts, are loaded most unevenly; worst first."""
    return sorted(loads, key=lambda load: (-load.rank_max_over_mean, -load.max_over_mean))[:number]
