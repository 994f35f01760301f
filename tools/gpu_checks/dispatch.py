"""Every registered implementation of ep-dispatch, on one rank and on several that share the GPU.

NCCL refuses two ranks on one device, so several ranks are a gloo group, which moves CUDA tensors by way
of the host; symmetric memory may overlap on one device if told so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ep_dispatch.testing
from ep_dispatch import EPImplementation, EPImplementationInterface
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
# Of one rounding of rows, outputs and gradients each.
WIRE_BOUNDS = {torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}
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
    _laws(name, {}, str(place.device), workloads, laws, False)
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


@contextlib.contextmanager
def _ranks() -> Iterator[RankPool]:
    """Ranks that share the GPU."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # before the ranks' server starts
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()


@check
def many_ranks(place: Place) -> Iterator[Case]:
    """The same laws on 2 and 4 ranks, of own batches and of one batch; chunks, rounds, wire dtypes."""
    workloads = ("skipped",) if place.dry else ("ragged", "hot_rank", "no_tokens", "skipped")
    laws = ("output", "gradients") if place.dry else ("output", "gradients", "poisoned_memory")
    worlds = (2,) if place.dry else (2, 4)
    with _ranks() as pool:
        for world in worlds:
            for name in EPImplementationInterface.names():
                for shared in (False, True):
                    needs = EPImplementationInterface.get(name).needs_shared_batch
                    if shared or not needs:
                        batch = "one batch" if shared else "own batches"
                        args = (name, {}, str(place.device), workloads, laws, shared)
                        yield (
                            f"{name}, {world} ranks, {batch}",
                            functools.partial(_many, pool, world, args),
                        )
        world = worlds[-1]
        for setting in ({"num_chunks": 3}, {"max_rows": world}):
            args = ("all_to_all", setting, str(place.device), workloads, laws, False)
            told = ", ".join(f"{key}={value}" for key, value in setting.items())
            yield (
                f"all_to_all, {world} ranks, {told}",
                functools.partial(_many, pool, world, args),
            )
        for wire, bound in WIRE_BOUNDS.items():
            dtype = str(wire).removeprefix("torch.")
            yield (
                f"all_to_all, {world} ranks, wire_dtype={dtype}",
                functools.partial(_wire, pool, world, str(place.device), wire, bound),
            )


def _many(pool: RankPool, world: int, args: tuple[Any, ...]) -> Found:
    (reason, *_) = _on_ranks(pool, world, _skip_reason, *args)
    if reason is not None:
        raise Skip(reason)
    return Found(True, len(args[3]) * len(args[4]), "laws times workloads")


def _on_ranks(pool: RankPool, world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What each rank gives back; a `Skip` if gloo has no such exchange for the device."""
    try:
        return pool.run(work, *args, world=world, timeout=60)
    except RankError as error:
        told = str(error).lower()
        if "gloo" in told and any(text in told for text in GLOO_LACKS):
            raise Skip(f"gloo: {str(error).strip().splitlines()[-1]}") from error
        raise


def _alone(work: Callable[..., Any], *args: Any) -> list[Any]:
    """As `_on_ranks`, in this process."""
    return [work(0, *args)]


def _wire(pool: RankPool, world: int, device: str, wire: torch.dtype, bound: float) -> Found:
    errors = _on_ranks(pool, world, _wire_error, device, wire)
    return at_most(worst(errors), bound, "relative error")


def _wire_error(rank: int, device: str, wire: torch.dtype) -> float:
    """Of the output and of the gradient of the hidden states, in float32."""
    layer, twin, (hidden, ids, weights) = _share(
        rank, device, "all_to_all", torch.float32, 16, wire_dtype=wire
    )
    x = hidden.requires_grad_()
    out = layer(x, ids, weights)
    exact = hidden.detach().cpu().double().requires_grad_()
    expected = plain.reference(twin, exact, ids.cpu(), weights.cpu().double())
    cotangent = torch.randn_like(expected)
    out.backward(cotangent.to(out))
    expected.backward(cotangent)
    assert x.grad is not None
    assert exact.grad is not None
    return worst([plain.error(out.cpu(), expected), plain.error(x.grad.cpu(), exact.grad)])


def _share(
    rank: int, device: str, name: str, dtype: torch.dtype, tokens: int, **settings: Any
) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """A layer of this rank's share of real experts, all of them in float64, and inputs of this rank."""
    if device != "cpu":
        torch.cuda.set_device(0)
    torch.manual_seed(0)
    whole = plain.Experts(EXPERTS, 64, 48, dtype=dtype)
    group = dist.group.WORLD if dist.is_initialized() else None
    local = EXPERTS // (1 if group is None else dist.get_world_size())
    mine = plain.Experts(local, 64, 48, dtype=dtype)
    mine.load_state_dict(
        {key: value[rank * local :][:local] for key, value in whole.state_dict().items()}
    )
    mine.to(device)
    layer = build(
        name,
        module_experts_forward(mine),
        num_local_experts=local,
        ep_group=group,
        experts=mine,
        **settings,
    )
    torch.manual_seed(1 + rank)
    hidden = torch.randn(tokens, 64).to(dtype)
    ids, weights = torch.randint(0, EXPERTS, (tokens, 3)), torch.rand(tokens, 3)
    given = tuple(x.to(device) for x in (hidden, ids, weights))
    return layer, plain.as_float64(whole), given


def _skip_reason(
    rank: int, name: str, settings: dict[str, Any], device: str, *args: Any
) -> str | None:
    if device != "cpu":
        torch.cuda.set_device(0)
    try:
        _laws(name, settings, device, *args)
    except Skip as reason:
        return str(reason)
    return None


def _laws(
    name: str,
    settings: dict[str, Any],
    device: str,
    workloads: tuple[str, ...],
    laws: tuple[str, ...],
    shared: bool,
) -> None:
    group = dist.group.WORLD if dist.is_initialized() else None

    def factory(experts_forward: Any, **more: Any) -> EPImplementation:
        return build(name, experts_forward, **settings, **more)

    for workload in workloads:
        ep_dispatch.testing.check(
            factory, workload, laws, ep_group=group, tp_group=group if shared else None, device=device
        )  # fmt: skip


@check
def decoding_in_a_cuda_graph(place: Place) -> Iterator[Case]:
    """Steps captured once and replayed with other tokens and routings, against float64."""
    for name in ("all_reduce", "auto"):
        for tokens in (1, 16):
            alone = functools.partial(_alone, _replay_error, str(place.device), name, tokens)
            yield f"{name}, {tokens} tokens", functools.partial(_captured, place, alone)
    with _ranks() as pool:
        args = (str(place.device), "symmetric_memory", 4)
        many = functools.partial(_on_ranks, pool, 2, _replay_error, *args)
        yield "symmetric_memory, 2 ranks", functools.partial(_captured, place, many)


def _captured(place: Place, errors: Callable[[], Iterable[float]]) -> Found:
    place.need_cuda()
    return at_most(worst(errors()), plain.BOUNDS[torch.bfloat16], "relative error")


def _replay_error(rank: int, device: str, name: str, tokens: int) -> float:
    """The largest of three replays."""
    settings = {"max_tokens": tokens} if name == "symmetric_memory" else {}
    layer, twin, given = _share(rank, device, name, torch.bfloat16, tokens, **settings)
    errors = []
    with torch.no_grad():
        replay = _capture(layer, given)
        for _ in range(3):
            hidden, ids, weights = given
            hidden.normal_()
            ids.random_(0, EXPERTS)
            weights.uniform_()
            expected = plain.reference(
                twin, hidden.cpu().double(), ids.cpu(), weights.cpu().double()
            )
            errors.append(plain.error(replay().cpu(), expected))
    return worst(errors)


def _capture(layer: Any, given: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """A step as a CUDA graph: a function that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*given)

    def replay() -> Tensor:
        graph.replay()
        return out  # type: ignore[no-any-return]

    return replay


@check
def host_waits(place: Place) -> Iterator[Case]:
    """How often torch sees the host wait for the device, in what must not.

    `all_to_all` waits once, for an event, which is not counted here.
    """
    for name, grad in (("all_reduce", False), ("all_to_all", False), ("all_to_all", True)):
        alone = functools.partial(_alone, _waits, str(place.device), name, grad)
        yield f"{name}, {_what(grad)}", functools.partial(_most_waits, place, alone)
    with _ranks() as pool:
        for grad in (False, True):
            args = (str(place.device), "symmetric_memory", grad)
            many = functools.partial(_on_ranks, pool, 2, _waits, *args)
            yield (
                f"symmetric_memory, 2 ranks, {_what(grad)}",
                functools.partial(_most_waits, place, many),
            )


def _what(grad: bool) -> str:
    return "forward and backward" if grad else "without gradients"


def _most_waits(place: Place, waits: Callable[[], Iterable[float]]) -> Found:
    place.need_cuda()
    return at_most(worst(waits()), 0, "host synchronizations")


def _waits(rank: int, device: str, name: str, grad: bool) -> int:
    settings = {"max_tokens": 16} if name == "symmetric_memory" else {}
    layer, _, (hidden, ids, weights) = _share(rank, device, name, torch.bfloat16, 16, **settings)
    x, w = hidden.requires_grad_(grad), weights.requires_grad_(grad)

    def step() -> None:
        with torch.set_grad_enabled(grad):
            out = layer(x, ids, w)
            if grad:
                out.backward(torch.ones_like(out))

    return len(_warned(step))


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
