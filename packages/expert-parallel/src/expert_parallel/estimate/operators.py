"""What one operator costs: FLOPs, bytes of device memory, kernels.

Bytes are what it reads and writes once each; that a cache may hold some of it is not counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = Sequence[Any]

_FREE = frozenset(
    (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "resize_",
        "set_",
        "lift_fresh",
        "is_same_size",
        "_local_scalar_dense",
        "_has_same_storage_numel",
    )
)
"""Operators that launch nothing."""

_TAKES = frozenset(
    ("index_select", "embedding", "index", "gather", "gather_rows", "nll_loss_forward")
)
"""Operators that read of their first argument as much as they write."""

_KERNELS = {
    "sort": 4,
    "topk": 2,
    "nonzero": 3,
    "nll_loss_backward": 2,
    "embedding_dense_backward": 6,
    "index_put_": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
    "_scaled_dot_product_fused_attention_overrideable_backward": 3,
}
"""Those of CUDA where it is more than one."""

_LISTS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_ELEMENTS = 320 * 65536
"""What one launch of a multi-tensor kernel takes: tensors by the number of lists, and elements."""


@dataclass(frozen=True)
class Cost:
    """Of one operator.

    Attributes:
        flops: of matrix products and attention.
        moved: bytes.
        kernels: launches.
        dtype: of the products.
    """

    flops: float
    moved: float
    kernels: int
    dtype: torch.dtype


FREE = Cost(0.0, 0.0, 0, torch.float32)


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results, in lists and tuples too."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_of(value)


def cost_of(func: Any, args: Arguments, kwargs: dict[str, Any], result: Any) -> Cost:
    """What an operator costs, by its shapes."""
    name = func.overloadpacket.__name__
    if name in _FREE or func.namespace == "prim" or _is_view(func):
        return FREE
    inputs, outputs = list(tensors_of(args)), list(tensors_of(result))
    if not outputs and not inputs:
        return FREE
    dtype = (outputs or inputs)[0].dtype
    written = sum(x.nbytes for x in outputs)
    read = sum(x.nbytes for x in inputs)
    if name in _TAKES and inputs:
        read += written - inputs[0].nbytes
    elif name == "nll_loss_backward":  # of the log-probabilities it needs the shape alone
        read -= inputs[1].nbytes
    elif name == "copy_":
        read -= inputs[0].nbytes
    elif name == "all_gather_copy_in":  # into its part of the whole buffer
        read = written = sum(x.nbytes for x in tensors_of(args[0]))
    if name.startswith(("_foreach", "_fused")):
        return Cost(0.0, _moved_by_list(args, outputs), _list_kernels(args), dtype)
    count = _FLOPS.get(name)
    flops = count(args, kwargs, outputs) if count is not None else 0.0
    return Cost(flops, float(read + written), _KERNELS.get(name, 1), dtype)


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether the result shares the memory of an argument, which is not written."""
    infos = [value.alias_info for value in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _moved_by_list(args: Arguments, outputs: Sequence[Tensor]) -> float:
    """A fused optimizer reads four lists and writes three; the gradient is not written."""
    lists = [list(tensors_of(a)) for a in args if isinstance(a, (list, tuple))]
    read = sum(x.nbytes for one in lists for x in one)
    written = sum(x.nbytes for x in outputs)
    if not outputs:  # in place
        written = sum(x.nbytes for position, one in enumerate(lists) for x in one if position != 1)
    return float(read + written)


def _list_kernels(args: Arguments) -> int:
    lists = [list(tensors_of(a)) for a in args if isinstance(a, (list, tuple))]
    lists = [one for one in lists if one]
    if not lists:
        return 1
    tensors, elements = len(lists[0]), sum(x.numel() for x in lists[0])
    depth = min(len(lists), max(_LISTS))
    return max(-(-tensors // _LISTS[depth]), -(-elements // _ELEMENTS), 1)


def _mm(args: Arguments, kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> float:
    return float(2 * outputs[0].numel() * args[0].shape[-1])


def _addmm(args: Arguments, kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> float:
    return float(2 * outputs[0].numel() * args[1].shape[-1])


def _grouped_mm(args: Arguments, kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> float:
    left, right = args[0], args[1]
    if right.dim() == 3:  # rows times matrices
        return float(2 * left.shape[0] * left.shape[1] * right.shape[2])
    return float(2 * left.shape[0] * left.shape[1] * right.shape[1])  # rows with rows


def _attention(args: Arguments, kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> float:
    query, key, value = args[:3]
    causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
    return _products(query, key, 2 * (query.shape[-1] + value.shape[-1]), causal)


def _attention_backward(
    args: Arguments, kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> float:
    query, key, value = args[1:4]
    causal = args[7] if len(args) > 7 else kwargs.get("is_causal", False)
    return 2.5 * _products(query, key, 2 * (query.shape[-1] + value.shape[-1]), causal)


def _products(query: Tensor, key: Tensor, each: int, causal: bool) -> float:
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return float(each * pairs) / (2 if causal else 1)


_FLOPS: dict[str, Callable[[Arguments, dict[str, Any], Sequence[Tensor]], float]] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "_grouped_mm": _grouped_mm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
