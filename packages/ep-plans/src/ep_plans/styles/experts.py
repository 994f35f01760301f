"""Styles of mixture-of-experts modules.

Shapes: T tokens of this rank, H hidden size, K experts per token, E experts of the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ep_dispatch import EPImplementation, EPImplementationInterface
from ep_dispatch.checkpointing import CheckpointMemory
from ep_dispatch.collectives import copy_to_group, group_rank, group_size, reduce_over_group
from ep_plans.styles.base import (
    Context,
    Forward,
    Moved,
    Scope,
    Style,
    around_forward,
    call_arguments,
    local,
    local_parameters,
    num_experts_of,
    size_near,
)


class GroupedGemm(Style):
    """A stacked expert weight [E, ...] (or bias) is cut over the experts: each rank holds its own."""

    scope = Scope.EXPERT_WEIGHT

    def cut(self, module: nn.Module, parameter_name: str, ndim: int) -> tuple[int, int] | None:
        """The expert dimension, the first."""
        return 0, 1


class DispatchExperts(Style):
    """`ep_implementation` decides how the tokens reach the experts of an experts module."""

    scope = Scope.EXPERTS
    dispatches = True

    def check(self, model: nn.Module, name: str) -> None:
        """The number of experts is known."""
        check_dispatched(model, name)

    def prepare(self, context: Context) -> EPImplementation:
        """Build the implementation."""
        return build_implementation(context)

    def install(self, context: Context) -> None:
        """Replace the forward `(hidden_states, top_k_index, top_k_weights) -> output`."""
        implementation: EPImplementation = context.prepared

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            hidden_states, index, weights = call_arguments(forward, args, kwargs)[:3]
            return implementation(local(hidden_states), local(index), local(weights))

        around_forward(context.module, run)


class MaskedRouter(Style):
    """Before masked experts: routes to other ranks' experts get weight 0 and a skipped local id.

    The router gives `(logits, weights [T, K], ids [T, K], ...)` with global ids; the experts get
    local ids, `E / P` where the expert is elsewhere.
    """

    scope = Scope.ROUTER

    def check(self, model: nn.Module, name: str) -> None:
        """The number of experts is known."""
        size_near(model, name, model.get_submodule(name), "num_experts", "ep_router")

    def install(self, context: Context) -> None:
        """Change the router's weights and ids."""
        module, group = context.module, context.group
        number = size_near(context.model, context.name, module, "num_experts", "ep_router")
        per_rank = number // group_size(group)
        memory = CheckpointMemory[Tensor]()

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            logits, weights, index, *others = forward(*args, **kwargs)
            # Recomputed, it may decide a near tie in another way, and not on all ranks alike.
            index = memory.kept(index)
            foreign = torch.div(index, per_rank, rounding_mode="floor") != group_rank(group)
            # Each rank's experts see their own routes only, so the weights' gradient is a part.
            weights = copy_to_group(weights, group).masked_fill(foreign, 0.0)
            index = torch.where(foreign, per_rank, index % per_rank)
            return (logits, weights, index, *others)

        around_forward(module, run)


class SummedExperts(Style):
    """Experts whose outputs are partial sums over the group.

    Over the TP axis each rank has a slice of every expert; over the expert axis each has some
    experts whole, and a `MaskedRouter` before it. Cost: an all-reduce of the input's gradient, of
    the routing weights' gradient (TP), and of the output.
    """

    scope = Scope.EXPERTS
    masks = True

    def moved(self, model: nn.Module, name: str, hidden: int, slots: int) -> Moved:
        """The output, the input's gradient and the routing weights'."""
        return Moved(reduced=2 * hidden + slots)

    def install(self, context: Context) -> None:
        """Copy the inputs, run on local weights, sum the output."""
        module, group = context.module, context.group
        # `MaskedRouter` has summed the gradient of the weights already.
        masked = context.axis == "ep"
        experts = context.experts_forward(module) if masked else None

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            if experts is not None:
                hidden_states, index, weights = call_arguments(forward, args, kwargs)[:3]
                output = experts(copy_to_group(local(hidden_states), group), index, weights)
                return reduce_over_group(output, group)
            first, *others = call_arguments(forward, args, kwargs)
            changed = [
                copy_to_group(local(x), group)
                if isinstance(x, Tensor) and x.is_floating_point()
                else x
                for x in others
            ]
            with local_parameters(module):
                output = forward(copy_to_group(local(first), group), *changed)
            return reduce_over_group(output, group)

        around_forward(module, run)


def check_dispatched(model: nn.Module, name: str) -> None:
    """The number of experts of the module `name` is known.

    Raises:
        ValueError: it isn't.
    """
    experts = model.get_submodule(name)
    if num_experts_of(experts) is None:
        raise ValueError(
            f"{name}: cannot tell the number of experts of {type(experts).__name__}: it has "
            "neither `num_experts` nor a stacked weight."
        )


def build_implementation(context: Context) -> EPImplementation:
    """The object that brings the experts of `context.module`, not cut yet, their tokens.

    Raises:
        ValueError: it can't run here.
    """
    experts, mesh = context.module, context.mesh
    number = num_experts_of(experts)
    assert number is not None
    implementation = EPImplementationInterface.get(context.config.ep_implementation)(
        context.experts_forward(experts),
        num_local_experts=number // mesh.size("ep"),
        ep_group=mesh.group("ep"),
        tp_group=mesh.group("tp") if mesh.size("tp") > 1 else None,
        sequence_parallel=context.config.enable_sequence_parallel and mesh.size("tp") > 1,
        experts=experts,
        **context.ep_options,
    )
    implementation.layer = context.name
    return implementation
