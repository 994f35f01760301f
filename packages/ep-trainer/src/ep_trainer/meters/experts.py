"""How the experts are loaded, by layer.

T tokens of this rank, K experts per token, E experts of a layer, L layers with experts,
H hidden size, P ranks of an EP group, W ranks of the world
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ep_mesh.world import gathered, own_rank, world_size
from ep_plans import ModelFlops, ParallelState, parallel_state
from ep_trainer._compat import in_backward
from ep_trainer.meters.balance import (
    LayerLoad,
    layer_load,
    lost_share,
    waiting_factor,
    worst_layers,
)
from ep_trainer.meters.base import Meter
from ep_trainer.meters.heatmap import check_matplotlib, draw_heatmap
from ep_trainer.meters.routes import Routes
from ep_trainer.meters.speed import flops_of_all_stages
from ep_trainer.moe_layers import moe_layers, routed

_KEPT_LOGS = 1000  # the newest in `history`


class ExpertLoad(Meter):
    """How evenly the tokens are spread over the experts, over the ranks, and what it costs.

    Of the steps since the last log:

    - `expert_load_max`: the most loaded expert of any layer, in shares of an even load. 1 is
      perfect balance, E / K the worst: one expert gets every token.
    - `expert_load_worst_layer`: the place of that layer in `layers`; `expert_load_mean`: the mean of
      the layers' maxima; `expert_entropy_min`: the least entropy of a layer's shares, 1 if even;
      `experts_idle`: experts of all layers that got nothing.
    - with `ep_size > 1`, `expert_rank_load_max`: rows of the most loaded rank of an EP group over
      the group's mean, in the worst layer; `expert_imbalance_cost`: the share of a step that
      waiting for such ranks takes, an estimate (`ep_trainer.meters.balance` has the formula);
      `expert_gb_sent`: what a rank sends to others in a step, in GB of 1e9 bytes, on average: a
      token once to each rank that has experts of it and back, and the gradients likewise. A narrower
      `wire_dtype` and the ways of other implementations than `all_to_all` are not accounted for.

    `shares` [L, E] are the experts' parts of their layer's routes since the last log (rows sum to 1,
    0 where a layer got none, NaN beyond a layer's own experts), `history` the newest 1000 of them,
    `loads` what they say, by layer. `total_shares` [L, E] are those of the whole training.

    Only training counts, each token once: not in evaluation, nor when activation checkpointing
    runs a layer again. Padding and rows that fill up the last batch count: experts compute them.

    Args:
        worst: so many of the most unevenly loaded layers get numbers of their own in each log,
            `expert_load/LAYER/max` and so on.
        warn_above: warn, once, when imbalance costs more than this share of the step.
        experts_share: the experts' share of a balanced step's time, if you have measured it; None:
            their share of the FLOPs.
        picture: a file for a heat map, layers by experts, drawn when training ends; needs matplotlib.

    Raises:
        ValueError: a share is not from 0 to 1, or `worst` is negative.
        ModuleNotFoundError: a picture is asked for and matplotlib isn't installed.

    Cost: two gathers of objects when training begins; in a forward some operations on [T, K] per
    layer without host synchronization; `L (E + W) + 1` numbers in the all-reduce of a log.
    """

    def __init__(
        self,
        *,
        worst: int = 0,
        warn_above: float = 0.1,
        experts_share: float | None = None,
        picture: str | Path | None = None,
    ) -> None:
        for name, share in (("warn_above", warn_above), ("experts_share", experts_share)):
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} must be a share from 0 to 1, got {share!r}.")
        if worst < 0:
            raise ValueError(f"worst must be a number of layers >= 0, got {worst!r}.")
        if picture is not None:
            check_matplotlib()
        self.worst, self.warn_above, self.picture = worst, warn_above, picture
        self.experts_share = experts_share
        self.layers: list[str] = []
        self.shares: Tensor | None = None
        self.loads: list[LayerLoad] = []
        self.history: deque[Tensor] = deque(maxlen=_KEPT_LOGS)
        self._warned = False
        self._routes: dict[str, Routes] = {}
        self._experts_of: dict[str, int] = {}
        self._totals: dict[str, Tensor] = {}
        self._model: ModelFlops | None = None
        self._handles: list[RemovableHandle] = []
        self._without_grad = False
        self._steps = 0
        self._length = 1

    # -- when training begins and ends

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Watch the experts of the model; know those of all pipeline stages."""
        self.close()
        layers = moe_layers(model)
        stages = gathered({layer.name: layer.num_experts for layer in layers})
        found = {name: number for stage in stages for name, number in stage.items()}
        self._experts_of = {name: found[name] for name in sorted(found, key=_natural)}
        self.layers = list(self._experts_of)
        self._totals, self.loads, self.shares = {}, [], None
        self.history.clear()
        self._warned, self._steps = False, 0
        parallel = parallel_state(model)
        self._routes = {layer.name: Routes.of(layer, parallel) for layer in layers}
        self._ep = 1 if parallel is None else parallel.mesh.layout.ep
        self._group = _own_group(parallel)
        self._model = flops_of_all_stages(model) if self.layers and self._ep > 1 else None
        for layer in layers:
            hook = self._counter(self._routes[layer.name])
            self._handles.append(layer.experts.register_forward_pre_hook(hook, with_kwargs=True))

        def enter(module: nn.Module, inputs: Any) -> None:
            # Reentrant checkpointing has no gradients inside the layers; the whole model does.
            self._without_grad = not torch.is_grad_enabled()

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._without_grad = False

        self._handles.append(model.register_forward_pre_hook(enter))
        self._handles.append(model.register_forward_hook(leave, always_call=True))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Count the steps."""
        self._steps += 1

    def on_train_end(
        self, args: Any, state: Any = None, control: Any = None, **kwargs: Any
    ) -> None:
        """Leave the model as it was, and draw the picture."""
        self.close()
        if self.picture is None or self.total_shares is None:
            return
        if state is None or state.is_world_process_zero:
            draw_heatmap(self.total_shares, self.layers, self.picture)

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- counting

    def count(self, tokens: float, sequence_length: int) -> None:
        """Know the length, for the experts' share of the FLOPs."""
        self._length = max(sequence_length, 1)

    def _counter(self, watched: Routes) -> Callable[[nn.Module, Any, Any], None]:
        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module.training and not self._without_grad and not in_backward():
                watched.add(*routed(args, kwargs))

        return count

    # -- logs

    def sums(self) -> Tensor:
        """Tokens of each expert [sum of E], rows of each rank [L, W], GB sent [1]."""
        taken = {name: routes.take() for name, routes in self._routes.items()}
        device = next((c.device for c, _ in taken.values() if c is not None), torch.device("cpu"))
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        counts, rows_LW, sent = [], zeros(len(self.layers), world_size()), zeros(1)
        for layer, (name, number) in enumerate(self._experts_of.items()):
            counts_E, bytes_sent = taken.get(name, (None, None))
            counts.append(zeros(number) if counts_E is None else counts_E)
            if counts_E is not None:
                owners = self._group if self._routes[name].layer.spread else [own_rank()]
                rows_LW[layer, owners] = counts_E.view(len(owners), -1).sum(1)
            if bytes_sent is not None:
                sent += bytes_sent / 1e9
        return torch.cat([*counts, rows_LW.flatten(), sent])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """The load since the last log."""
        numbers, world = list(self._experts_of.values()), world_size()
        *counts, rows, sent = totals.split([*numbers, len(numbers) * world, 1])
        rows_LW = rows.view(len(numbers), world)
        for name, counts_E in zip(self.layers, counts, strict=True):
            self._totals[name] = self._totals.get(name, torch.zeros_like(counts_E)) + counts_E
        found = [
            layer_load(name, counts_E, rows_W, self._ep)
            for name, counts_E, rows_W in zip(self.layers, counts, rows_LW, strict=True)
        ]
        self.loads = [load for load in found if load is not None]
        steps, self._steps = max(self._steps, 1), 0
        if not self.loads:
            return {}
        self.shares = _shares(counts)
        self.history.append(self.shares)
        worst = max(self.loads, key=lambda load: load.max_over_mean)
        logs = {
            "expert_load_max": round(worst.max_over_mean, 3),
            "expert_load_worst_layer": self.layers.index(worst.layer),
            "expert_load_mean": round(
                sum(load.max_over_mean for load in self.loads) / len(self.loads), 3
            ),
            "expert_entropy_min": round(min(load.entropy for load in self.loads), 4),
            "experts_idle": sum(load.idle for load in self.loads),
        }
        if self._ep > 1:
            logs |= self._over_ranks(rows_LW, sent.item() / world / steps)
        for load in worst_layers(self.loads, self.worst):
            logs |= {f"expert_load/{load.layer}/{key}": v for key, v in _rounded(load).items()}
        return logs

    def _over_ranks(self, rows_LW: Tensor, sent: float) -> dict[str, float]:
        uneven = max(self.loads, key=lambda load: load.rank_max_over_mean)
        logs = {"expert_rank_load_max": round(uneven.rank_max_over_mean, 3)}
        if sent:
            logs["expert_gb_sent"] = float(f"{sent:.4g}")
        share = self._share_of_experts()
        if share is None:
            return logs
        factor = waiting_factor(rows_LW, self._ep)
        lost = lost_share(factor, share)
        logs["expert_imbalance_cost"] = round(lost, 4)
        if lost > self.warn_above and not self._warned:
            self._warned = True
            if own_rank() == 0:
                warnings.warn(
                    f"Imbalance costs about {lost:.0%} of the step (more than {self.warn_above:.0%}): "
                    f"in all layers together the most loaded rank of an EP group computes "
                    f"{factor:.2f} times the rows of the mean, experts are {share:.0%} of the work. "
                    f"Worst is {uneven.layer}: {uneven.rank_max_over_mean:.2f} times the mean of "
                    f"its ranks, its busiest expert {uneven.max_over_mean:.2f} times the mean, "
                    f"{uneven.idle} experts idle. A balancing loss or bias evens the load.",
                    stacklevel=2,
                )
        return logs

    def _share_of_experts(self) -> float | None:
        if self.experts_share is not None or self._model is None:
            return self.experts_share
        parts = self._model.at(self._length)
        return parts.experts / parts.forward

    @property
    def total_shares(self) -> Tensor | None:
        """[L, E], of the whole training; None before the first log."""
        return _shares([self._totals[name] for name in self.layers]) if self._totals else None

    def details(self) -> dict[str, Any]:
        """Each layer's balance."""
        return {"expert_layers": {load.layer: _rounded(load) for load in self.loads}}


def _own_group(parallel: ParallelState | None) -> list[int]:
    """The ranks of this rank's EP group, in the order of their experts."""
    if parallel is None:
        return [own_rank()]
    return list(parallel.mesh.layout.group("ep", own_rank()))


def _natural(name: str) -> list[tuple[int, str]]:
    """Names in the order of their numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _shares(counts: list[Tensor]) -> Tensor:
    """[L, E] from tokens per expert, E the largest of the layers'."""
    width = max(len(counts_E) for counts_E in counts)
    shares = torch.full((len(counts), width), math.nan, dtype=torch.float64)
    for layer, counts_E in enumerate(counts):
        shares[layer, : len(counts_E)] = counts_E / counts_E.sum().clamp(min=1)
    return shares


def _rounded(load: LayerLoad) -> dict[str, float]:
    return {
        "max": round(load.max_over_mean, 3),
        "entropy": round(load.entropy, 4),
        "idle": load.idle,
        "rank_max": round(load.rank_max_over_mean, 3),
    }
