"""The experts of ep-kernels, by every backend, and the operators of `torch.ops.ep`, against float64.

E = experts, H = hidden size, R = rows, K = slots of a row.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

import ep_kernels
from ep_kernels import ExpertsSpec, choose_backend, module_experts_forward

from . import Case, Found, Place, Skip, at_most, check, worst

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/ep-kernels/tests"))
import kernels_reference as plain

EXPERTS, ROWS, SLOTS = 8, 50, 3
# The first ones every backend takes, the others not all.
SIZES = {"": (64, 128), ", odd sizes": (30, 22)}
TORCH_BACKENDS = ("grouped_mm", "loop")


def backends() -> list[str]:
    """`auto`, and the name of each way to multiply that ep-kernels knows."""
    return ["auto", *get_args(ep_kernels.grouped.Backend)]


def need_backend(module: nn.Module, backend: Any) -> None:
    """Raise a `Skip` with a backend's own words if it can't compute these experts where they are."""
    spec = ExpertsSpec.from_module(module)
    assert spec is not None
    weights = spec.read_weights(module)
    sizes = *weights.up.shape[1:], *weights.down.shape[1:]
    try:
        choose_backend(weights.up.device, weights.up.dtype, *sizes, backend=backend)
    except ValueError as refusal:
        raise Skip(str(refusal)) from refusal


@check
def experts(place: Place) -> Iterator[Case]:
    """Every kind of experts by every backend: output and all gradients, in each dtype and form."""
    for backend in backends():
        for kind in plain.KINDS:
            for odd, sizes in SIZES.items():
                if not odd or kind in ("gated", "gpt-oss"):
                    run = functools.partial(_kind, place, backend, kind, sizes)
                    yield f"{backend}, {kind}{odd}", run


def _kind(place: Place, backend: str, kind: str, sizes: tuple[int, int]) -> Found:
    """The largest error as a share of its dtype's bound."""
    dtypes = (torch.bfloat16,) if place.dry else tuple(plain.BOUNDS)
    errors: list[float] = []
    computed, refusal = [], ""
    for dtype in dtypes:
        try:
            errors += [
                error
                for recompute in ("none", "gate_up")
                for grouped in (False, True)
                for error in _errors(place, backend, kind, sizes, dtype, recompute, grouped)
            ]
        except Skip as reason:
            refusal = str(reason)
            continue
        computed.append(str(dtype).removeprefix("torch."))
    if not computed:
        raise Skip(refusal)
    return at_most(worst(errors), 1.0, "of the dtype's bound", dtypes=computed)


def _errors(
    place: Place,
    backend: Any,
    kind: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    recompute: Any,
    grouped: bool,
) -> Iterator[float]:
    module, rows, ids, weights, expected, expected_grads = _expected(kind, sizes, dtype)
    here = _copy(module, kind, sizes, dtype).to(place.device)
    rows, ids, weights = (x.to(place.device) for x in (rows, ids, weights))
    need_backend(here, backend)
    forward = module_experts_forward(here, recompute=recompute, backend=backend)
    if grouped:
        order = ids.reshape(-1).argsort(stable=True)[: int((ids < EXPERTS).sum())]
        offsets = torch.searchsorted(
            ids.reshape(-1)[order], torch.arange(EXPERTS, device=ids.device), right=True
        )
        flat = weights.reshape(-1)[order]
        out, grads = plain.gradients(
            forward.grouped, here, rows, order // SLOTS, flat, offsets.int()
        )
        by_slot = torch.zeros(weights.numel(), dtype=flat.dtype, device=ids.device)
        grads["weights"] = by_slot.index_copy(0, order, grads["weights"]).view_as(weights)
    else:
        out, grads = plain.gradients(forward, here, rows, ids, weights)
    # The cotangent hardly varies within a row: a norm's gradient subtracts nearly all of it.
    bound = plain.BOUNDS[dtype] * (4 if kind == "post norm" else 1)
    yield plain.error(out.cpu(), expected) / bound
    for name, grad in grads.items():
        yield plain.error(grad.cpu(), expected_grads[name]) / (3 * bound)


@functools.cache
def _expected(kind: str, sizes: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    """Experts, inputs (an expert without rows, skipped and repeated slots), output and gradients."""
    torch.manual_seed(0)
    module = plain.Experts(EXPERTS, *sizes, dtype=dtype, **plain.KINDS[kind])
    rows = torch.randn(ROWS, sizes[0], dtype=torch.float64).to(dtype)
    ids = torch.randint(0, EXPERTS + 1, (ROWS, SLOTS))
    ids[ids == 3] = EXPERTS
    ids[:5] = EXPERTS
    ids[5:8] = 1
    weights = torch.rand(ROWS, SLOTS).to(torch.promote_types(dtype, torch.float32))
    twin = plain.as_float64(module)
    out, grads = plain.plain_gradients(plain.reference, twin, rows, ids, weights)
    return module, rows, ids, weights, out, grads


def _copy(module: Any, kind: str, sizes: tuple[int, int], dtype: torch.dtype) -> Any:
    copy = plain.Experts(EXPERTS, *sizes, dtype=dtype, **plain.KINDS[kind])
    copy.load_state_dict(module.state_dict())
    return copy


_COLLECTIVES = ("ep::all_gather", "ep::all_reduce", "ep::reduce_scatter")
"""Calls of torch.distributed that compiled code makes: nothing of ours computes there."""


@check
def operators(place: Place) -> Iterator[Case]:
    """Every operator of `torch.ops.ep` on this device, and its gradient, against float64 on the CPU."""
    import ep_dispatch

    assert ep_dispatch  # which defines them
    known = {"ep::gather_rows": _gather, "ep::sum_rows": _sum}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("ep::"):
            operator = name.partition(".")[0]
            if operator in _COLLECTIVES:
                continue
            if operator not in known:
                yield name, functools.partial(_unknown, name)
                continue
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
                yield (
                    f"{name}, {str(dtype).removeprefix('torch.')}",
                    functools.partial(_operator, place, operator, known[operator], dtype),
                )


def _unknown(name: str) -> Found:
    raise AssertionError(f"no check knows {name}: add one to tools/gpu_checks/experts.py")


def _gather(x: Tensor, index: Tensor, tokens: int) -> Tensor:
    return x[index]


def _sum(rows: Tensor, index: Tensor, tokens: int) -> Tensor:
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, index, rows)


def _operator(
    place: Place, name: str, definition: Callable[..., Tensor], dtype: torch.dtype
) -> Found:
    from ep_dispatch.routing import transpose_index

    operator = getattr(torch.ops.ep, name.removeprefix("ep::"))
    errors = []
    for tokens, rows, width in ((9, 40, 8), (1, 300, 2048), (50, 7, 3), (4, 0, 16), (33, 70, 1)):
        generator = torch.Generator().manual_seed(rows)
        index = torch.randint(0, tokens, (rows,), generator=generator)
        size = rows if definition is _sum else tokens
        x = torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)
        exact = x.double().requires_grad_()
        expected = definition(exact, index, tokens)
        cotangent = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(dtype)
        expected.backward(cotangent.double())
        there = x.to(place.device).requires_grad_()
        both = (i.to(place.device) for i in (index, *transpose_index(index, tokens)))
        out = operator(there, *both)
        out.backward(cotangent.to(place.device))
        for one, other in ((out, expected), (there.grad, exact.grad)):
            assert one is not None
            assert other is not None
            assert one.dtype == dtype
            errors.append(plain.error(one.cpu(), other))
    return at_most(worst(errors), 4 * torch.finfo(dtype).eps, "relative error")
