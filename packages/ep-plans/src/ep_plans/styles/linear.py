"""Column-wise and row-wise sharding of projections, packed ones included.

Shapes: a projection maps [..., in] to [..., out] with a weight [out, in]. Column-wise cuts `out`: each
rank computes its features of the whole input. Row-wise cuts `in`: each rank has its features of the
input, and the partial outputs are summed. Source: Shoeybi et al., Megatron-LM (2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
    local_parameters,
    size_near,
    size_of,
)


def _features(module: nn.Module) -> tuple[int, int]:
    """Input and output features of a projection; (0, 0) where its weight is not its own."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        return 0, 0
    return weight.shape[1], weight.shape[0]


class Colwise(Style):
    """The output features are cut; with `gather_output` every rank gets them all again.

    Cost: an all-reduce of the input's gradient in backward; with `gather_output` an all-gather of
    the output in forward.
    """

    def __init__(self, *, gather_output: bool = False, packs: int = 1) -> None:
        self.gather_output = gather_output
        self.packs = packs
        self.input_in_parts, self.output_in_parts = False, not gather_output
        self.keeps_heads = not gather_output and packs == 1

    def cut(self, module: nn.Module, parameter_name: str, ndim: int) -> tuple[int, int] | None:
        """The output dimension: the last but one of a weight, the only one of a bias."""
        return max(ndim - 2, 0), self.packs

    def check(self, model: nn.Module, name: str) -> None:
        """A gathered output needs to know its size."""
        if self.gather_output:
            size_of(model.get_submodule(name), "out_features", name, "colwise_gather_output")

    def moved(self, model: nn.Module, name: str, hidden: int, slots: int) -> Moved:
        """The input's gradient, and the gathered output."""
        inputs, outputs = _features(model.get_submodule(name))
        return Moved(reduced=inputs, gathered=outputs if self.gather_output else 0)

    def install(self, context: Context) -> None:
        """Copy the input, run on the local weight, gather if asked."""
        module, group = context.module, context.group
        size = getattr(module, "out_features", 0)
        copy_group = None
        if context.copies > 1:
            split = context.mesh.split_tp(context.mesh.size("tp") // context.copies)
            copy_group = split["tp_copy"].get_group()

        def weight(name: str, value: Tensor) -> Tensor:
            # Ranks that hold the same head each see the gradient of their own queries only.
            return copy_to_group(value, copy_group)

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = change_input(lambda x: copy_to_group(x, group), args, kwargs)
            with local_parameters(module, weight):
                output = forward(*args, **kwargs)
            if self.gather_output:
                output = gather_over_group(output, group, -1, size=size)
            return output

        around_forward(module, run)


class Rowwise(Style):
    """The input features are cut, the partial outputs summed; the bias is added once, after the sum.

    With `split_input` the input comes whole and each rank takes its features of it.
    Cost: an all-reduce of the output in forward; with `split_input` an all-gather in backward.
    """

    def __init__(self, *, split_input: bool = False, packs: int = 1) -> None:
        self.split_input = split_input
        self.packs = packs
        self.input_in_parts, self.output_in_parts = not split_input, False

    def cut(self, module: nn.Module, parameter_name: str, ndim: int) -> tuple[int, int] | None:
        """The input dimension, the last one; biases stay whole."""
        return None if ndim == 1 else (ndim - 1, self.packs)

    def moved(self, model: nn.Module, name: str, hidden: int, slots: int) -> Moved:
        """The output, and the gradient of a split input."""
        inputs, outputs = _features(model.get_submodule(name))
        return Moved(reduced=outputs, gathered=inputs if self.split_input else 0)

    def install(self, context: Context) -> None:
        """Run on the local weight without the bias, sum over the group, add the bias."""
        module, group = context.module, context.group

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            bias: Tensor | None = None

            def hide_bias(name: str, value: Tensor) -> Any:
                nonlocal bias
                if name != "bias":
                    return value
                bias = value
                return None

            if self.split_input:
                args, kwargs = change_input(lambda x: split_over_group(x, group, -1), args, kwargs)
            with local_parameters(module, hide_bias):
                output = forward(*args, **kwargs)
            output = reduce_over_group(output, group)
            return output if bias is None else output + bias.to(output.dtype)

        around_forward(module, run)


class MlaKeyValue(Style):
    """The joint key-value projection of multi-head latent attention, whole on every rank.

    Its output is a latent part, which a column-wise projection uses (and sums the gradient of), and
    a rotary part, which goes straight to every rank's own heads: that part's gradient is summed here.
    """

    def check(self, model: nn.Module, name: str) -> None:
        """The rotary part's size is known."""
        self._rotary_size(model, name)

    def moved(self, model: nn.Module, name: str, hidden: int, slots: int) -> Moved:
        """The rotary part's gradient."""
        return Moved(reduced=self._rotary_size(model, name))

    def install(self, context: Context) -> None:
        """Sum the gradient of the last `qk_rope_head_dim` output features over the group."""
        module, group = context.module, context.group
        rope = self._rotary_size(context.model, context.name)

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            latent, rotary = output.split([output.shape[-1] - rope, rope], dim=-1)
            return torch.cat([latent, copy_to_group(rotary, group)], dim=-1)

        around_forward(module, run)

    @staticmethod
    def _rotary_size(model: nn.Module, name: str) -> int:
        attention = model.get_submodule(name.rpartition(".")[0])
        return size_near(model, name, attention, "qk_rope_head_dim", "mla_kv_a_proj")
