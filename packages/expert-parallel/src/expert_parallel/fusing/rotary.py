"""Rotary embeddings of a model's attention run by `ep_kernels.apply_rotary`.

[Note: a function of another module]
transformers' attention calls `apply_rotary_pos_emb`, a global of its module. Its own hook for another one
is the package `kernels`, which has to be there when transformers is imported, and changes the classes of
all models. So the attention of a model is given a copy of its class's forward that looks up the module's
globals, but where it would find that function it gets ours. Who replaces it, or another global of that
module, later is heard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ep_kernels import apply_rotary

from .inputs import may_fuse
from .trial import agrees, can_try, draw

_ROTARY = "apply_rotary_pos_emb"
"""transformers 5.17 to 5.24: what attention calls with queries, keys, cos and sin."""


def fuse_rotary(model: nn.Module) -> list[nn.Module]:
    """Let the attention of `model` rotate queries and keys by one operator. In place.

    Calls that the operator does not take (few values on a CPU, cos and sin of another dtype, heads in
    another dimension, DTensors, torch.compile) run the model's own code.

    Returns:
        The attention modules, as `fuse_norms` does.
    """
    if not can_try():
        return []
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
        names if rotary is None else _Globals(names, own, rotary),
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.wraps(function)(made)  # type: ignore[return-value]


class _Globals(dict[str, Any]):
    """The globals of a module, as they are at each look-up, with one function in the place of another.

    Python asks a subclass of dict for each global, and `__missing__` for those that it hasn't.
    """

    def __init__(self, names: Mapping[str, Any], own: Any, instead: Any) -> None:
        super().__init__(__name__=names.get("__name__"))  # which warnings read
        self._names, self._own, self._instead = names, own, instead

    def __missing__(self, name: str) -> Any:
        value = self._names[name]
        return self._instead if value is self._own else value


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
        if len(args) == 4 and not kwargs:
            query, key, cos, sin = args
            if all(_takes(x, cos, sin, in_part=in_part) for x in (query, key)):
                return apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        return own(*args, **kwargs)

    return rotary


def _rotates(own: Any, rotated: int) -> bool:
    """Whether `own` gives what the operator does for heads of 8, of which so many are rotated."""
    generator = torch.Generator().manual_seed(0)
    inputs = [draw(generator, 2, heads, 5, 8) for heads in (3, 1)]
    tables = [draw(generator, 2, 5, rotated) for _ in range(2)]
    grads = [draw(generator, 2, heads, 5, 8) for heads in (3, 1)]

    def fused(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)

    return agrees(fused, own, inputs, grads, constants=tables)


def _takes(x: Any, cos: Any, sin: Any, *, in_part: bool) -> bool:
    """Whether the operator takes these, as the model's own code would."""
    if not may_fuse(x, cos, sin) or x.ndim != 4 or cos.ndim != 3 or cos.shape != sin.shape:
        return False
    batch, length, rotated = cos.shape
    return (
        batch in (1, x.shape[0])
        and length == x.shape[2]
        and (rotated == x.shape[3] or (in_part and rotated < x.shape[3]))
        and rotated % 2 == 0
        and x.is_floating_point()
        and not cos.requires_grad
        and not sin.requires_grad
    )
