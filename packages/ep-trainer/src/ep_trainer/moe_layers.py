"""The MoE layers of a model, as hooks need them: their routes, and which tokens of a batch each sees.

B rows of a batch, S positions, T tokens that a layer sees, K experts per token, E experts of a layer,
H hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ep_dispatch.collectives import chunk_bounds
from ep_plans import local, num_experts_of, parallel_state
from ep_plans.stage_forward import stage_arguments
from ep_trainer.data import IGNORED


@dataclass(frozen=True)
class MoELayer:
    """One layer with stacked experts.

    Attributes:
        name: of the experts module.
        experts: that module.
        block: the module around it.
        num_experts: E, of all ranks.
        spread: whether each rank of the EP group holds some of them.
        first: what its expert ids count from: the rank's first expert, where a router masks.
        masked: the id that means "on another rank" there, else None.
        sliced: whether it sees this TP rank's slice of the sequence.
        repeated: whether another TP rank sees the same routes, and counts them.
    """

    name: str
    experts: nn.Module
    block: nn.Module
    num_experts: int
    spread: bool = False
    first: int = 0
    masked: int | None = None
    sliced: bool = False
    repeated: bool = False

    @property
    def router(self) -> nn.Module | None:
        """The router beside the experts, by the names that released models give it."""
        children = dict(self.block.named_children())
        return children.get("gate", children.get("router"))


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """The layers with stacked experts, in the model's order."""
    state = parallel_state(model)
    modules = dict(model.named_modules())
    layers = []
    for name, module in modules.items():
        number = num_experts_of(module)
        stacked = any(p.ndim == 3 for p in module.parameters(recurse=False))
        if number is None or not stacked:
            continue
        block = modules[name.rpartition(".")[0]]
        if state is None:
            layers.append(MoELayer(name, module, block, number))
            continue
        mesh, spread = state.mesh, name in state.plans.experts
        masks = name in state.plans.masked
        shares = mesh.size("tp") > 1 and not masks
        # Other blocks see what TP gathered for them.
        slices = shares and spread and state.config.enable_sequence_parallel
        layers.append(
            MoELayer(
                name,
                module,
                block,
                number * (mesh.size("ep") if spread else 1),
                spread=spread,
                first=mesh.coordinate("ep") * number if masks else 0,
                masked=number if masks else None,
                sliced=slices,
                repeated=shares and not slices and mesh.coordinate("tp") > 0,
            )
        )
    return layers


def routed(args: Any, kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
    """The hidden states [T, H] and the expert ids [T, K] among the arguments of an experts module."""
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    hidden_TH = next((value for value in values if value.is_floating_point()), None)
    ids_TK = next((value for value in values if value.dtype in (torch.int64, torch.int32)), None)
    return hidden_TH, None if ids_TK is None else local(ids_TK).detach().long()


def count_routes(
    layer: MoELayer, ids_TK: Tensor, counts_E: Tensor, weights_T: Tensor | None = None
) -> None:
    """Add to `counts_E` how often each expert is chosen. No host synchronization.

    Args:
        layer: whose ids they are.
        ids_TK: as its experts get them.
        counts_E: of all experts of the layer.
        weights_T: what a token counts; None: 1.
    """
    kept_TK = ids_TK.ge(0) & (ids_TK + layer.first).lt(layer.num_experts)
    if layer.masked is not None:
        kept_TK &= ids_TK.ne(layer.masked)
    counted_TK = kept_TK.to(counts_E.dtype)
    if weights_T is not None:
        counted_TK = counted_TK * weights_T[:, None]
    place_TK = (ids_TK + layer.first).clamp(0, layer.num_experts - 1)
    counts_E.index_add_(0, place_TK.reshape(-1), counted_TK.reshape(-1))


def tokens_of(batch: Mapping[str, Any]) -> Tensor | None:
    """[B, S] bool, the tokens of a batch that are trained on; None if the batch doesn't tell.

    Not: those that a two-dimensional `attention_mask` hides, and rows without any label (those that fill
    up a last batch among them).
    """
    ids, mask, labels = (batch.get(name) for name in ("input_ids", "attention_mask", "labels"))
    shown = next((x for x in (ids, labels) if isinstance(x, Tensor) and x.ndim == 2), None)
    if isinstance(mask, Tensor) and mask.ndim == 2 and (shown is None or mask.shape == shown.shape):
        tokens = mask.ne(0)
    elif shown is not None:
        tokens = torch.ones_like(shown, dtype=torch.bool)
    else:
        return None
    if isinstance(labels, Tensor) and labels.shape == tokens.shape:
        tokens = tokens & labels.ne(IGNORED).any(1, keepdim=True)
    return tokens


def seen_by(layer: MoELayer, tokens_BS: Tensor, tp: int, tp_rank: int) -> Tensor:
    """[T], those of `tokens_BS` that a layer sees on this rank, in its order."""
    if layer.sliced:
        start, end = chunk_bounds(tokens_BS.shape[1], tp, tp_rank)
        tokens_BS = tokens_BS[:, start:end]
    return tokens_BS.reshape(-1)


class TrainingForward:
    """Tells hooks inside a model whether its training forward runs.

    Not in evaluation, not without gradients, and not when activation checkpointing runs a layer again,
    since the model's own forward is over then.
    """

    def __init__(self, model: nn.Module, begin: Callable[[Any], None]) -> None:
        """Watch `model`; `begin` is called with the arguments by name as such a forward begins."""
        self.runs = False
        self._begin = begin
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def add(self, handle: RemovableHandle) -> None:
        """Remove this hook too when the watch ends."""
        self._handles.append(handle)

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.runs = False

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.runs = module.training and torch.is_grad_enabled()
        if self.runs:
            arguments = stage_arguments(module)
            self._begin(kwargs if arguments is None else arguments)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.runs = False
