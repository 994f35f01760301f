"""Counting the routes of a layer where its experts are called, and what they send.

T tokens of this rank, K experts per token, E experts of a layer, H hidden size,
P ranks of an EP group
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_dispatch.collectives import chunk_bounds
from ep_plans import ParallelState
from ep_trainer.moe_layers import MoELayer, count_routes


@dataclass
class Routes:
    """Counts one layer's routes on the device.

    Attributes:
        layer: the layer.
        ranks: P, where the tokens travel; 0: they don't.
        own: this rank's place among them.
        slices: the TP ranks that send a slice of the batch each, and the place of this one.
    """

    layer: MoELayer
    ranks: int = 0
    own: int = 0
    slices: tuple[int, int] = (1, 0)
    counts: Tensor | None = None
    sent: Tensor | None = None
    row_bytes: int = 0

    @classmethod
    def of(cls, layer: MoELayer, parallel: ParallelState | None) -> Routes:
        """For a layer of a model."""
        if parallel is None or not layer.spread or layer.masked is not None:
            return cls(layer)
        mesh = parallel.mesh
        travels = mesh.size("ep") > 1 and parallel.config.ep_implementation != "all_reduce"
        return cls(
            layer,
            ranks=mesh.size("ep") if travels else 0,
            own=mesh.coordinate("ep"),
            slices=(1, 0) if layer.sliced else (mesh.size("tp"), mesh.coordinate("tp")),
        )

    def add(self, hidden_TH: Tensor | None, ids_TK: Tensor | None) -> None:
        """Count a call's routes. No host synchronization."""
        if ids_TK is None:
            return
        if not self.layer.repeated:
            if self.counts is None:
                self.counts = ids_TK.new_zeros(self.layer.num_experts)
            count_routes(self.layer, ids_TK, self.counts)
        if self.ranks and hidden_TH is not None and ids_TK.ndim == 2:
            self._add_sent(hidden_TH, ids_TK)

    def _add_sent(self, hidden_TH: Tensor, ids_TK: Tensor) -> None:
        parts, place = self.slices
        start, end = chunk_bounds(ids_TK.shape[0], parts, place)
        ids_TK = ids_TK[start:end]
        owners_TK = (
            ids_TK.clamp(0, self.layer.num_experts - 1) * self.ranks // self.layer.num_experts
        )
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
