"""Tokens in chunks: equal to one process and to one chunk, whatever each rank holds."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist

from ep_dispatch import AllToAll
from ep_dispatch.testing import check

ROUTINGS = ("random", "one", "repeated", "first", "skipped")


def chunked(moe, chunks=3, *, name="all_to_all", more=(), ep=4, tp=1, **fields):
    fields = {"tokens": (7, 0, 2, 11)[: 4 // tp]} | fields
    settings = (("num_chunks", chunks), *more)
    return moe.Case(world=4, ep=ep, tp=tp, name=name, settings=settings, **fields)


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_equals_one_process(ranks, moe, routed, ep, tp):
    """Empty ranks, fewer tokens than chunks, all on one rank, skipped slots."""
    name, more = routed
    cases = [chunked(moe, name=name, more=more, ep=ep, tp=tp, routing=r) for r in ROUTINGS]
    cases.append(
        chunked(moe, 8, name=name, more=more, ep=ep, tp=tp, tokens=(1, 3, 0, 0)[: 4 // tp])
    )
    cases.append(chunked(moe, name=name, more=more, ep=ep, tp=tp, tokens=(0,) * (4 // tp)))
    ranks.run(moe.check_all, cases, world=4)


def test_frozen_parts_and_slices(ranks, moe):
    cases = moe.frozen_parts(functools.partial(chunked, moe), "random", "first")
    cases += [chunked(moe, tp=2, sequence_parallel=True, routing=r) for r in ("random", "skipped")]
    ranks.run(moe.check_all, cases, world=4)


def test_output_is_that_of_one_chunk_bit_for_bit(ranks, moe):
    """Rows are computed in other company, by experts whose rows do not depend on it."""

    def run(rank):
        def double(rows, ids, weights):
            return rows * ((ids + 1) * weights).sum(1, keepdim=True)

        outs = []
        for chunks in (1, 2, 5):
            case = chunked(moe, chunks, dtype=torch.float32)
            implementation, _ = moe.build(case, rank, experts_forward=double)
            _, inputs = moe.whole_inputs(case)
            hidden, ids, weights, cotangent = (x.float() if x.is_floating_point() else x
                                               for x in inputs[rank])  # fmt: skip
            x, w = hidden.requires_grad_(), weights.requires_grad_()
            out = implementation(x, ids, w)
            outs.append((out, *torch.autograd.grad(out, (x, w), cotangent)))
        for other in outs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))

    ranks.run(run, world=4)


def test_modes(ranks, moe):
    """Checkpointed, without gradients, backward twice, and rows in a narrow dtype."""

    def run(rank):
        moe.check_modes(rank, chunked(moe, tp=2), chunked(moe))
        narrow = chunked(moe, dtype=torch.float32, more=(("wire_dtype", torch.bfloat16),))
        moe.check(rank, narrow, bound=2**-7)

    ranks.run(run, world=4)


def test_one_exchange_of_counts_and_one_of_slots(ranks, moe):
    """Then rows: each chunk goes there before the one before it is back, in forward and backward."""

    def run(rank):
        case = chunked(moe, tokens=(9, 9, 9, 9))
        implementation, _ = moe.build(case, rank)
        _, inputs = moe.whole_inputs(case)
        hidden, ids, weights, cotangent = inputs[rank]
        with moe.exchanges() as events:
            out = implementation(hidden.requires_grad_(), ids, weights.requires_grad_())
            forward, events[:] = list(events), []
            out.backward(cotangent)
        first, second, third = (
            ["end", "start", "start"],
            ["end", "start", "start", "end"],
            ["end", "start"],
        )
        rows = ["start", *first, *second, *third, "end", "end"]
        assert forward == ["torch.int64", "torch.uint8", *rows]
        back = ["end" if event == "start" else "start" for event in reversed(rows)]
        assert events == [*back, "torch.float64"]

    ranks.run(run, world=4)


def test_auto(ranks, moe):
    """One chunk on gloo; where two are worth it, in training only, which the ranks agree upon."""

    def run(rank):
        case = chunked(moe, "auto", tp=2)

        def counted(implementation, *args):
            with moe.exchanges() as events:
                out = implementation(*args)
            return out, events.count("start") // 2  # there and back

        def one(implementation, *args):
            out, chunks = counted(implementation, *args)
            assert chunks <= 1
            return out

        def two(implementation, *args):
            out, chunks = counted(implementation, *args)
            assert chunks == 2
            with torch.no_grad():
                again, chunks = counted(implementation, *args)
            assert chunks <= 1
            assert moe.error(again, out) < 1e-12
            with torch.set_grad_enabled(rank == 1), pytest.raises(RuntimeError, match="grad mode"):
                implementation(*args)
            return out

        moe.check(rank, case, one)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend", lambda _: "nccl")
            moe.check(rank, case, two)

    ranks.run(run, world=4)


@pytest.mark.parametrize("workload", ["no_tokens", "repeated", "skipped"])
def test_conforms(ranks, moe, workload):
    def run(rank):
        ep_group, tp_group = moe.groups(moe.Case(world=4, ep=4, tp=2), rank)

        def build(experts, **settings):
            return AllToAll(experts, num_chunks=3, **settings)

        check(build, workload, ep_group=ep_group, tp_group=tp_group, dtypes=[torch.float32])

    ranks.run(run, world=4)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "many"])
def test_not_a_number_of_chunks(wrong):
    with pytest.raises(ValueError, match=rf"num_chunks must be .*got {wrong!r}"):
        AllToAll(lambda *args: None, num_local_experts=1, num_chunks=wrong)


@pytest.mark.parametrize("settings", [{"num_chunks": 2}, {"max_rows": 3}], ids=str)
def test_gradients_of_the_experts_alone(ranks, settings):
    """Of one rank whose experts get no token too: it takes part in all exchanges."""

    def run(rank):
        experts = torch.nn.Linear(4, 4, bias=False)

        def forward(rows, ids, weights):  # leaves its parameter out where no row came
            return experts(rows) * weights.sum(1, keepdim=True) if len(rows) else rows

        layer = AllToAll(
            forward,
            num_local_experts=1,
            ep_group=dist.group.WORLD,
            experts=experts,
            **settings,
        )
        hidden, ids = torch.randn(5, 4), torch.ones(5, 1, dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the rounds
            out = layer(hidden, ids, torch.ones(5, 1))
        (gradient,) = torch.autograd.grad(out.sum(), experts.weight)
        assert gradient.any() == (rank == 1)

    ranks.run(run, world=2)
