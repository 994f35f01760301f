"""The facts of an experts module: which weights it has and how its MLP is put together.

Shape letters: H hidden size, I intermediate size, E experts held here, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .local import local_parameters, local_tensor

Elementwise = Callable[[Tensor], Tensor]

# The attributes by which transformers (5.17 to 5.24) declares how an experts module is laid out.
_DECLARATIONS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
# The name of the gating that transformers gives to a class that brings none of its own.
_DEFAULT_GATE = "_default_apply_gate"


class ExpertsWeights(NamedTuple):
    """The weights of E experts, as plain tensors.

    `up` is [E, U, H] and `down` [E, H, I], or, for a transposed spec, [E, H, U] and [E, I, H];
    U is 2 I for gated experts, else I. `up_bias` is [E, U], `down_bias` [E, H].
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E, the number of experts these weights hold."""
        return self.up.shape[0]

    def tensors(self) -> list[Tensor]:
        """All the weights there are, in order."""
        return [tensor for tensor in self if tensor is not None]


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """How the MLP of an experts module is put together.

    Per expert: `down(act(gate(x)) * up(x))` if `gated`, else `down(act(up(x)))`, then `post_norm`.

    Attributes:
        up: name of the first weight; for gated experts it holds gate and up projection.
        down: name of the second weight.
        up_bias: name of the bias of the first weight, or None.
        down_bias: name of the bias of the second weight, or None.
        gated: whether the first weight holds a gate and an up projection.
        interleaved: gate and up alternate (gate0, up0, gate1, ...); else all gates come first.
        transposed: weights are stored [E, in, out], not [E, out, in].
        activation: applied to the gate (or, ungated, to the up projection): a function, or the
            name of one in `torch.nn.functional`.
        gate: an own way from [R, U] to [R, I], used in place of activation and product.
        post_norm: applied to each expert's output, before the routing weight.
    """

    up: str = "gate_up_proj"
    down: str = "down_proj"
    up_bias: str | None = None
    down_bias: str | None = None
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    activation: Elementwise | str | None = "silu"
    gate: Elementwise | None = None
    post_norm: Elementwise | None = None

    def __post_init__(self) -> None:
        if self.activation is None and self.gate is None:
            raise ValueError("ExpertsSpec needs `activation` or `gate`; both are None.")
        if isinstance(self.activation, str) and not hasattr(nn.functional, self.activation):
            raise ValueError(
                f"activation {self.activation!r} is no function of torch.nn.functional; "
                "give such a name (for example 'silu') or a callable."
            )

    @classmethod
    def from_module(cls, experts: nn.Module) -> ExpertsSpec | None:
        """The spec of an experts module that declares its layout as transformers' do, else None.

        Reads attributes only, no weight: the module may be on the meta device or sharded.
        `why_not(experts)` tells the reason for a None.
        """
        if why_not(experts) is not None:
            return None
        gated = bool(experts.has_gate)
        up = "gate_up_proj" if gated else "up_proj"
        biased = bool(experts.has_bias)
        apply_gate: Any = getattr(experts, "_apply_gate", None) if gated else None
        if getattr(apply_gate, "__name__", None) == _DEFAULT_GATE:
            apply_gate = None
        return cls(
            up=up,
            up_bias=f"{up}_bias" if biased else None,
            down_bias="down_proj_bias" if biased else None,
            gated=gated,
            interleaved=not experts.is_concatenated,
            transposed=bool(experts.is_transposed),
            activation=getattr(experts, "act_fn", None),
            gate=apply_gate,
            post_norm=(
                _module(experts, "post_expert_norm")
                if getattr(experts, "has_post_expert_norm", False)
                else None
            ),
        )

    def weight_names(self) -> list[str]:
        """The names of the parameters that the spec uses."""
        names = (self.up, self.down, self.up_bias, self.down_bias)
        return [name for name in names if name is not None]

    def read_weights(self, experts: nn.Module) -> ExpertsWeights:
        """The module's present weights as plain tensors; a sharded one (DTensor) as its local part.

        To be called in each forward, since FSDP2 swaps a module's parameters around it.
        """

        def read(name: str | None) -> Tensor | None:
            return None if name is None else local_tensor(_parameter(experts, name))

        up, down = read(self.up), read(self.down)
        assert up is not None
        assert down is not None
        return ExpertsWeights(up, down, read(self.up_bias), read(self.down_bias))

    def activate(self, x: Tensor, *, copies: bool = False) -> Tensor:
        """From the first projection [R, U] to the second one's input [R, I].

        With `copies`, the activation is applied to a copy, for one that works in place.
        """

        def given(part: Tensor) -> Tensor:
            return part.clone() if copies else part

        if self.gate is not None:
            return self.gate(given(x))
        activation = self.activation
        if isinstance(activation, str):
            activation = getattr(nn.functional, activation)
        assert activation is not None
        if not self.gated:
            return activation(given(x))
        if self.interleaved:
            gate, up = x[..., ::2], x[..., 1::2]
        else:
            gate, up = x.chunk(2, dim=-1)
        return activation(given(gate)) * up


def why_not(experts: nn.Module) -> str | None:
    """Why `ExpertsSpec.from_module` does not understand a module; None if it does."""
    kind = type(experts).__name__
    missing = [name for name in _DECLARATIONS if not hasattr(experts, name)]
    if missing:
        return f"{kind} does not declare its layout: no attribute {', '.join(missing)}"
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    names = [up, "down_proj"]
    if experts.has_bias:
        names += [f"{up}_bias", "down_proj_bias"]
    dims = {name: 2 if name.endswith("_bias") else 3 for name in names}
    for name, dim in dims.items():
        parameter = experts._parameters.get(name)
        if parameter is None:
            return f"{kind} has no parameter {name}"
        if parameter.dim() != dim:
            shape = tuple(parameter.shape)
            return f"{kind}.{name} has {parameter.dim()} dims {shape}; one per expert needs {dim}"
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            return f"{kind}.{name} is {parameter.dtype}: quantized experts need their own forward"
    gate = getattr(experts, "_apply_gate", None) if experts.has_gate else None
    if not callable(getattr(experts, "act_fn", None)) and (
        gate is None or getattr(gate, "__name__", None) == _DEFAULT_GATE
    ):
        return f"{kind} has neither an `act_fn` nor an `_apply_gate` of its own"
    if getattr(experts, "has_post_expert_norm", False) and not isinstance(
        getattr(experts, "post_expert_norm", None), nn.Module
    ):
        return f"{kind} declares a post expert norm and has no module post_expert_norm"
    return None


def _parameter(experts: nn.Module, name: str) -> Tensor:
    parameter = experts._parameters.get(name)
    if parameter is None:
        kind, has = type(experts).__name__, sorted(experts._parameters)
        raise AttributeError(f"{kind} has no parameter {name!r}; it has {has}.")
    return parameter


def _module(experts: nn.Module, name: str) -> Elementwise:
    """A call of a submodule that sees its parameters as plain tensors."""

    def call(x: Tensor) -> Tensor:
        module: nn.Module = getattr(experts, name)
        with local_parameters(module):
            out: Tensor = module(x)
        return out

    return call


def compute_dtype(like: Tensor) -> torch.dtype:
    """The dtype that matrix products with `like` run in: autocast's, if it is on, else its own.

    As everywhere in autocast, float64 stays float64.
    """
    device_type = like.device.type
    if torch.is_autocast_enabled(device_type) and like.dtype is not torch.float64:
        return torch.get_autocast_dtype(device_type)
    return like.dtype
