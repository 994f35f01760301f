"""Every registered implementation of ep-dispatch, on one rank and on several that share the GPU.

NCCL refuses two ranks on one device, so several ranks are a gloo group, which moves CUDA tensors by way
of the host; symmetric memory may overlap on one device if told so.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatch.testing
from ep_dispatch import AllReduce, AllToAll, EPImplementation, EPImplementationInterface
from ep_kernels import module_experts_forward
from ep_testing import RankPool
from ep_testing.pool import RankError

from . import Case, Found, Place, Skip, at_most, check, worst
from .experts import EXPERTS, plain

# These must run everywhere; what others raise for a place when they are built is the reason of a skip.
MUST = {"all_to_all", "all_reduce", "auto", "all_to_all_hierarchical"}
WORKLOADS = ("ragged", "hot_rank", "no_tokens", "skipped", "repeated", "one_token")
# Not "deterministic": the kit's own experts add with atomics on CUDA.
LAWS = ("output", "gradients", "idle_experts", "poisoned_memory", "in_flight")
GLOO_LACKS = (
    "unsupported device",
    "does not support",
    "no backend type associated",
    "not implemented for",
)


def build(name: str, experts_forward: Any, **settings: Any) -> EPImplementation:
    """An implementation by its name; `Skip` with its own words if it refuses this place."""
    cls = EPImplementationInterface.get(name)
    group = settings.get("ep_group")
    if "ranks_per_node" in inspect.signature(cls.__init__).parameters:
        settings["ranks_per_node"] = 1 if group is None else dist.get_world_size(group) // 2
    try:
        return cls(experts_forward, **settings)
    except (ImportError, ValueError) as error:
        if name in MUST:
            raise
        raise Skip(f"{type(error).__name__}: {error}") from error


@check
def one_rank(place: Place) -> Iterator[Case]:
    """The conformance kit's laws, and real experts in bfloat16 against float64."""
    for name in EPImplementationInterface.names():
        yield f"{name}, laws", functools.partial(_laws_alone, place, name)
        yield f"{name}, experts", functools.partial(_experts, place, name)


def _laws_alone(place: Place, name: str) -> Found:
    workloads = ("skipped",) if place.dry else WORKLOADS
    laws = ("output", "gradients") if place.dry else LAWS
    _laws(0, name, str(place.device), workloads, laws, False)
    return Found(True, len(workloads) * len(laws), "laws times workloads")


def _experts(place: Place, name: str) -> Found:
    torch.manual_seed(0)
    dtype = torch.bfloat16
    module = plain.Experts(EXPERTS, 64, 48, dtype=dtype)
    twin = plain.as_float64(module)
    x = torch.randn(40, 64, dtype=torch.float64).to(dtype)
    ids, weights = torch.randint(0, EXPERTS, (40, 3)), torch.rand(40, 3)
    expected, grads = plain.plain_gradients(plain.reference, twin, x, ids, weights)
    module.to(place.device)
    layer = build(name, module_experts_forward(module), num_local_experts=EXPERTS, experts=module)
    given = (a.to(place.device) for a in (x, ids, weights))
    out, found = plain.gradients(layer, module, *given)
    errors = [plain.error(out.cpu(), expected)]
    errors += [plain.error(grad.cpu(), grads[key]) for key, grad in found.items()]
    return at_most(worst(errors), 3 * plain.BOUNDS[dtype], "relative error")


@check
def many_ranks(place: Place) -> Iterator[Case]:
    """The same laws on 2 and 4 ranks, of batches of their own and of one batch."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # before the ranks' server starts
    workloads = ("skipped",) if place.dry else ("ragged", "hot_rank", "no_tokens", "skipped")
    laws = ("output", "gradients") if place.dry else ("output", "gradients", "poisoned_memory")
    pool = RankPool()
    try:
        for world in (2,) if place.dry else (2, 4):
            for name in EPImplementationInterface.names():
                for shared in (False, True):
                    needs = EPImplementationInterface.get(name).needs_shared_batch
                    if shared or not needs:
                        batch = "one batch" if shared else "own batches"
                        args = (name, str(place.device), workloads, laws, shared)
                        yield (
                            f"{name}, {world} ranks, {batch}",
                            functools.partial(_many, pool, world, args),
                        )
    finally:
        pool.close()


def _many(pool: RankPool, world: int, args: tuple[Any, ...]) -> Found:
    try:
        reasons = pool.run(_skip_reason, *args, world=world, timeout=60)
    except RankError as error:
        told = str(error).lower()
        if "gloo" in told and any(text in told for text in GLOO_LACKS):
            raise Skip(f"gloo: {str(error).strip().splitlines()[-1]}") from error
        raise
    if reasons[0] is not None:
        raise Skip(reasons[0])
    return Found(True, len(args[2]) * len(args[3]), "laws times workloads")


def _skip_reason(rank: int, name: str, device: str, *args: Any) -> str | None:
    if device != "cpu":
        torch.cuda.set_device(0)
    try:
        _laws(rank, name, device, *args)
    except Skip as reason:
        return str(reason)
    return None


def _laws(
    rank: int,
    name: str,
    device: str,
    workloads: tuple[str, ...],
    laws: tuple[str, ...],
    shared: bool,
) -> None:
    group = dist.group.WORLD if dist.is_initialized() else None

    def factory(experts_forward: Any, **settings: Any) -> EPImplementation:
        return build(name, experts_forward, **settings)

    for workload in workloads:
        ep_dispatch.testing.check(
            factory, workload, laws, ep_group=group, tp_group=group if shared else None, device=device
        )  # fmt: skip


def _layer(
    place: Place, cls: type[EPImplementation], tokens: int
) -> tuple[Any, tuple[Tensor, ...]]:
    """A layer of real experts on one rank, and inputs for it."""
    torch.manual_seed(0)
    module = plain.Experts(EXPERTS, 64, 48, dtype=torch.bfloat16).to(place.device)
    layer = cls(module_experts_forward(module), num_local_experts=EXPERTS, experts=module)
    hidden = torch.randn(tokens, 64, device=place.device).to(torch.bfloat16)
    ids = torch.randint(0, EXPERTS, (tokens, 3), device=place.device)
    return layer, (hidden, ids, torch.rand(tokens, 3, device=place.device))


@check
def decoding_in_a_cuda_graph(place: Place) -> Iterator[Case]:
    """A step of `all_reduce` and of `auto`, captured once, replayed with other tokens and routings."""
    for name in ("all_reduce", "auto"):
        for tokens in (1, 16):
            yield f"{name}, {tokens} tokens", functools.partial(_captured, place, name, tokens)


def _captured(place: Place, name: str, tokens: int) -> Found:
    place.need_cuda()
    layer, given = _layer(place, EPImplementationInterface.get(name), tokens)
    differences = []
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(*given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(*given)
        for _ in range(3):
            hidden, ids, weights = given
            hidden.normal_()
            ids.random_(0, EXPERTS)
            weights.uniform_()
            graph.replay()
            replayed = out.clone()
            differences.append(float((replayed - layer(*given)).abs().max()))
    return at_most(worst(differences), 0.0, "absolute difference")


@check
def host_waits(place: Place) -> Iterator[Case]:
    """How often torch sees the host wait for the device, in what must not.

    `all_to_all` waits once, for an event, which is not counted here.
    """
    yield "all_reduce, decoding", functools.partial(_waits, place, AllReduce, False)
    yield "all_to_all, without gradients", functools.partial(_waits, place, AllToAll, False)
    yield "all_to_all, forward and backward", functools.partial(_waits, place, AllToAll, True)


def _waits(place: Place, cls: type[EPImplementation], grad: bool) -> Found:
    place.need_cuda()
    layer, (hidden, ids, weights) = _layer(place, cls, 16)
    x, w = hidden.requires_grad_(grad), weights.requires_grad_(grad)

    def step() -> None:
        with torch.set_grad_enabled(grad):
            out = layer(x, ids, w)
            if grad:
                out.backward(torch.ones_like(out))

    return at_most(len(_warned(step)), 0, "host synchronizations")


def _warned(work: Callable[[], None]) -> list[str]:
    work()  # what is made at the first call
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(one.message) for one in seen if "synchroniz" in str(one.message)]
