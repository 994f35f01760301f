"""The adapters of one module: their parameters, and how they take part in its forward.

Shape letters: E experts, N rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ep_dispatch.links import join_parameters
from ep_kernels import LowRank, takes_low_rank, with_low_rank
from ep_mesh import ParallelMesh
from ep_plans import (
    ParameterSharding,
    around_forward,
    attributes,
    change_output,
    inside_forward,
    local,
    shard_tensor,
)
from ep_plans.low_rank import (
    cut_mesh,
    factor_shardings,
    gradient_reduction,
    reduce_gradients,
    transposed_sharding,
)
from expert_parallel.lora._compat import PeftLayer

CHILD = "lora"  # the module below an adapted one that holds its adapters, by parameter
FACTORS = ("lora_A", "lora_B")


class Adapter(nn.Module):
    """The two factors of one weight's adapter.

    Attributes:
        layer: what PEFT says of it.
        lora_A: [N, in], or [E, N, in] of stacked experts; trained.
        lora_B: [out, N], or [E, out, N]; trained.
        shardings: where the two lie.
        reductions: what is done to their gradients.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(
        self,
        layer: PeftLayer,
        mesh: ParallelMesh | None,
        weight: ParameterSharding,
        values: tuple[Tensor, Tensor],
        dropout: float,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        left, right = factor_shardings(weight, len(layer.shape))
        pair = (right, left)
        if layer.flipped:
            pair = (
                transposed_sharding(left, len(layer.shape)),
                transposed_sharding(right, len(layer.shape)),
            )
        self.shardings = dict(zip(FACTORS, pair, strict=True))
        self.reductions = [gradient_reduction(each, mesh) for each in pair if mesh is not None]
        for (name, sharding), value in zip(self.shardings.items(), values, strict=True):
            setattr(self, name, nn.Parameter(_placed(value, sharding, mesh)))

    def low_rank(self, lora_a: Tensor, lora_b: Tensor) -> LowRank:
        """The term of the weight as it is stored."""
        if self.layer.flipped:
            return LowRank(lora_a.mT, lora_b.mT, self.layer.scale)
        return LowRank(lora_b, lora_a, self.layer.scale)

    def whole_weight(self, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """The weight with its term added. Memory: as much as the weight again."""
        left, right, scale = self.low_rank(lora_a, lora_b)
        product = left.to(weight.dtype) @ right.to(weight.dtype)
        return torch.add(weight, product, alpha=scale)


def _placed(value: Tensor, sharding: ParameterSharding, mesh: ParallelMesh | None) -> Tensor:
    """This rank's part of a whole value, which may be a view."""
    value = value.contiguous()
    if mesh is None:
        return value
    if sharding.cut is None:
        return value.to(mesh.device)
    return shard_tensor(value, sharding.cut, cut_mesh(mesh, sharding.cut))


def read(adapters: Sequence[Adapter]) -> list[tuple[Tensor, Tensor]]:
    """The local factors of each, whose gradients are reduced together."""
    tensors = [local(p) for each in adapters for p in (each.lora_A, each.lora_B)]
    reductions = [reduction for each in adapters for reduction in each.reductions]
    if reductions:  # with nothing to reduce too: the gradients become contiguous
        tensors = list(reduce_gradients(tensors, reductions))
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def install(module: nn.Module, adapters: Mapping[str, Adapter], *, on_experts_axis: bool) -> None:
    """Let a module run with its adapters, by the name of the parameter.

    A linear layer adds the term to its output; experts that `ep_kernels` runs do so in their grouped
    products; any other code is shown weights to which the terms are added.

    Args:
        module: the adapted module, sharded.
        adapters: all of its adapters.
        on_experts_axis: whether it is run by a style of the expert axis, in place of its own code.
    """
    module.add_module(CHILD, nn.ModuleDict(adapters))
    if all(each.layer.linear for each in adapters.values()):
        inside_forward(module, _linear_run(adapters["weight"]))
        return
    grouped = on_experts_axis and all(takes_low_rank(module, name) for name in adapters)
    run = _stacked_run(module, adapters, grouped=grouped)
    (around_forward if on_experts_axis else inside_forward)(module, run)


def _linear_run(adapter: Adapter) -> Any:
    def run(forward: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = forward(x, *args, **kwargs)
        ((lora_a, lora_b),) = read([adapter])
        narrow = nn.functional.linear(adapter.dropout(x.to(lora_a.dtype)), lora_a)
        term = nn.functional.linear(narrow, lora_b) * adapter.layer.scale
        return (out + term).to(out.dtype)

    return run


def _stacked_run(module: nn.Module, adapters: Mapping[str, Adapter], *, grouped: bool) -> Any:
    def shown(factors: Sequence[tuple[Tensor, Tensor]]) -> AbstractContextManager[None]:
        each = list(zip(adapters.items(), factors, strict=True))
        if grouped:
            return with_low_rank(
                module, {name: adapter.low_rank(*pair) for (name, adapter), pair in each}
            )
        return attributes(
            module,
            {
                name: adapter.whole_weight(local(getattr(module, name)), *pair)
                for (name, adapter), pair in each
            },
        )

    def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
        factors = read(list(adapters.values()))
        with shown(factors):
            output = forward(*args, **kwargs)
        # Others wait for the gradients of all factors, also of those that no row used.
        used = [factor for pair in factors for factor in pair if factor.requires_grad]
        return change_output(lambda x: join_parameters(x, used), output)

    return run
