"""A mixture of experts in plain torch, its float64 reference, and one check for every layout and input.

T = tokens, H = hidden size, K = experts per token, E = experts, I = intermediate size, B = batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Rounding of the whole chain (two projections, a sum over K) in each dtype, with a margin of about 4.
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Experts(nn.Module):
    """Experts as a loop; an expert without rows is left out, as released models do it."""

    def __init__(self, num_experts: int, hidden: int = 8, intermediate: int = 6) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, intermediate, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, intermediate) / intermediate**0.5)

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for expert in ids.unique().tolist():
            if expert == self.num_experts:
                continue
            row, slot = torch.where(ids == expert)
            up = torch.nn.functional.silu(torch.nn.functional.linear(rows[row], self.up[expert]))
            down = torch.nn.functional.linear(up, self.down[expert])
            scaled = (down * weights[row, slot, None]).to(out.dtype)
            out = out.index_add(0, row, scaled)
        return out


@dataclass(frozen=True)
class Case:
    """One layer call on `world` ranks.

    `tokens` are those of each batch; batch b is held by the TP group number b. `routing` is a name
    (random, one: one expert gets all, repeated: equal ids in a token, first: only the first rank's
    experts, skipped: some slots -1).
    """

    world: int = 8
    ep: int = 4
    tp: int = 2
    sequence_parallel: bool = False
    tokens: tuple[int, ...] = (13, 6, 9, 11)
    experts: int = 8
    top_k: int = 3
    routing: str = "random"
    dtype: torch.dtype = torch.float64
    weights_dtype: torch.dtype | None = None
    name: str = "all_to_all"
    settings: tuple[tuple[str, object], ...] = ()  # of the implementation, beside the usual ones
    hidden_grad: bool = True
    weights_grad: bool = True
    experts_grad: bool = True
    frozen_batches: tuple[int, ...] = ()  # whose hidden states and routing weights need no gradient
    frozen_ranks: tuple[int, ...] = ()  # whose experts need no gradient

    @property
    def batches(self) -> int:
        return self.world // self.tp


def routes(case: Case, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Expert ids [T, K] and weights [T, K] in float64."""
    generator = torch.Generator().manual_seed(seed)
    E, K = case.experts, case.top_k
    scores = torch.rand(tokens, E, generator=generator, dtype=torch.float64)
    ids = scores.topk(K, dim=-1).indices
    if case.routing == "one":
        ids = torch.full((tokens, K), E - 1)
    elif case.routing == "repeated":
        ids[:, 1:] = ids[:, :1]
    elif case.routing == "first":
        ids = ids % (E // case.ep)
    elif case.routing == "skipped":
        ids = ids.masked_fill(torch.rand(tokens, K, generator=generator) < 0.4, -1)
        ids[: tokens // 3] = -1
    return ids, torch.rand(tokens, K, generator=generator, dtype=torch.float64)


def reference(experts: Experts, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The definition: every expert on every token, times the weights of the slots that chose it."""
    out = torch.zeros_like(hidden)
    for expert in range(experts.num_experts):
        weight = torch.where(ids == expert, weights, torch.zeros_like(weights)).sum(1, keepdim=True)
        up = torch.nn.functional.silu(hidden @ experts.up[expert].T)
        out = out + (up @ experts.down[expert].T) * weight
    return out


def groups(case: Case, rank: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's EP and TP group; every rank makes all of them."""
    mine: list[dist.ProcessGroup | None] = []
    for size in (case.ep, case.tp):
        group = None
        for first in range(0, case.world, size):
            members = list(range(first, first + size))
            made = dist.new_group(members) if size > 1 else None
            if rank in members:
                group = made
        mine.append(group)
    return mine[0], mine[1]


def build(case: Case, rank: int, whole: Experts | None = None, **more):
    """The implementation of this rank, and the experts it holds (a slice of `whole`)."""
    from ep_dispatch import EPImplementationInterface

    ep_group, tp_group = groups(case, rank)
    local = case.experts // case.ep
    experts = Experts(local).to(case.dtype)
    if whole is not None:
        mine = slice(rank % case.ep * local, (rank % case.ep + 1) * local)
        with torch.no_grad():
            experts.up.copy_(whole.up[mine])
            experts.down.copy_(whole.down[mine])
    experts.requires_grad_(case.experts_grad and rank not in case.frozen_ranks)
    implementation = EPImplementationInterface.get(case.name)(
        **{
            "experts_forward": experts,
            "num_local_experts": local,
            "ep_group": ep_group,
            "tp_group": tp_group,
            "sequence_parallel": case.sequence_parallel,
        }
        | dict(case.settings)
        | more
    )
    return implementation, experts


def error(value: Tensor, expected: Tensor) -> float:
    """The relative error; the absolute one where nothing is expected."""
    value, expected = value.detach().double(), expected.detach().double()
    assert value.shape == expected.shape, (value.shape, expected.shape)
    norm = expected.norm().item()
    return (value - expected).norm().item() / (norm or 1.0)


def whole_inputs(case: Case):
    """The experts of the layer and, for each batch, hidden states, ids, weights, output's gradient."""
    torch.manual_seed(11)
    experts = Experts(case.experts).double()
    # Both sides start from values that the dtype can hold.
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(parameter.to(case.dtype).double())
    inputs = []
    for batch, tokens in enumerate(case.tokens):
        ids, weights = routes(case, tokens, seed=100 + batch)
        hidden = torch.randn(tokens, 8, dtype=torch.float64).to(case.dtype).double()
        weights = weights.to(case.weights_dtype or case.dtype).double()
        cotangent = torch.randn(tokens, 8, dtype=torch.float64).to(case.dtype).double()
        inputs.append((hidden, ids, weights, cotangent))
    return experts, inputs


def check(
    rank: int,
    case: Case,
    call: Callable | None = None,
    prepare: Callable | None = None,
    bound: float | None = None,
) -> None:
    """The law: output and all gradients equal those of one process in float64.

    `call(implementation, hidden, ids, weights)` replaces the plain call; `prepare` makes other inputs
    of a rank's (hidden, ids, weights), which stay the leaves whose gradients are compared.
    """
    bound = BOUNDS[case.dtype] if bound is None else bound
    whole, inputs = whole_inputs(case)
    implementation, experts = build(case, rank, whole)
    hidden, ids, weights, cotangent = inputs[rank // case.tp]
    frozen = rank // case.tp in case.frozen_batches
    hidden_grad, weights_grad = case.hidden_grad and not frozen, case.weights_grad and not frozen
    mine = slice(0, hidden.shape[0])
    if case.sequence_parallel:
        step = -(-hidden.shape[0] // case.tp)
        first = min(rank % case.tp * step, hidden.shape[0])
        mine = slice(first, min(first + step, hidden.shape[0]))
    x = hidden[mine].to(case.dtype).requires_grad_(hidden_grad)
    w = weights[mine].to(case.weights_dtype or case.dtype).requires_grad_(weights_grad)
    args = (x, ids[mine], w) if prepare is None else prepare(x, ids[mine], w)
    out = call(implementation, *args) if call else implementation(*args)
    assert out.dtype == case.dtype
    if out.requires_grad:
        out.backward(cotangent[mine].to(out.dtype))

    expected = []
    for one_hidden, one_ids, one_weights, one_cotangent in inputs:
        one_hidden.requires_grad_()
        one_weights.requires_grad_()
        expected.append(reference(whole, one_hidden, one_ids, one_weights))
        expected[-1].backward(one_cotangent)
    assert error(out, expected[rank // case.tp][mine]) <= bound, "output"
    if hidden_grad:
        assert error(x.grad, hidden.grad[mine]) <= bound, "gradient of the hidden states"
    if weights_grad:
        assert error(w.grad, weights.grad[mine]) <= bound, "gradient of the routing weights"
    chosen = torch.cat([one_ids.flatten() for _, one_ids, _, _ in inputs])
    for name, parameter in experts.named_parameters():
        if not case.experts_grad:
            assert parameter.grad is None
            continue
        if case.frozen_ranks:
            assert (parameter.grad is None) == (rank in case.frozen_ranks)
            continue
        assert parameter.grad is not None, f"{name} must have a gradient, zero if no token came"
        whole_parameter = whole.get_parameter(name)
        local = case.experts // case.ep
        total = torch.zeros_like(whole_parameter)
        total[rank % case.ep * local : (rank % case.ep + 1) * local] = parameter.grad.double()
        dist.all_reduce(total)
        assert error(total, whole_parameter.grad) <= bound, f"gradient of {name}"
        for expert in range(case.experts):
            if not (chosen == expert).any():
                assert (total[expert] == 0).all(), "an idle expert's gradient is exactly zero"


def check_all(rank: int, cases: list[Case]) -> None:
    """The law for each case; a failure names its case."""
    for case in cases:
        try:
            check(rank, case)
        except BaseException as failure:
            failure.add_note(str(case))
            raise


@contextlib.contextmanager
def exchanges(events: list[str] | None = None) -> Iterator[list[str]]:
    """What each `all_to_all_single` does meanwhile: "start" and "end", or the dtype of one that waits.

    `events`: a list that it is written to, among what else is; None: a new one.
    """
    events = [] if events is None else events
    original = dist.all_to_all_single

    class Waited:
        def __init__(self, work: dist.Work) -> None:
            self.work = work

        def wait(self) -> None:
            events.append("end")
            self.work.wait()

    def recorded(output: Tensor, input: Tensor, *args, async_op: bool = False, **kwargs):
        events.append("start" if async_op else str(input.dtype))
        work = original(output, input, *args, async_op=async_op, **kwargs)
        return Waited(work) if async_op else work

    dist.all_to_all_single = recorded
    try:
        yield events
    finally:
        dist.all_to_all_single = original


def check_modes(rank: int, shared: Case, own: Case) -> None:
    """The law inside a checkpointed region and without gradients (`shared`); backward twice (`own`)."""
    for reentrant in (False, True):
        check(rank, shared, lambda f, *args, r=reentrant: checkpoint(f, *args, use_reentrant=r))

    def without(implementation, *args):
        with torch.no_grad():
            return implementation(*args)

    frozen = {"hidden_grad": False, "weights_grad": False, "experts_grad": False}
    check(rank, replace(shared, **frozen), without)
    whole, inputs = whole_inputs(own)
    implementation, experts = build(own, rank, whole)
    hidden, ids, weights, cotangent = inputs[rank]
    leaves = [hidden.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    out = implementation(hidden, ids, weights)
    first = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
    second = torch.autograd.grad(out, leaves, cotangent)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, leaves, cotangent)


def frozen_parts(make: Callable[..., Case], *routings: str) -> list[Case]:
    """Cases of `make(tp=, ...)` for four ranks: every subset of what needs gradients; ranks that differ."""
    subsets = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]
    cases = [
        make(tp=2, routing=routing, hidden_grad=a, weights_grad=b, experts_grad=c)
        for a, b, c in subsets
        for routing in routings
    ]
    return cases + [
        make(tp=tp, frozen_batches=batches, frozen_ranks=frozen, routing="first")
        for tp in (1, 2)
        for batches, frozen in (((0,), ()), ((1, 3), (0, 2)), ((0, 1, 2, 3), (0, 1, 3)))
    ]


@pytest.fixture(params=["all_to_all", "all_to_all_hierarchical"])
def routed(request: pytest.FixtureRequest) -> tuple[str, tuple[tuple[str, object], ...]]:
    """The name of an implementation by exchanges of rows, and settings of it for four ranks."""
    return request.param, () if request.param == "all_to_all" else (("ranks_per_node", 2),)


@pytest.fixture(scope="session")
def moe() -> SimpleNamespace:
    """What is above, for tests and for the functions that they run on ranks."""
    return SimpleNamespace(
        Case=Case, Experts=Experts, build=build, check=check, check_all=check_all, check_modes=check_modes,
        error=error, exchanges=exchanges, frozen_parts=frozen_parts, groups=groups,
        reference=reference, routes=routes, whole_inputs=whole_inputs, nullcontext=contextlib.nullcontext,
    )  # fmt: skip
