"""Weights that two stages of a pipeline hold: the embedding, where the head shares it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_mesh import ParallelMesh
from ep_mesh.world import gathered
from ep_plans.gradients import set_holders
from ep_plans.styles.base import local


class SharedWeights:
    """Sums the gradients of weights that two stages hold, once each.

    Tells `grad_norm` of every parameter how many stages hold it.

    Args:
        model: split into stages.
        mesh: its meshes. Every rank makes one.

    Cost: at construction one exchange of parameter names over the pipeline.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        self.group, self.peers = mesh.group("pp"), mesh.layout.group("pp", mesh.rank)
        named = dict(model.named_parameters(remove_duplicate=False))
        names = gathered(list(named), self.group)
        self._shared: list[tuple[nn.Parameter, int]] = []
        self._before: list[Tensor | None] | None = None
        for name, parameter in model.named_parameters():
            holders = [peer for peer, held in zip(self.peers, names, strict=True) if name in held]
            set_holders(parameter, len(holders), of=len(self.peers))
            others = [peer for peer in holders if peer != mesh.rank]
            if others and parameter.requires_grad:
                (other,) = others
                self._shared.append((parameter, other))

    def set_aside(self) -> None:
        """Take away the gradients that are summed, so that a backward's own come by themselves."""
        if self._before is None:
            self._before = [parameter.grad for parameter, _ in self._shared]
            for parameter, _ in self._shared:
                parameter.grad = None

    def sum(self) -> None:
        """Add the other stage's gradients, and those set aside. One message there and one back each."""
        before = self._before or [None] * len(self._shared)
        self._before = None
        for (parameter, other), earlier in zip(self._shared, before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._exchange(parameter.grad, other)
            if earlier is not None:
                parameter.grad.add_(earlier)

    def _exchange(self, grad: Tensor, other: int) -> None:
        here = local(grad)
        received = torch.empty_like(here)
        sent = here.contiguous()
        messages = [
            dist.P2POp(dist.isend, sent, other, self.group),
            dist.P2POp(dist.irecv, received, other, self.group),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        here.add_(received)
