"""Counting routes where a layer's experts are called.

T tokens of this rank, K experts per token, E experts of a layer, H hidden size,
P ranks of an EP group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ep_dispatch.collectives import chunk_bounds
from ep_plans import local, num_experts_of, parallel_state


@dataclass
class Routes:
    """Counts one layer's routes on the device.

    Attributes:
        num_experts: E.
        first: what an id counts from: the number of the rank's first expert, where ids are local.
        skipped: the id that means "not here", where ids are local.
        counts_here: whether this rank's routes count, or another TP rank counts the same ones.
        spread: whether each rank of the EP group has some of the experts.
        ranks: P, where the tokens travel; 0: they don't.
        own: this rank's place among them.
        slices: the TP ranks that send a slice of the batch each, and the place of this one.
    """

    num_experts: int
    first: int = 0
    skipped: int | None = None
    counts_here: bool = True
    spread: bool = False
    ranks: int = 0
    own: int = 0
    slices: tuple[int, int] = (1, 0)
    counts: Tensor | None = None
    sent: Tensor | None = None
    row_bytes: int = 0

    @classmethod
    def of(cls, model: nn.Module, name: str, num_experts: int) -> Routes:
        """For an experts module of a model."""
        parallel = parallel_state(model)
        if parallel is None:
            return cls(num_experts)
        mesh, plans, config = parallel.mesh, parallel.plans, parallel.config
        place, tp = mesh.coordinate("ep"), mesh.coordinate("tp")
        if name in plans.masked:
            here = num_experts_of(model.get_submodule(name)) or 0
            return cls(num_experts, place * here, here, spread=True)
        shares_batch = mesh.layout.tp > 1 and not config.enable_sequence_parallel
        travels = name in plans.experts and config.ep_implementation != "all_reduce"
        return cls(
            num_experts,
            counts_here=not shares_batch or tp == 0,
            spread=name in plans.experts,
            ranks=mesh.layout.ep if travels and mesh.layout.ep > 1 else 0,
            own=place,
            slices=(mesh.layout.tp, tp) if shares_batch else (1, 0),
        )

    def add(self, hidden_TH: Tensor | None, ids_TK: Tensor | None) -> None:
        """Count a call's routes. No host synchronization."""
        if ids_TK is None:
            return
        ids_TK = local(ids_TK).detach().long()
        if self.counts_here:
            flat = ids_TK.reshape(-1)
            kept = flat.ge(0) & flat.add(self.first).lt(self.num_experts)
            if self.skipped is not None:
                kept &= flat.ne(self.skipped)
            place = (flat + self.first).clamp(0, self.num_experts - 1)
            if self.counts is None:
                self.counts = flat.new_zeros(self.num_experts)
            self.counts.index_add_(0, place, kept.long())
        if self.ranks and hidden_TH is not None and ids_TK.ndim == 2:
            self._add_sent(hidden_TH, ids_TK)

    def _add_sent(self, hidden_TH: Tensor, ids_TK: Tensor) -> None:
        parts, place = self.slices
        start, end = chunk_bounds(ids_TK.shape[0], parts, place)
        ids_TK = ids_TK[start:end]
        owners_TK = ids_TK.clamp(0, self.num_experts - 1) * self.ranks // self.num_experts
        # A skipped slot reaches no rank: it is put in a column of its own.
        owners_TK = torch.where(ids_TK.ge(0), owners_TK, self.ranks)
        reached = torch.zeros(
            ids_TK.shape[0], self.ranks + 1, dtype=torch.bool, device=ids_TK.device
        ).scatter_(1, owners_TK, True)
        reached[:, self.own] = False
        reached[:, self.ranks] = False
        self.row_bytes = hidden_TH.shape[-1] * hidden_TH.element_size()
        self.sent = reached.sum() + (0 if self.sent is None else self.sent)

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """Tokens of each expert and bytes sent since the last time, float64."""
        counts, sent = self.counts, self.sent
        self.counts = self.sent = None
        # There and back, and the gradients of both.
        bytes_sent = None if sent is None else sent.double() * (4 * self.row_bytes)
        return None if counts is None else counts.double(), bytes_sent


def experts_modules(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Modules with stacked experts by name, with the number of experts of the whole layer."""
    state = parallel_state(model)
    spread = set() if state is None else set(state.plans.experts)
    found: dict[str, tuple[nn.Module, int]] = {}
    for name, module in model.named_modules():
        number = getattr(module, "num_experts", None)
        if isinstance(number, int) and any(p.ndim == 3 for p in module.parameters(recurse=False)):
            ranks = state.config.layout.ep if state is not None and name in spread else 1
            found[name] = (module, number * ranks)
    return found


def routed(args: Any, kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
    """The hidden states and the expert ids in a call's arguments."""
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    hidden_TH = next((value for value in values if value.is_floating_point()), None)
    ids_TK = next((value for value in values if value.dtype in (torch.int64, torch.int32)), None)
    return hidden_TH, ids_TK
