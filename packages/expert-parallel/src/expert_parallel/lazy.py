"""`LazyTensor`: a tensor that is read when, and as far as, somebody needs it.

Weight conversions of transformers (stack the experts, cut a fused projection, transpose) are
written for whole tensors. Run on lazy ones they move no data: each result remembers how it came
about. Reading a box of a result then reads only the boxes of the sources that end up in it.

[Note: what reading costs]
Stacking, concatenating, slicing, splitting and permuting pass a box on exactly, and a view passes
on the dimensions that it leaves alone. Any other operation (arithmetic, such as a dequantization)
is computed from all of its inputs at the time of reading: right, and dearer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from ep_plans.boxes import (
    Box,
    Interval,
    clipped,
    lengths,
    numel,
    pieces,
    shifted,
    whole_box,
)
from expert_parallel._compat import make_wrapper_subclass, tree_map_only

aten = torch.ops.aten
_PIECE = 64 << 20  # bytes that a function of rows makes at once


class Node:
    """How a lazy tensor comes about.

    `read(box, out)` fills `out`, whose shape is `lengths` of the box. With `out` on the
    meta device it goes the same way without data: sources that communicate take part.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Fill `out` with the box; casts to its dtype."""
        raise NotImplementedError

    def whole(self, device: torch.device) -> torch.Tensor:
        """The whole tensor, in this node's dtype."""
        out = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.read(whole_box(self.shape), out)
        return out


class Constant(Node):
    """A tensor that is in memory already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.tensor = tensor

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Copy the box."""
        for place, local in pieces(box):
            block(out, local).copy_(block(self.tensor, place))


class _Joined(Node):
    """Concatenation along a dimension."""

    def __init__(
        self, children: Sequence[Node], dim: int, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        super().__init__(shape, dtype)
        self.children, self.dim = children, dim

    def read(self, box: Box, out: torch.Tensor) -> None:
        start = 0
        for child in self.children:
            # An empty one-dimensional tensor may be joined to anything.
            size = child.shape[self.dim] if len(child.shape) == len(self.shape) else 0
            at, inside = clipped(box[self.dim], start, start + size)
            if inside:
                part = _replaced(box, self.dim, shifted(inside, -start))
                child.read(part, out.narrow(self.dim, at, lengths(part)[self.dim]))
            start += size


class _Stacked(Node):
    """A new dimension with one child per index."""

    def __init__(
        self, children: Sequence[Node], dim: int, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        super().__init__(shape, dtype)
        self.children, self.dim = children, dim

    def read(self, box: Box, out: torch.Tensor) -> None:
        chosen = [i for start, end in box[self.dim] for i in range(start, end)]
        part = box[: self.dim] + box[self.dim + 1 :]
        for at, index in enumerate(chosen):
            self.children[index].read(part, out.select(self.dim, at))


class _Sliced(Node):
    """A range of a dimension; `drop` selects its one index and removes the dimension."""

    def __init__(self, child: Node, dim: int, start: int, size: int, drop: bool = False) -> None:
        shape = list(child.shape)
        shape[dim : dim + 1] = [] if drop else [size]
        super().__init__(shape, child.dtype)
        self.child, self.dim, self.start, self.drop = child, dim, start, drop

    def read(self, box: Box, out: torch.Tensor) -> None:
        if self.drop:
            index = ((self.start, self.start + 1),)
            self.child.read((*box[: self.dim], index, *box[self.dim :]), out.unsqueeze(self.dim))
        else:
            self.child.read(_replaced(box, self.dim, shifted(box[self.dim], self.start)), out)


class _Permuted(Node):
    """The dimensions in another order."""

    def __init__(self, child: Node, dims: Sequence[int]) -> None:
        super().__init__([child.shape[dim] for dim in dims], child.dtype)
        self.child = child
        self.back = sorted(range(len(dims)), key=lambda at: dims[at])

    def read(self, box: Box, out: torch.Tensor) -> None:
        self.child.read(tuple(box[dim] for dim in self.back), out.permute(self.back))


class _Viewed(Node):
    """Other sizes over the same elements; dimensions before and after the change pass through."""

    def __init__(self, child: Node, shape: Sequence[int]) -> None:
        super().__init__(shape, child.dtype)
        self.child = child
        old, new = child.shape, self.shape
        same = min(len(old), len(new))
        self.front = next((i for i in range(same) if old[i] != new[i]), same)
        left = same - self.front
        self.behind = next((i for i in range(left) if old[-1 - i] != new[-1 - i]), left)

    def read(self, box: Box, out: torch.Tensor) -> None:
        end, child_end = len(self.shape) - self.behind, len(self.child.shape) - self.behind
        front, changed, behind = box[: self.front], box[self.front : end], box[end:]
        middle = whole_box(self.child.shape[self.front : child_end])
        if changed == whole_box(self.shape[self.front : end]) and out.is_contiguous():
            part = (*front, *middle, *behind)
            self.child.read(part, out.view(lengths(part)))
            return
        part = (*front, *middle, *behind)
        read = torch.empty(lengths(part), dtype=out.dtype, device=out.device)
        self.child.read(part, read)
        viewed = read.view(*lengths(front), *self.shape[self.front : end], *lengths(behind))
        rest = (*whole_box(lengths(front)), *changed, *whole_box(lengths(behind)))
        Constant(viewed).read(rest, out)


class _Cast(Node):
    """Another dtype."""

    def __init__(self, child: Node, dtype: torch.dtype) -> None:
        super().__init__(child.shape, dtype)
        self.child = child

    def read(self, box: Box, out: torch.Tensor) -> None:
        if out.dtype == self.dtype or self.child.dtype == self.dtype:
            self.child.read(box, out)  # copying casts
            return
        cast = torch.empty(lengths(box), dtype=self.dtype, device=out.device)
        self.child.read(box, cast)
        out.copy_(cast)


class _Computed(Node):
    """One result of any operation, from whole inputs."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        index: int | None,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(shape, dtype)
        self.func, self.args, self.kwargs, self.index = func, args, kwargs, index

    def read(self, box: Box, out: torch.Tensor) -> None:
        def load(tensor: LazyTensor) -> torch.Tensor:
            return tensor.node.whole(out.device)

        args, kwargs = tree_map_only(LazyTensor, load, (self.args, self.kwargs))
        if out.is_meta:
            return
        result = self.func(*args, **kwargs)
        Constant(result if self.index is None else result[self.index]).read(box, out)


class _ByRow(Node):
    """A function that makes each index of the first dimension from the same index of its inputs."""

    def __init__(self, function: Callable[..., torch.Tensor], inputs: Sequence[Node]) -> None:
        none = [torch.empty(0, *node.shape[1:], dtype=node.dtype) for node in inputs]
        made = function(*none)
        super().__init__((inputs[0].shape[0], *made.shape[1:]), made.dtype)
        self.function, self.inputs = function, inputs

    def read(self, box: Box, out: torch.Tensor) -> None:
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(_PIECE // max(row_bytes, 1), 1)
        rest = ((), *box[1:])
        at = 0
        for first, end in box[0]:
            for start in range(first, end, step):
                rows = ((start, min(start + step, end)),)
                count = rows[0][1] - start
                parts = [_rows(node, rows, out.device) for node in self.inputs]
                if not out.is_meta:
                    made = Constant(self.function(*parts))
                    made.read(_replaced(rest, 0, ((0, count),)), out.narrow(0, at, count))
                at += count


def _rows(node: Node, rows: tuple[Interval, ...], device: torch.device) -> torch.Tensor:
    box = (rows, *whole_box(node.shape[1:]))
    part = torch.empty(lengths(box), dtype=node.dtype, device=device)
    node.read(box, part)
    return part


def by_row(function: Callable[..., torch.Tensor], *tensors: LazyTensor) -> LazyTensor:
    """`function(*tensors)` of one that works on each index of the first dimension by itself.

    Reading some rows of the result then reads these rows of the inputs.
    """
    return LazyTensor(_ByRow(function, [tensor.node for tensor in tensors]))


class LazyTensor(torch.Tensor):
    """A tensor whose values are a `Node`'s. Shape and dtype are known; data is not in memory."""

    node: Node

    @staticmethod
    def __new__(cls, node: Node, strides: Sequence[int] | None = None) -> Self:
        """Stand for what `node` makes; strides as a view's would be, None: contiguous."""
        made: Self = make_wrapper_subclass(
            cls, node.shape, strides=strides, dtype=node.dtype, device=torch.device("cpu")
        )
        made.node = node
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Fill `out` with the box, cast to its dtype, on its device."""
        if numel(box):
            self.node.read(box, out)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record the operation; run it only where its result can't be foretold."""
        kwargs = kwargs or {}
        if func in _PASS_ON:
            return _PASS_ON[func](*args, **kwargs)
        if func._schema.is_mutable:
            return _run_now(func, args, kwargs)
        try:
            shapes = tree_map_only(torch.Tensor, _as_meta, (args, kwargs))
            kinds = func(*shapes[0], **{**shapes[1], **_on_meta(shapes[1])})
        except (NotImplementedError, RuntimeError):
            return _run_now(func, args, kwargs)
        if isinstance(kinds, torch.Tensor):
            if func in _VIEWS:
                return LazyTensor(_Viewed(args[0].node, kinds.shape), kinds.stride())
            return _lazily(_Computed(func, args, kwargs, None, kinds.shape, kinds.dtype), kinds)
        if isinstance(kinds, (list, tuple)):
            return [
                _lazily(_Computed(func, args, kwargs, i, kind.shape, kind.dtype), kind)
                for i, kind in enumerate(kinds)
            ]
        return _run_now(func, args, kwargs)


def block(tensor: torch.Tensor, place: Sequence[Interval]) -> torch.Tensor:
    """A view of one contiguous block."""
    for dim, (start, end) in enumerate(place):
        tensor = tensor.narrow(dim, start, end - start)
    return tensor


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a lazy tensor on the CPU; any other tensor as it is."""
    return tensor.node.whole(torch.device("cpu")) if isinstance(tensor, LazyTensor) else tensor


def _run_now(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(LazyTensor, materialize, (args, kwargs))
    return func(*args, **kwargs)


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": "meta"} if kwargs.get("device") is not None else {}


def _lazily(node: Node, kind: torch.Tensor) -> LazyTensor:
    return LazyTensor(node, kind.stride())


def _replaced(box: Box, dim: int, intervals: tuple[Interval, ...]) -> Box:
    return (*box[:dim], intervals, *box[dim + 1 :])


def _node(tensor: torch.Tensor) -> Node:
    return tensor.node if isinstance(tensor, LazyTensor) else Constant(tensor)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyTensor:
    kind = torch.stack([_as_meta(tensor) for tensor in tensors], dim)
    return LazyTensor(
        _Stacked([_node(t) for t in tensors], dim % kind.ndim, kind.shape, kind.dtype)
    )


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyTensor:
    kind = torch.cat([_as_meta(tensor) for tensor in tensors], dim)
    return LazyTensor(_Joined([_node(t) for t in tensors], dim % kind.ndim, kind.shape, kind.dtype))


def _slice(
    tensor: LazyTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> LazyTensor:
    dim %= tensor.ndim
    first, last, step = slice(start, end, step).indices(tensor.shape[dim])
    if step != 1:
        picked = [_select(tensor, dim, index) for index in range(first, last, step)]
        return _stack(picked, dim)
    sliced = _Sliced(tensor.node, dim, first, max(last - first, 0))
    return LazyTensor(sliced, tensor.stride())


def _select(tensor: LazyTensor, dim: int, index: int) -> LazyTensor:
    dim %= tensor.ndim
    index %= tensor.shape[dim]
    strides = [stride for at, stride in enumerate(tensor.stride()) if at != dim]
    return LazyTensor(_Sliced(tensor.node, dim, index, 1, drop=True), strides)


def _split(tensor: LazyTensor, size: int | Sequence[int], dim: int = 0) -> list[LazyTensor]:
    dim %= tensor.ndim
    total = tensor.shape[dim]
    sizes = [size] * -(-total // size) if isinstance(size, int) else list(size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        _slice(tensor, dim, start, start + each) for start, each in zip(starts, sizes, strict=True)
    ]


def _unbind(tensor: LazyTensor, dim: int = 0) -> list[LazyTensor]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _permute(tensor: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    dims = [dim % tensor.ndim for dim in dims]
    return LazyTensor(_Permuted(tensor.node, dims), [tensor.stride(dim) for dim in dims])


def _transpose(tensor: LazyTensor, first: int = 0, second: int = 1) -> LazyTensor:
    dims = list(range(tensor.ndim))
    dims[first], dims[second] = dims[second], dims[first]
    return _permute(tensor, dims)


def _squeeze(tensor: LazyTensor, dim: int | Sequence[int] | None = None) -> LazyTensor:
    dims = range(tensor.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    for at in sorted((d % tensor.ndim for d in dims), reverse=True):
        if tensor.shape[at] == 1:
            tensor = _select(tensor, at, 0)
    return tensor


def _unsqueeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    return _stack([tensor], dim)


def _clone(tensor: LazyTensor, **_: Any) -> LazyTensor:
    return LazyTensor(tensor.node)


def _same(tensor: LazyTensor, *_: Any, **__: Any) -> LazyTensor:
    return LazyTensor(tensor.node, tensor.stride())


def _to_copy(tensor: LazyTensor, *, dtype: torch.dtype | None = None, **_: Any) -> LazyTensor:
    node = tensor.node if dtype in (None, tensor.dtype) else _Cast(tensor.node, dtype)
    return LazyTensor(node, tensor.stride())


_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_PASS_ON: dict[Any, Callable[..., Any]] = {
    aten.stack.default: _stack,
    aten.cat.default: _cat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.clone.default: _clone,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh.default: _same,
    aten._to_copy.default: _to_copy,
}
