"""Balancing without an auxiliary loss: a bias on the experts' scores, moved after each optimizer step.

    T tokens that a layer sees, K experts per token, E experts of a layer, L layers

Source: DeepSeek-V3 technical report (2024), section 2.1.2; Wang et al., Auxiliary-Loss-Free Load
Balancing (2024), whose rules "sign" and "proportional" these are.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerCallback

from ep_mesh.world import gathered
from ep_plans import local, parallel_state
from ep_trainer.moe_layers import (
    MoELayer,
    TrainingForward,
    count_routes,
    moe_layers,
    routed,
    seen_by,
    tokens_of,
)

BIAS_NAMES = ("e_score_correction_bias", "expert_bias")
"""What released models call the bias that their routers add to the scores to choose by."""


class BiasBalancing(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Raises the bias of experts that got too few tokens in a step, lowers that of the others.

    For models whose routers have such a bias (DeepSeek-V3, GLM-4-MoE, MiniMax-M2, ...: `BIAS_NAMES`), with
    `EPTrainer` or `transformers.Trainer`. The bias is changed in place, so it is the model's and is saved
    with it.

    Counted are the routes of the tokens of the global batch: of all micro-batches since the last step
    and all ranks, each token once. Not: padding, rows without a label, evaluation, and what activation
    checkpointing runs again.

    Args:
        rate: how far the bias moves in a step.
        rule: "sign": by `rate` up or down; "proportional": by `rate` times the distance from the mean
            load in shares of that.

    Raises:
        ValueError: when training begins, if no layer has such a bias, or one of 16 bits, which rounds such
            steps away.

    Cost: one all-reduce of [L, E] numbers per optimizer step, L of all pipeline stages; no host
    synchronization. A gather of names when training begins.
    """

    def __init__(
        self, rate: float = 1e-3, *, rule: Literal["sign", "proportional"] = "sign"
    ) -> None:
        if not rate > 0:
            raise ValueError(f"rate must be positive, got {rate}.")
        if rule not in ("sign", "proportional"):
            raise ValueError(f'rule must be "sign" or "proportional", got {rule!r}.')
        self.rate, self.rule = rate, rule
        self._layers: list[tuple[MoELayer, Tensor]] = []
        self._counts: list[Tensor] = []
        self._sizes: dict[str, int] = {}
        self._device = torch.device("cpu")
        self._tokens: Tensor | None = None
        self._tp = (1, 0)
        self._forward: TrainingForward | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Find the biases and watch the experts."""
        self.on_train_end()
        self._layers, self._sizes = _agreed_layers(model)
        self._device = next(model.parameters()).device
        self._counts = [
            torch.zeros(bias.numel(), dtype=torch.float64, device=local(bias).device)
            for _, bias in self._layers
        ]
        parallel = parallel_state(model)
        self._tp = (
            (1, 0)
            if parallel is None
            else (parallel.mesh.size("tp"), parallel.mesh.coordinate("tp"))
        )
        self._forward = TrainingForward(model, self._begin)
        for (layer, _), counts in zip(self._layers, self._counts, strict=True):
            hook = self._counter(layer, counts)
            self._forward.add(layer.experts.register_forward_pre_hook(hook, with_kwargs=True))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the model as it was, but for the biases."""
        if self._forward is not None:
            self._forward.close()
            self._forward = None

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Move the biases. Every rank calls."""
        if not self._sizes:
            return
        own = {
            layer.name: counts
            for (layer, _), counts in zip(self._layers, self._counts, strict=True)
        }
        # Each stage counts its own layers, and all ranks add up the same numbers.
        nothing = torch.zeros(max(self._sizes.values()), dtype=torch.float64, device=self._device)
        loads = torch.cat(
            [own.get(name, nothing[:size]).to(self._device) for name, size in self._sizes.items()]
        )
        if dist.is_initialized():
            dist.all_reduce(loads)
        totals = dict(zip(self._sizes, loads.split(list(self._sizes.values())), strict=True))
        for (layer, bias), counts in zip(self._layers, self._counts, strict=True):
            load = totals[layer.name]
            short = load.mean() - load
            step = short.sign() if self.rule == "sign" else short / load.mean().clamp(min=1)
            _add(bias, self.rate * step)
            counts.zero_()

    def _begin(self, kwargs: Any) -> None:
        self._tokens = tokens_of(kwargs)

    def _counter(self, layer: MoELayer, counts_E: Tensor) -> Any:
        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            assert self._forward is not None
            _, ids_TK = routed(args, kwargs)
            if not self._forward.runs or layer.repeated or ids_TK is None:
                return
            weights_T = None
            if self._tokens is not None:
                shown_T = seen_by(layer, self._tokens, *self._tp)
                if len(shown_T) == len(ids_TK):  # not where a model adds tokens of its own
                    weights_T = shown_T.to(ids_TK.device, counts_E.dtype)
            count_routes(layer, ids_TK, counts_E, weights_T)

        return count


def _agreed_layers(
    model: nn.Module,
) -> tuple[list[tuple[MoELayer, Tensor]], dict[str, int]]:
    """This rank's layers with their biases, and the sizes of all stages' by name; one verdict."""
    here: list[tuple[MoELayer, Tensor]] = []
    problem: str | None = None
    try:
        here = _biased_layers(model)
    except ValueError as error:
        problem = str(error)
    said = gathered((problem, {layer.name: bias.numel() for layer, bias in here}))
    problem = next((text for text, _ in said if text is not None), None)
    sizes = {name: size for _, sizes in said for name, size in sizes.items()}
    if problem is None and not sizes:
        problem = (
            f"BiasBalancing needs routers with a bias to choose experts by ({', '.join(BIAS_NAMES)}), and "
            f"{type(model).__name__} has none: use its auxiliary loss (output_router_logits=True)."
        )
    if problem is not None:
        raise ValueError(problem)
    return here, sizes


def _biased_layers(model: nn.Module) -> list[tuple[MoELayer, Tensor]]:
    found = []
    for layer in moe_layers(model):
        named = [*layer.block.named_buffers(), *layer.block.named_parameters()]
        biases = [x for name, x in named if name.rpartition(".")[2] in BIAS_NAMES]
        for bias in biases[:1]:
            if bias.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{layer.name}: the bias of its router is {bias.dtype}, which rounds steps of a "
                    "thousandth away: keep it in float32 (bias.data = bias.data.float())."
                )
            found.append((layer, bias))
    return found


def _add(bias: Tensor, step: Tensor) -> None:
    """Add in place, to this rank's part of a bias that is sharded."""
    step = step.to(bias.dtype).view(bias.shape)
    with torch.no_grad():
        if isinstance(bias, DTensor):
            part = distribute_tensor(step, bias.device_mesh, bias.placements, src_data_rank=None)
            bias.to_local().add_(part.to_local())
        else:
            bias.add_(step.to(bias.device))
