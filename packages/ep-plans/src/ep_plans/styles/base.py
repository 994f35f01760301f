"""What a style is: how a module's parameters are cut, and what is done around its forward."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from ep_dispatch import ExpertsForward
from ep_mesh import DistributedConfig, ParallelMesh

Forward = Callable[..., Any]

# Where a module notes the dtype that its empty parameters are shown in, which FSDP2 leaves alone.
EMPTY_DTYPE = "_ep_empty_dtype"


class Scope(enum.Enum):
    """What a style is a rule for."""

    DENSE = "a dense module or its parameters, over the TP axis"
    EXPERTS = "an experts module, over the expert axis"
    EXPERT_WEIGHT = "a stacked expert weight, over the expert axis"
    ROUTER = "the router before masked experts, over the expert axis"


@dataclass(frozen=True)
class Context:
    """Where a style is installed.

    Attributes:
        mesh: the meshes of the layout.
        config: the configuration.
        model: the whole model.
        name: the module's path in the model.
        module: the module itself.
        axis: the axis that the rule works over, "tp" or "ep".
        copies: consecutive ranks that hold the same part of its weight (key-value heads).
        experts_forward: makes the function that runs an experts module.
        ep_options: further settings of the implementation that dispatches to it.
        prepared: what the style's `prepare` gave.
    """

    mesh: ParallelMesh
    config: DistributedConfig
    model: nn.Module
    name: str
    module: nn.Module
    axis: str
    copies: int
    experts_forward: Callable[[nn.Module], ExpertsForward]
    ep_options: Mapping[str, Any] = field(default_factory=dict)
    prepared: Any = None

    @property
    def group(self) -> ProcessGroup:
        """The process group of `axis`."""
        return self.mesh.group(self.axis)

    @property
    def parent(self) -> nn.Module:
        """The module that holds this one."""
        return self.model.get_submodule(self.name.rpartition(".")[0])


@dataclass(frozen=True)
class Moved:
    """What the collectives around a module work on in a training step, in elements per token.

    Attributes:
        reduced: all-reduced, in forward and backward together.
        gathered: all-gathered, in forward and backward together.
    """

    reduced: int = 0
    gathered: int = 0


class Style:
    """One way to shard a module's parameters and to run it. Stateless; one object serves all modules.

    A subclass overrides `cut` (which dimension of which parameter), `install` (what is done around
    the forward), and the class attributes.
    """

    scope: Scope = Scope.DENSE
    # Tokens travel to the experts: needs global expert ids, works in any layout.
    dispatches: bool = False
    # Experts that get the ids of a masking router, local ones, and so share one batch.
    masks: bool = False
    # Each rank sees only a part of the gradients of the module's own uncut parameters.
    partial_gradients: bool = False
    # Whether a rank's input, and output, is its part of the features; None: rules that feed each
    # other are not checked.
    input_in_parts: bool | None = None
    output_in_parts: bool | None = None
    # Each rank computes attention heads of its own, copied where there are fewer than ranks.
    keeps_heads: bool = False

    def cut(self, module: nn.Module, parameter_name: str, ndim: int) -> tuple[int, int] | None:
        """The dimension to cut and its packs, or None to leave the parameter whole.

        Args:
            module: the module that owns the parameter.
            parameter_name: its name in the module.
            ndim: its number of dimensions.
        """
        return None

    def check(self, model: nn.Module, name: str) -> None:
        """Raise a ValueError if the style can't work on the module `name` of `model`.

        Called with every rule before anything is changed; needs no process group.
        """

    def moved(self, model: nn.Module, name: str, hidden: int, slots: int) -> Moved:
        """What the module `name` of `model`, not sharded, moves over the rule's axis.

        Args:
            model: the model.
            name: the module's path.
            hidden: the model's hidden size.
            slots: its experts per token.
        """
        return Moved()

    def prepare(self, context: Context) -> Any:
        """Make what `install` needs, which finds it as `context.prepared`.

        Called with every rule before any parameter is cut: what can't run on this machine or in this
        layout raises here, on every rank alike.
        """
        return None

    def install(self, context: Context) -> None:
        """Change how `context.module` runs. Called once, after its parameters are cut."""


def size_of(module: nn.Module, attribute: str, name: str, style: str) -> int:
    """A size that a style needs of a module.

    Raises:
        ValueError: the module has no such attribute.
    """
    size = getattr(module, attribute, None)
    if not isinstance(size, int):
        raise ValueError(
            f"{name}: the style {style!r} needs a module with `{attribute}`, "
            f"got {type(module).__name__}."
        )
    return size


def size_near(model: nn.Module, name: str, module: nn.Module, attribute: str, style: str) -> int:
    """A size that a style needs: of `module`, of its config, or of the model's.

    Raises:
        ValueError: none of them has it.
    """
    for owner in (module, getattr(module, "config", None), getattr(model, "config", None)):
        size = getattr(owner, attribute, None)
        if isinstance(size, int):
            return size
    raise ValueError(
        f"{name}: the style {style!r} needs `{attribute}` on {type(module).__name__} or in the "
        "model's config, and neither has it."
    )


def num_experts_of(experts: nn.Module) -> int | None:
    """The experts that a module holds, from `num_experts` or its first stacked weight."""
    number = getattr(experts, "num_experts", None)
    if isinstance(number, int):
        return number
    stacked = [p for p in experts.parameters(recurse=False) if p.ndim == 3]
    return stacked[0].shape[0] if stacked else None


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, differentiable; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_MISSING = object()


@contextlib.contextmanager
def attributes(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """Let `module` show `values` under the names of its parameters or attributes meanwhile.

    An entry of a module's `__dict__` is found before `_parameters`, which stays as FSDP2 wants it.
    """
    before = {name: module.__dict__.get(name, _MISSING) for name in values}
    module.__dict__.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value


def local_parameters(
    module: nn.Module, change: Callable[[str, Tensor], Tensor] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Let `module`'s own code see what this rank holds of its own parameters.

    Args:
        module: the module; its children are not touched.
        change: called with the name and the local tensor, gives what the code shall see.
    """
    values: dict[str, Any] = {}
    empty_dtype = module.__dict__.get(EMPTY_DTYPE)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        # What somebody around shows already, else the parameter itself.
        shown = module.__dict__.get(name)
        value = shown if isinstance(shown, Tensor) else local(parameter)
        if empty_dtype is not None and value.numel() == 0:
            value = value.to(empty_dtype)
        if change is not None:
            values[name] = change(name, value)
        elif isinstance(parameter, DTensor):
            values[name] = value
    return attributes(module, values)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Give back `x`, whose gradient is multiplied by `factor`."""
    scaled: Tensor = _ScaleGradient.apply(x, factor)
    return scaled


def call_arguments(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call in the order of `forward`'s signature."""
    return list(inspect.signature(forward).bind(*args, **kwargs).arguments.values())


# Where a forward that `around_forward` made keeps what it calls.
_INNER = "_ep_inner"


def around_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Replace `module.forward` by `run(forward, *args, **kwargs)`; the signature stays visible."""
    inner = [module.forward]

    @functools.wraps(inner[0])
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(inner[0], *args, **kwargs)

    setattr(forward, _INNER, inner)
    module.forward = forward


def inside_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """As `around_forward`, around the module's own code alone, inside what others put around it.

    So `run` sees what that code sees: this rank's part of the input, with `local_parameters` shown.
    A style that runs a module by other code than its own (dispatched experts) never gets there.
    """
    holder: list[Any] | None = getattr(module.forward, _INNER, None)
    if holder is None:
        around_forward(module, run)
        return
    while (deeper := getattr(holder[0], _INNER, None)) is not None:
        holder = deeper
    own = holder[0]

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(own, *args, **kwargs)

    holder[0] = forward


def change_input(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `change` to the first tensor of a call, positional or by keyword."""
    if args:
        return (change(local(args[0])), *args[1:]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, name: change(local(value))}
    return args, kwargs


def change_output(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Apply `change` to a module's output, or to the first element of a tuple of outputs."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:]) if output else output
    return change(output)
