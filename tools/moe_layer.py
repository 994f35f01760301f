"""One MoE layer, ours beside that of transformers: the same weights, inputs and ranks, in turns.

T = tokens of a rank, H = hidden size, I = intermediate size, K = experts per token, E = experts of a
layer, S = slots that a rank's experts get.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 8
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a layer and of what each rank gives it."""

    hidden: int = 1024
    intermediate: int = 384
    experts: int = 64
    top_k: int = 8
    tokens: int = 256
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"T={self.tokens} a rank, H={self.hidden}, I={self.intermediate}, "
            f"top-{self.top_k} of {self.experts}, {dtype}"
        )


SMALL = Sizes()
QWEN3_30B = Sizes(hidden=2048, intermediate=768, experts=128, tokens=64, dtype=torch.bfloat16)


def experts_module(sizes: Sizes, ep: int) -> nn.Module:
    """Qwen3-MoE's experts, those of one rank, with transformers' grouped_mm."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_experts=sizes.experts // ep,
        num_experts_per_tok=sizes.top_k,
    )
    config._experts_implementation = "grouped_mm"
    experts = Qwen3MoeExperts(config).to(sizes.dtype)
    experts._is_expert_parallel = True
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    return experts


@functools.lru_cache
def meshes(ep: int) -> tuple[Any, Any]:
    """The EP groups of consecutive ranks, and a TP group of one, as transformers takes them."""
    from torch.distributed.device_mesh import init_device_mesh

    whole = init_device_mesh("cpu", (RANKS // ep, ep), mesh_dim_names=("copies", "ep"))
    single = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp"))
    return whole["ep"], single["tp"]


def build(sizes: Sizes, ep: int, recompute: str = "none") -> tuple[nn.Module, Layer, Layer]:
    """The experts of this rank, transformers' `all_to_all` over them, and ours."""
    from transformers.distributed.expert_parallel import AllToAllEP

    from ep_dispatch import AllToAll
    from ep_kernels import module_experts_forward

    experts = experts_module(sizes, ep)
    ep_mesh, tp_mesh = meshes(ep)
    more = {} if recompute == "none" else {"recompute": recompute}
    ours = AllToAll(
        module_experts_forward(experts, **more),
        num_local_experts=sizes.experts // ep,
        ep_group=ep_mesh.get_group(),
        experts=experts,
    )
    return experts, AllToAllEP(experts, ep_mesh, tp_mesh), ours


def inputs(rank: int, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, ids and weights of a uniform routing, and the output's gradient."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(sizes.tokens, sizes.hidden, generator=generator).to(sizes.dtype)
    scores = torch.randn(sizes.tokens, sizes.experts, generator=generator)
    weights, ids = scores.softmax(-1).topk(sizes.top_k)
    weights = (weights / weights.sum(-1, keepdim=True)).to(sizes.dtype)
    cotangent = torch.randn(sizes.tokens, sizes.hidden, generator=generator).to(sizes.dtype)
    return hidden.requires_grad_(), ids, weights.requires_grad_(), cotangent


def step(experts: nn.Module, layer: Layer, given: tuple[Tensor, ...]) -> None:
    """Forward and backward."""
    hidden, ids, weights, cotangent = given
    for x in (hidden, weights, *experts.parameters()):
        x.grad = None
    layer(hidden, ids, weights).backward(cotangent)


def timed(rank: int, work: list[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of each piece of work, all ranks together, in turns; the medians."""
    found: list[list[float]] = [[] for _ in work]
    for repeat in range(repeats + 1):
        for one, times in zip(work, found, strict=True):
            dist.barrier()
            start = time.perf_counter()
            one()
            dist.barrier()
            if repeat:
                times.append(time.perf_counter() - start)
    return [median(times) for times in found]


def layer_times(rank: int, sizes: Sizes, ep: int, repeats: int = 7) -> list[float]:
    """Seconds of transformers' layer, of ours, and of the grouped GEMMs alone on the same slots."""
    experts, native, ours = build(sizes, ep)
    given = inputs(rank, sizes)
    plan = ours.prepare(*given[1:3])
    work = [
        lambda: step(experts, native, given),
        lambda: step(experts, ours, given),
        gemms(sizes, plan.hops[-1].offsets),
    ]
    return timed(rank, work, repeats)


class NoExperts:
    """Experts that compute next to nothing."""

    def __call__(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As transformers calls experts: a row per slot."""
        return rows.clone()

    def grouped(
        self, rows: Tensor, row_of_slot: Tensor, weights: Tensor, offsets: Tensor
    ) -> Tensor:
        """As ours calls them: each row once, times the sum of its slots' weights."""
        scale = rows.new_zeros(rows.shape[0]).index_add(0, row_of_slot, weights)
        return rows * scale[:, None]


def dispatch_times(rank: int, sizes: Sizes, ep: int, repeats: int = 7) -> list[float]:
    """Seconds of transformers' dispatch and combine, and of ours, forward and backward, with no experts."""
    experts, *layers = build(sizes, ep)
    given = inputs(rank, sizes)
    for layer in layers:
        layer.experts_forward = NoExperts()  # type: ignore[attr-defined]
    work = [lambda f=f: step(experts, f, given) for f in layers]  # type: ignore[misc]
    return timed(rank, work, repeats)


def gemms(sizes: Sizes, offsets: Tensor) -> Callable[[], None]:
    """The two grouped products of a forward and the four of its backward, on contiguous operands."""
    mm = torch.nn.functional.grouped_mm
    slots, local = int(offsets[-1]), len(offsets)
    x, up = (
        torch.randn(slots, n, dtype=sizes.dtype) for n in (sizes.hidden, 2 * sizes.intermediate)
    )
    h = torch.randn(slots, sizes.intermediate, dtype=sizes.dtype)
    first = torch.randn(local, 2 * sizes.intermediate, sizes.hidden, dtype=sizes.dtype)
    second = torch.randn(local, sizes.hidden, sizes.intermediate, dtype=sizes.dtype)

    def run() -> None:
        mm(x, first.mT, offs=offsets)
        mm(h, second.mT, offs=offsets)
        mm(x, second, offs=offsets)
        mm(x.T, h, offs=offsets)
        mm(up, first, offs=offsets)
        mm(up.T, x, offs=offsets)

    return run


def saved_bytes(rank: int, sizes: Sizes, ep: int, recompute: str) -> list[int]:
    """Bytes kept for backward by transformers' layer and by ours, parameters not counted."""
    experts, *layers = build(sizes, ep, recompute)
    given = inputs(rank, sizes)
    parameters = {p.untyped_storage().data_ptr() for p in experts.parameters()}
    found = []
    for layer in layers:
        kept: dict[int, int] = {}

        def pack(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = layer(*given[:3])
        found.append(sum(kept.values()))
        out.backward(given[3])
    return found


class SentBytes(TorchDispatchMode):
    """Counts the bytes that all-to-alls send to other ranks, in whatever way they are called.

    With `width`, those of rows of so many bytes alone.
    """

    def __init__(self, ranks: int, rank: int, width: int | None = None) -> None:
        super().__init__()
        self.ranks, self.rank, self.width, self.sent = ranks, rank, width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "c10d::alltoall_base_":
            self._count(args[1], args[4])
        elif name == "_c10d_functional::all_to_all_single":
            self._count(args[0], args[2])
        return func(*args, **(kwargs or {}))

    def _count(self, x: Tensor, splits: list[int]) -> None:
        rows = list(splits) or [x.shape[0] // self.ranks] * self.ranks
        row = x.numel() // max(x.shape[0], 1) * x.element_size()
        if self.width is not None and row != self.width:
            return  # not rows of hidden states
        self.sent += (sum(rows) - rows[self.rank]) * row


def wire_bytes(rank: int, sizes: Sizes, ep: int) -> list[int]:
    """Bytes that this rank sends to other ranks, forward and backward: transformers' layer, ours."""
    experts, *layers = build(sizes, ep)
    given = inputs(rank, sizes)
    found = []
    for layer in layers:
        with SentBytes(ep, rank % ep) as counted:
            step(experts, layer, given)
        found.append(counted.sent)
    return found


def crossing_rows(rank: int, sizes: Sizes, ep: int) -> list[int]:
    """Rows that this rank sends to others in forward and backward; distinct (token, other rank) pairs."""
    experts, _, ours = build(sizes, ep)
    hidden, ids, weights, cotangent = inputs(rank, sizes)
    local = sizes.experts // ep
    workloads = [
        ids,
        torch.full_like(ids, 3),  # one hot expert
        ids % local + local,  # one hot rank
        ids[:, :1].expand_as(ids),  # repeated ids
    ]
    width = sizes.hidden * sizes.dtype.itemsize
    sent = needed = 0
    for chosen in workloads:
        owners = chosen // local
        pairs = sum(len(set(row) - {rank % ep}) for row in owners.tolist())
        came = torch.tensor([pairs])
        dist.all_reduce(came)
        with SentBytes(ep, rank % ep, width) as counted:
            step(experts, ours, (hidden, chosen, weights, cotangent))
        # There and back, and the gradients of both: this rank answers for what came to it.
        total = torch.tensor([counted.sent])
        dist.all_reduce(total)
        sent += int(total) // width
        needed += 4 * int(came)
    return [sent, needed]


def decode_times(rank: int, sizes: Sizes, tokens: int, repeats: int = 30) -> list[float]:
    """Seconds of transformers' `all_reduce` and of ours on a shared batch, then this rank's CPU seconds.

    Without gradients.
    """
    from transformers.distributed.expert_parallel import AllReduceEP

    from ep_dispatch import AllReduce
    from ep_kernels import module_experts_forward

    experts = experts_module(sizes, RANKS)
    ep_mesh, _ = meshes(RANKS)
    group = ep_mesh.get_group()
    ours = AllReduce(
        module_experts_forward(experts),
        num_local_experts=sizes.experts // RANKS,
        ep_group=group,
        tp_group=group,
        experts=experts,
    )
    given = inputs(0, replace(sizes, tokens=tokens))[:3]
    with torch.no_grad():
        layers = AllReduceEP(experts, ep_mesh, ep_mesh), ours
        work = [functools.partial(layer, *given) for layer in layers]
        return [*timed(rank, work, repeats), *(cpu_seconds(one, repeats) for one in work)]


def cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this process for one piece of work: what it waits for doesn't count."""
    dist.barrier()
    start = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - start) / repeats


def wire_errors(rank: int, sizes: Sizes) -> dict[str, list[float]]:
    """By `wire_dtype` and kind of rows: the largest error of an output row and of a gradient row.

    Relative to the row's norm, against the same layer with nothing cast on the way; `sizes` in float64.
    """
    from ep_dispatch import AllToAll
    from ep_dispatch.wire import WIRE_DTYPES
    from ep_kernels import module_experts_forward

    torch.manual_seed(rank)
    experts = experts_module(sizes, RANKS)
    forward, group = module_experts_forward(experts), meshes(RANKS)[0].get_group()
    hidden, ids, weights, cotangent = inputs(rank, sizes)
    outliers = torch.ones(sizes.hidden, dtype=sizes.dtype)
    outliers[:: sizes.hidden // 2] = 100  # two channels, as large models have them
    found = {}
    for kind, scale in (("uniform", 1.0), ("outliers", outliers)):
        results = []
        for wire in (None, *WIRE_DTYPES):
            layer = AllToAll(
                forward,
                num_local_experts=sizes.experts // RANKS,
                ep_group=group,
                experts=experts,
                wire_dtype=wire,
            )
            x = (hidden.detach() * scale).requires_grad_()
            out = layer(x, ids, weights.detach())
            (gradient,) = torch.autograd.grad(out, x, cotangent * scale)
            results.append((out.detach(), gradient))
        exact = results[0]
        for wire, got in zip(WIRE_DTYPES, results[1:], strict=True):
            found[f"{str(wire).removeprefix('torch.')}, {kind}"] = [
                float(((one - other).norm(dim=1) / other.norm(dim=1)).max())
                for one, other in zip(got, exact, strict=True)
            ]
    return found
