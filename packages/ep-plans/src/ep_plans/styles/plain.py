"""Styles of modules that every rank holds whole, and of outputs that are only partial."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ep_dispatch.collectives import (
    copy_to_group,
    gather_over_group,
    reduce_over_group,
    split_over_group,
)
from ep_plans.styles.base import (
    Context,
    Forward,
    Moved,
    Style,
    around_forward,
    change_input,
    change_output,
    local,
    local_parameters,
)


class Replicate(Style):
    """Every rank keeps the whole parameter and does the same work with it."""

    input_in_parts = False
    output_in_parts = False


class PartialGradients(Style):
    """Every rank keeps the whole parameter and applies it to its own part of the activations.

    For example a norm over each query head, where each rank has some of the heads. The gradient is
    summed over the group once per backward, inside autograd, so that accumulation stays right.
    """

    partial_gradients = True


class LocalParameters(Style):
    """The module's own code sees what this rank holds of its own (cut) parameters.

    For bare parameters such as attention sinks, whose own rules cut them.
    """

    def install(self, context: Context) -> None:
        """Show local parameters during the forward."""
        module = context.module

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            with local_parameters(module):
                return forward(*args, **kwargs)

        around_forward(module, run)


class AllReduceOutput(Style):
    """The output is a partial sum on each rank. Cost: an all-reduce of the output in forward.

    If the module's own bare parameters are cut, its code sees what this rank holds of them, and the
    gradient of every input is a partial sum too: an all-reduce of each in backward.
    """

    def moved(self, model: nn.Module, name: str, hidden: int, slots: int) -> Moved:
        """The output, and the input's gradient where the module has parameters of its own."""
        own = next(model.get_submodule(name).parameters(recurse=False), None) is not None
        return Moved(reduced=2 * hidden if own else hidden)

    def install(self, context: Context) -> None:
        """Sum the output over the group."""
        module, group = context.module, context.group
        cut = any(isinstance(p, DTensor) for p in module._parameters.values())

        def copy(x: Any) -> Any:
            floating = isinstance(x, Tensor) and x.is_floating_point()
            return copy_to_group(local(x), group) if floating else x

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            if cut:
                args = tuple(copy(x) for x in args)
                kwargs = {name: copy(x) for name, x in kwargs.items()}
            with local_parameters(module):
                output = forward(*args, **kwargs)
            if output is None:
                return None
            return change_output(lambda x: reduce_over_group(x, group), output)

        around_forward(module, run)


class SequenceSlices(Style):
    """The module works token by token and runs on this rank's slice of the sequence (dimension 1).

    The whole input comes in and the whole output goes out; for a model whose sequence is sharded
    between TP regions throughout, see `enable_sequence_parallel`.
    Cost: an all-gather of the output in forward and of the input's gradient in backward.
    """

    partial_gradients = True

    def moved(self, model: nn.Module, name: str, hidden: int, slots: int) -> Moved:
        """The output and the input's gradient."""
        return Moved(gathered=2 * hidden)

    def install(self, context: Context) -> None:
        """Split the input, run, gather the output."""
        group = context.group

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            size = 0

            def split(x: Tensor) -> Tensor:
                nonlocal size
                size = x.shape[1]
                return split_over_group(x, group, 1)

            args, kwargs = change_input(split, args, kwargs)
            output = forward(*args, **kwargs)
            return change_output(lambda x: gather_over_group(x, group, 1, size=size), output)

        around_forward(context.module, run)


class IdentityExpert(Style):
    """An expert that gives back its input, inside experts whose outputs are summed over the group."""

    def install(self, context: Context) -> None:
        """Divide the input by the group's size, so that the sum is the input again."""
        size = context.mesh.size(context.axis)

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = change_input(lambda x: x / size, args, kwargs)
            return forward(*args, **kwargs)

        around_forward(context.module, run)
