"""The conformance kit: our implementations keep its laws, and it finds each fault that a toy is given."""

import pytest
import torch
import torch.distributed as dist

from ep_dispatch import EPImplementationInterface
from ep_dispatch.collectives import copy_to_group, gather_over_group
from ep_dispatch.testing import (
    CAPABILITIES,
    LAWS,
    WORKLOADS,
    ConformanceError,
    LinearExperts,
    cases,
    check,
)

WORLD = 4


def groups(moe, tp, rank):
    return moe.groups(moe.Case(world=WORLD, ep=WORLD, tp=tp), rank)


def conforms(rank, moe, name, tp, workload):
    ep_group, tp_group = groups(moe, tp, rank)
    check(EPImplementationInterface.get(name), workload, ep_group=ep_group, tp_group=tp_group)


OURS = [
    ("all_to_all", 1),
    ("all_to_all", 2),
    ("all_to_all", 4),
    ("all_reduce", 4),
    ("auto", 4),
    ("symmetric_memory", 1),
    ("symmetric_memory", 2),
]


SAMPLE = ("hot_rank", "ragged", "repeated", "skipped")  # of the last ones, without `--all-layouts`


def pytest_generate_tests(metafunc):
    if metafunc.function is test_ours_conform:
        whole = metafunc.config.getoption("--all-layouts")
        chosen = [
            (name, tp, workload)
            for name, tp in OURS
            for workload in WORKLOADS
            if whole or (name, tp) in OURS[:2] or workload in SAMPLE
        ]
        metafunc.parametrize(("name", "tp", "workload"), chosen)


def test_ours_conform(ranks, moe, name, tp, workload):
    ranks.run(conforms, moe, name, tp, workload, world=WORLD)


@pytest.mark.parametrize(("law", "workload"), cases())
def test_ours_conform_on_one_rank(law, workload):
    check(EPImplementationInterface.get("all_to_all"), workload, law)


class Toy:
    """Every rank gathers all tokens, runs its experts on them, and all add the parts up; or a fault of it."""

    def __init__(self, experts, *, num_local_experts, ep_group, tp_group, fault=""):
        self.experts, self.local, self.fault = experts, num_local_experts, fault
        self.ep_group, self.tp_group = ep_group, tp_group
        self.rank, self.ranks = dist.get_rank(ep_group), dist.get_world_size(ep_group)
        members = [self.rank] if tp_group is None else dist.get_process_group_ranks(tp_group)
        self.leader = min(members)
        if fault == "tp_fold_duplication":
            self.leader = self.rank

    def __call__(self, hidden, ids, weights):
        if self.fault == "lost_weight_gradient":
            weights = weights.detach()
        if self.fault == "unweighted_without_grad" and not torch.is_grad_enabled():
            weights = torch.ones_like(weights)
        if self.fault == "bfloat16_transit":
            hidden = hidden.bfloat16().to(hidden.dtype)
        if self.fault == "state_on_the_object":
            hidden = KeepsOnObject.apply(hidden, 1 - 2 * (ids[:, :1] % 2), self)
        if self.fault == "accumulates_in_backward":
            hidden = Accumulates.apply(hidden)
        total = self.sum_of_parts(self.part(hidden, ids, weights), hidden)
        if self.fault == "input_changed":
            ids.clamp_(max=0)
        tokens = hidden.shape[0]
        out = total.view(self.ranks, -1, hidden.shape[1])[self.leader, :tokens]
        if self.rank != self.leader:  # the leader's gradient is the batch's
            out = out.detach() + 0 * out
        if self.fault == "dropped_last_token":
            out = torch.cat([out[:-1], 0 * out[-1:]])
        if self.fault == "unwritten_rows":
            written = (ids >= 0).any(1)
            rows, out = out, torch.empty_like(out)
            out[written] = rows[written]
        return out

    def part(self, hidden, ids, weights):
        """What this rank's experts make of all tokens, each token once."""
        lengths = [0] * self.ranks
        dist.all_gather_object(lengths, len(ids), group=self.ep_group)
        size = max(*lengths, 1)
        if self.rank != self.leader:
            ids = torch.full_like(ids, -1)
        padding = (0, 0, 0, size - len(ids))
        rows, w = (
            gather_over_group(
                torch.nn.functional.pad(copy_to_group(x, self.tp_group), padding),
                self.ep_group,
                size=size * self.ranks,
                partial_grad=True,
            )
            for x in (hidden, weights)
        )
        padded = torch.nn.functional.pad(ids, padding, value=-1)
        ids = gather_over_group(padded, self.ep_group, size=size * self.ranks)
        local = ids - self.rank * self.local
        if self.fault == "wrong_owner":
            local = torch.where(ids % self.ranks == self.rank, ids // self.ranks, -1)
        foreign = (local < 0) | (local >= self.local)
        if self.fault == "experts_not_called" and foreign.all():
            return 0 * rows + 0 * w.sum(1, keepdim=True)
        return self.experts(rows, local.masked_fill(foreign, self.local), w.masked_fill(foreign, 0))

    def sum_of_parts(self, part, hidden):
        size = part.shape[0] * self.ranks
        parts = gather_over_group(part, self.ep_group, size=size, partial_grad=True)
        parts = parts.view(self.ranks, -1, hidden.shape[1])
        order = range(self.ranks)
        if self.fault == "order_dependent_sums":
            order = torch.randperm(self.ranks).tolist()
        total = torch.zeros_like(parts[0])
        for rank in order:
            total = total + parts[rank]
        return total


class KeepsOnObject(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sign, owner):
        ctx.sign, ctx.owner, owner.sign = sign, owner, sign
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.sign * ctx.owner.sign, None, None


class Accumulates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.total = 0
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.total = ctx.total + grad
        return ctx.total


def toy(rank, moe, fault, tp, workload, laws=None):
    """The failures of a toy with a fault."""
    ep_group, tp_group = groups(moe, tp, rank)
    try:
        check(
            lambda experts, **settings: Toy(experts, **settings, fault=fault),
            workload, laws, ep_group=ep_group, tp_group=tp_group,
        )  # fmt: skip
    except ConformanceError as error:
        return error.failures, str(error)
    return [], ""


@pytest.mark.parametrize(
    ("workload", "tp"), [(name, 1 + place % 2) for place, name in enumerate(WORKLOADS)]
)
def test_a_right_toy_conforms(ranks, moe, workload, tp):
    for failures, _ in ranks.run(toy, moe, "", tp, workload, world=WORLD):
        assert not failures


# fault: the law that finds it, ranks of a TP group, a workload in which it is found.
FAULTS = {
    "wrong_owner": ("output", 1, "balanced"),
    "dropped_last_token": ("output", 1, "ragged"),
    "input_changed": ("output", 2, "top_1"),
    "lost_weight_gradient": ("gradients", 2, "ties"),
    "tp_fold_duplication": ("gradients", 2, "one_token"),
    "experts_not_called": ("idle_experts", 1, "hot_rank"),
    "unwritten_rows": ("poisoned_memory", 1, "skipped"),
    "accumulates_in_backward": ("backward_twice", 1, "repeated"),
    "order_dependent_sums": ("deterministic", 1, "top_all"),
    "unweighted_without_grad": ("no_grad", 1, "hot_expert"),
    "state_on_the_object": ("in_flight", 1, "top_1"),
    "bfloat16_transit": ("real_numbers", 1, "top_1"),
}
# Faults that more than one law sees.
ALSO = {
    "wrong_owner": set(LAWS) - {"deterministic", "idle_experts"},
    "dropped_last_token": {*LAWS} - {"deterministic", "idle_experts"},
    "lost_weight_gradient": {*LAWS} - {"deterministic", "idle_experts", "output", "no_grad"},
    "tp_fold_duplication": {*LAWS} - {"deterministic", "idle_experts", "output", "no_grad"},
    "unwritten_rows": set(LAWS),
    "input_changed": set(LAWS),
}


@pytest.mark.parametrize("guilty", [range(WORLD), [2]])
def test_an_output_without_history_is_a_failure_like_others(ranks, moe, guilty):
    """Of all ranks, or of one, whose peers are not left alone in backward."""

    def run(rank):
        ep_group, _ = groups(moe, 1, rank)

        def factory(experts, **settings):
            right = EPImplementationInterface.get("all_to_all")(experts, **settings)
            return lambda *args: right(*args).detach() if rank in guilty else right(*args)

        with pytest.raises(
            ConformanceError, match=r"law 'gradients', workload 'ties', rank 0.*no hist"
        ):
            check(factory, "ties", "gradients", ep_group=ep_group)

    ranks.run(run, world=WORLD)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_by_name(ranks, moe, fault):
    law, tp, workload = FAULTS[fault]
    results = ranks.run(toy, moe, fault, tp, workload, world=WORLD)
    for failures, message in results:
        found = {failure.law for failure in failures}
        assert law in found
        assert found <= {law} | ALSO.get(fault, set()), message
        assert f"law {law!r}, workload {workload!r}, rank" in message
        assert LAWS[law].what in message
        assert message == results[0][1], "all ranks fail, and tell the same"


def test_every_law_finds_a_fault():
    assert {law for law, _, _ in FAULTS.values()} == set(LAWS)


def test_a_fault_of_one_rank_fails_all(ranks, moe):
    def run(rank):
        failures, message = toy(
            rank, moe, "dropped_last_token" * (rank == 2), 1, "ragged", "output"
        )
        assert {failure.rank for failure in failures} == {2}
        assert "[11, 0]" in message
        assert "of 96 values differ" in message

    ranks.run(run, world=WORLD)


def test_what_is_not_claimed_is_left_out():
    def gives_nothing(experts, **settings):
        return lambda hidden, ids, weights: torch.zeros_like(hidden)

    with pytest.raises(ConformanceError, match=r"'skipped', rank 0 \(LinearExperts, float32\)"):
        check(gives_nothing, "skipped", "output")
    check(gives_nothing, "skipped", "output", without=["skipped"])
    for capability in CAPABILITIES:
        kept = cases(without=[capability])
        assert set(kept) < set(cases())
        assert kept
        assert all(capability not in WORKLOADS[w].needs | LAWS[law].needs for law, w in kept)


def test_what_a_dispatcher_raises_is_told_with_its_place():
    def fails(experts, **settings):
        return lambda hidden, ids, weights: 1 / 0

    with pytest.raises(ZeroDivisionError) as raised:
        check(fails, "ties")
    assert raised.value.__notes__ == ["law 'output', workload 'ties', rank 0 (ScalingExperts)"]


def test_a_dispatcher_without_history_is_told():
    def detached(experts, **settings):
        return lambda hidden, ids, weights: experts(hidden, ids, weights).detach()

    check(detached, "balanced", ["output", "no_grad"])
    with pytest.raises(ConformanceError, match=r"rank 0.*the output of ranks \[0\] has no history"):
        check(detached, "balanced", "gradients")
    check(detached, "balanced", without=["gradients"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workload": "balance"}, "workload: 'balance' is none of 'balanced'"),
        ({"laws": ["outputs"]}, "laws: 'outputs' is none of 'output'"),
        ({"without": {"skip"}}, "without: 'skip' is none of 'skipped'"),
        ({"dtypes": [torch.bfloat16]}, "float32 and float64, whose sums are exact.*bfloat16"),
    ],
)
def test_names_that_do_not_exist(wrong, message):
    with pytest.raises(ValueError, match=message):
        check(EPImplementationInterface.get("all_to_all"), **{"workload": "ties"} | wrong)


def test_experts_do_not_read_skipped_rows():
    experts = LinearExperts(2, 4, torch.Generator().manual_seed(0)).float()
    rows = torch.ones(3, 4)
    rows[1] = float("nan")
    out = experts(rows, torch.tensor([[0], [2], [1]]), torch.ones(3, 1))
    assert (out[1] == 0).all()
    assert out.isfinite().all()
