"""The router z-loss: router logits are kept small.

    T tokens that a layer sees, E experts of a layer, D data shards

[Note: a mean over the tokens of the step]
The loss of a layer is the mean over tokens of `logsumexp(router logits)^2`; the layers' losses are added
up. The tokens of a step, those of all micro-batches and all data shards, are counted before its first
forward, so each micro-batch adds its own sum by that number, times D, since gradients are the mean over
the shards: the loss and its gradient are those of one process with the whole global batch. Where TP ranks
see slices, a rank's gradient is its slice's part and the values are added up.
Source: Zoph et al., ST-MoE (2022).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_dispatch.collectives import reduce_over_group
from ep_mesh import ParallelMesh
from ep_mesh.world import gathered
from ep_trainer.moe_layers import MoELayer, TrainingForward, moe_layers, seen_by, tokens_of


class RouterZLoss:
    """Sees the router logits of a model's training forwards.

    Args:
        model: with MoE layers whose router, beside the experts, gives its logits.
        coefficient: the loss's weight.
        mesh: of a sharded model. With pipeline stages each sees its own layers; every rank makes one.

    Raises:
        ValueError: there is no such router, on any stage.
    """

    def __init__(self, model: nn.Module, coefficient: float, mesh: ParallelMesh | None) -> None:
        self.coefficient, self.mesh = coefficient, mesh
        self._logits: list[tuple[MoELayer, Tensor]] = []
        self._forward = TrainingForward(model, lambda kwargs: self._logits.clear())
        layers = [layer for layer in moe_layers(model) if layer.router is not None]
        for layer in layers:
            router = layer.router
            assert router is not None
            self._forward.add(router.register_forward_hook(self._sees(layer)))
        found = bool(layers)
        if mesh is not None and mesh.size("pp") > 1:
            found = any(gathered(found, mesh.group("pp")))
        if not found:
            raise ValueError(
                f"router_z_loss_coef={coefficient}, but {type(model).__name__} has no experts with a `gate` "
                "or `router` beside them: leave it out."
            )

    def _sees(self, layer: MoELayer) -> Any:
        def see(module: nn.Module, args: Any, output: Any) -> None:
            if not self._forward.runs:
                return
            # Nothing is computed here: inside a checkpointed region it would have to be again.
            self._logits.append((layer, _logits(output)))

        return see

    def count(self, batches: list[Any], device: torch.device) -> Tensor:
        """The tokens of a step, float32 [], over all data shards. One all-reduce of a number.

        Raises:
            ValueError: a batch has neither ids nor labels to tell its tokens.
        """
        masks = [tokens_of(batch) for batch in batches]
        if any(mask is None for mask in masks):
            raise ValueError(
                "router_z_loss_coef needs batches that tell their tokens: input_ids or labels of [rows, "
                "positions]."
            )
        total = torch.stack([mask.sum() for mask in masks if mask is not None]).sum()
        total = total.to(device, torch.float32)
        if self.mesh is not None and self.mesh.size("dp") > 1:
            dist.all_reduce(total, group=self.mesh.group("dp"))
        return total.clamp(min=1)

    def of(self, batch: Any, tokens_in_step: Tensor) -> Tensor:
        """This rank's term for the micro-batch whose forward has just run, times D.

        Raises:
            ValueError: the logits have no gradient, as under reentrant checkpointing.
        """
        tokens_BS = tokens_of(batch)
        assert tokens_BS is not None
        tp, place = (
            (1, 0) if self.mesh is None else (self.mesh.size("tp"), self.mesh.coordinate("tp"))
        )
        device = tokens_in_step.device
        whole = torch.zeros((), device=device)
        sliced = torch.zeros((), device=device)
        for layer, logits_TE in self._logits:
            if not logits_TE.requires_grad and any(
                p.requires_grad for p in layer.block.parameters()
            ):
                raise ValueError(
                    f"{layer.name}: its router logits have no gradient, so the z-loss would do nothing. "
                    "Activation checkpointing must be non-reentrant (use_reentrant=False)."
                )
            shown_T = seen_by(layer, tokens_BS, tp, place).to(logits_TE.device)
            wide = torch.promote_types(logits_TE.dtype, torch.float32)
            squares_T = logits_TE.to(wide).logsumexp(-1).square()
            total = squares_T.masked_fill(~shown_T, 0).sum().to(device)
            if layer.sliced:
                sliced = sliced + total
            else:
                whole = whole + total
        self._logits.clear()
        if tp > 1 and self.mesh is not None:
            sliced = reduce_over_group(sliced, self.mesh.group("tp"))
        shards = 1 if self.mesh is None else self.mesh.size("dp")
        return (whole + sliced) * (self.coefficient * shards / tokens_in_step)


def _logits(output: Any) -> Tensor:
    """A router gives (logits, weights, ids); Llama 4's gives (scores, logits)."""
    if isinstance(output, Tensor):
        return output
    logits: Tensor = output[-1] if len(output) == 2 else output[0]
    return logits
