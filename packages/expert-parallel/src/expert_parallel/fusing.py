"""Compute by one operator what a model composes of several: RMS norms and rotary embeddings.

[Note: what is recognised]
A norm's code is not read but tried. Its own forward runs on a few rows whose sizes lie far apart, in
float32 and in bfloat16, with a random weight, and its output and gradients have to be those of
`ep_kernels.rms_norm` up to rounding. A weight of `1 + w`, a gate, dropped or detached terms and another
epsilon all fail, and such a module stays as it is. So it is with the function that rotates queries and keys.
Nothing is changed but the `forward` of the objects of one model: other models of the process keep
theirs.

[Note: a function of another module]
transformers' attention calls `apply_rotary_pos_emb`, a global of its module. Its own hook for another one
is the package `kernels`, which has to be there when transformers is imported, and changes the classes of
all models. So the attention of a model is given a copy of its class's forward whose globals differ in
that one name.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ep_kernels import apply_rotary, rms_norm

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
"""Of a gradient's and an output's error: a few roundings of the dtype."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In which norms compute in float32, as `ep_kernels` does. Models do so in float64 too."""


_SMALL = 1 << 14
"""Elements. Of fewer on a CPU, Python costs more than passes over memory: the model's own code runs."""

_ROTARY = "apply_rotary_pos_emb"
"""transformers 5.17 to 5.24: what attention calls with queries, keys, cos and sin."""


def fuse(model: nn.Module) -> list[nn.Module]:
    """`fuse_norms` and `fuse_rotary`."""
    return fuse_norms(model) + fuse_rotary(model)


def fuse_norms(model: nn.Module) -> list[nn.Module]:
    """Let the norms of `model` that are RMS norms run as one operator. In place.

    A call that the operator does not take (few values on a CPU, float64, a weight of another dtype than the input,
    DTensors, torch.compile, which fuses by itself) runs the module's own code.

    Returns:
        Those modules, whose own `forward` is found again once the one in their `__dict__` is deleted.
    """
    verdicts: dict[Any, str | None] = {}
    found = []
    for module in model.modules():
        if not _may_be_norm(module):
            continue
        epsilon = _recognise(module, verdicts)
        if epsilon is not None:
            run = _fused_forward(type(module).forward, epsilon)
            module.forward = MethodType(run, module)
            found.append(module)
    return found


def _may_be_norm(module: nn.Module) -> bool:
    """Whether it has one vector named weight and nothing else, and a forward of one input."""
    if isinstance(module, nn.RMSNorm) or "forward" in module.__dict__:
        return False
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or len(module._parameters) > 1:
        return False
    if module._buffers or module._modules:
        return False
    return len(inspect.signature(type(module).forward).parameters) == 2


def _recognise(module: nn.Module, verdicts: dict[Any, str | None]) -> str | None:
    """The name of the module's epsilon if it is an RMS norm. Modules that are alike are tried once."""
    own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    own.pop("training", None)
    width = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
    likeness = type(module), width, repr(sorted(own.items()))
    if likeness not in verdicts:
        names = [name for name in _EPSILONS if isinstance(own.get(name), float)]
        agrees = len(names) == 1 and width > 0 and _agrees(module, width, own[names[0]])
        verdicts[likeness] = names[0] if agrees else None
    return verdicts[likeness]


def _agrees(module: nn.Module, width: int, eps: float) -> bool:
    """Whether the module's own forward gives what the operator does, gradients included."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cpu", dtype=torch.float32)
    sizes = torch.tensor([[0.3 * eps**0.5], [2 * eps**0.5], [1.0], [30.0]], device="cpu")
    rows, grad, weight = draw(4, width) * sizes, draw(4, width), draw(width)
    for dtype, bound in _BOUNDS.items():
        stand_in = copy.copy(module)
        object.__setattr__(stand_in, "_parameters", {})
        stand_in.weight = nn.Parameter(weight.to(dtype))
        try:
            own = _tried(stand_in.forward, rows.to(dtype), stand_in.weight, grad.to(dtype))
        except Exception:  # noqa: BLE001 (whatever it needs, it is no plain norm)
            return False
        fused = _tried(
            lambda x, weight=stand_in.weight: rms_norm(x, weight, eps),
            rows.to(dtype),
            stand_in.weight,
            grad.to(dtype),
        )
        for mine, theirs in zip(fused, own, strict=True):
            if theirs is None or theirs.shape != mine.shape or theirs.dtype != mine.dtype:
                return False
            error = torch.linalg.vector_norm(mine.double() - theirs.double(), dim=-1)
            size = torch.linalg.vector_norm(mine.double(), dim=-1)
            if not bool((error <= bound * size).all()):
                return False
    return True


@torch.enable_grad()
def _tried(function: Any, rows: Tensor, weight: Tensor, grad: Tensor) -> list[Any]:
    """The output and the gradients of rows and weight."""
    leaf = rows.requires_grad_()
    out = function(leaf)
    return [out.detach(), *torch.autograd.grad(out, (leaf, weight), grad, allow_unused=True)]


@functools.cache
def _fused_forward(own: Any, epsilon: str) -> Any:
    """A forward that runs as one operator what it can, and `own` otherwise."""

    @functools.wraps(own)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
            x: Any = args[0]
            weight: Any = module.weight
            if _takes(x, weight):
                return rms_norm(x, weight, getattr(module, epsilon))
        return own(module, *args, **kwargs)

    return forward


def _is_large(x: Tensor) -> bool:
    return x.device.type != "cpu" or x.numel() >= _SMALL


def _takes(x: Any, weight: Any) -> bool:
    """Whether the operator takes these, as the module's own code would."""
    return (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and not isinstance(x, DTensor)
        and not isinstance(weight, DTensor)
        and _is_large(x)
        and x.dtype in _DTYPES
        and weight.dtype is x.dtype
        and weight.device == x.device
        and weight.shape == x.shape[-1:]
    )


def fuse_rotary(model: nn.Module) -> list[nn.Module]:
    """Let the attention of `model` rotate queries and keys by one operator. In place.

    Calls that the operator does not take (few values on a CPU, cos and sin of another dtype, heads in
    another dimension, DTensors, torch.compile) run the model's own code.

    Returns:
        The attention modules, as `fuse_norms` does.
    """
    found = []
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        forward = _rotary_forward(type(module).forward)
        if forward is not None:
            module.forward = MethodType(forward, module)
            found.append(module)
    return found


@functools.cache
def _rotary_forward(forward: Any) -> Any:
    """A forward that calls the operator; None if `forward` calls no function that does the same."""
    copy_of = _with_rotary(forward, set()) if isinstance(forward, FunctionType) else None
    if copy_of is None:
        return None

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        # torch.compile looks a copy's globals up in its module, which has others.
        chosen = forward if torch.compiler.is_compiling() else copy_of
        return chosen(*args, **kwargs)

    return run


def _with_rotary(function: FunctionType, seen: set[int]) -> FunctionType | None:
    """A copy of a function, and of functions that it closes over, as decorators do."""
    if id(function) in seen:
        return None
    seen.add(id(function))
    cells = list(function.__closure__ or ())
    inner = [_with_rotary(f, seen) if (f := _content(cell)) is not None else None for cell in cells]
    names = function.__globals__
    own = names.get(_ROTARY) if _ROTARY in function.__code__.co_names else None
    rotary = None if own is None else _fused_rotary(own)
    if rotary is None and not any(inner):
        return None
    cells = [
        CellType(new) if new is not None else cell for new, cell in zip(inner, cells, strict=True)
    ]
    made = FunctionType(
        function.__code__,
        names if rotary is None else {**names, _ROTARY: rotary},
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.wraps(function)(made)  # type: ignore[return-value]


def _content(cell: CellType) -> FunctionType | None:
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return None
    return content if isinstance(content, FunctionType) else None


@functools.cache
def _fused_rotary(own: Any) -> Callable[..., Any] | None:
    """What rotates queries and keys as `own` does; None if that is no plain rotation of halves."""
    if not _rotates(own, 8):
        return None
    in_part = _rotates(own, 4)

    @functools.wraps(own)
    def rotary(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and not torch.compiler.is_compiling():
            query, key, cos, sin = args
            if all(_rotary_takes(x, cos, sin, in_part=in_part) for x in (query, key)):
                return apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        return own(*args, **kwargs)

    return rotary


def _rotates(own: Any, rotated: int) -> bool:
    """Whether `own` gives what the operator does for heads of 8, of which so many are rotated."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cpu", dtype=torch.float32)
    inputs = [draw(2, 3, 5, 8), draw(2, 1, 5, 8), draw(2, 5, rotated), draw(2, 5, rotated)]
    grads = [draw(2, 3, 5, 8), draw(2, 1, 5, 8)]
    for dtype, bound in _BOUNDS.items():
        query, key, cos, sin = (x.to(dtype) for x in inputs)
        found = []
        for function in (lambda x, y, c, s: (apply_rotary(x, c, s), apply_rotary(y, c, s)), own):
            leaves = query.clone().requires_grad_(), key.clone().requires_grad_()
            try:
                with torch.enable_grad():
                    out = function(*leaves, cos, sin)
                    into = torch.autograd.grad(out, leaves, [g.to(dtype) for g in grads])
            except Exception:  # noqa: BLE001 (it takes something else)
                return False
            found.append([*out, *into])
        for mine, theirs in zip(*found, strict=True):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                return False
            if (mine.double() - theirs.double()).norm() > bound * mine.double().norm():
                return False
    return True


def _rotary_takes(x: Any, cos: Any, sin: Any, *, in_part: bool) -> bool:
    """Whether the operator takes these, as the model's own code would."""
    tensors = x, cos, sin
    if not all(isinstance(t, Tensor) and not isinstance(t, DTensor) for t in tensors):
        return False
    if not _is_large(x):
        return False
    if (
        x.ndim != 4
        or cos.ndim != 3
        or cos.shape != sin.shape
        or cos.shape[0] not in (1, x.shape[0])
    ):
        return False
    rotated = cos.shape[2]
    return (
        cos.shape[1] == x.shape[2]
        and (rotated == x.shape[3] or (in_part and rotated < x.shape[3]))
        and rotated % 2 == 0
        and x.is_floating_point()
        and all(t.dtype is x.dtype and t.device == x.device for t in tensors)
        and not cos.requires_grad
        and not sin.requires_grad
    )
