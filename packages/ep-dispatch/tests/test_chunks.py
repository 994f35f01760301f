"""Tokens in chunks: equal to one process and to one chunk, whatever each rank holds."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ep_dispatch import AllToAll
from ep_dispatch.testing import check

ROUTINGS = ("random", "one", "repeated", "first", "skipped")
KINDS = [("all_to_all", ()), ("all_to_all_hierarchical", (("ranks_per_node", 2),))]


def chunked(moe, chunks=3, *, name="all_to_all", more=(), ep=4, tp=1, **fields):
    fields = {"tokens": (7, 0, 2, 11)[: 4 // tp]} | fields
    settings = (("num_chunks", chunks), *more)
    return moe.Case(world=4, ep=ep, tp=tp, name=name, settings=settings, **fields)


@pytest.mark.parametrize(("name", "more"), KINDS)
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_equals_one_process(ranks, moe, name, more, ep, tp):
    """Empty ranks, fewer tokens than chunks, all on one rank, skipped slots."""
    cases = [chunked(moe, name=name, more=more, ep=ep, tp=tp, routing=r) for r in ROUTINGS]
    cases.append(
        chunked(moe, 8, name=name, more=more, ep=ep, tp=tp, tokens=(1, 3, 0, 0)[: 4 // tp])
    )
    cases.append(chunked(moe, name=name, more=more, ep=ep, tp=tp, tokens=(0,) * (4 // tp)))
    ranks.run(moe.check_all, cases, world=4)


def test_frozen_parts_and_slices(ranks, moe):
    subsets = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]
    cases = [
        chunked(moe, tp=2, routing=routing, hidden_grad=a, weights_grad=b, experts_grad=c)
        for a, b, c in subsets
        for routing in ("random", "first")
    ]
    cases += [
        chunked(moe, tp=tp, routing="first", frozen_batches=batches, frozen_ranks=frozen)
        for tp in (1, 2)
        for batches, frozen in (((0,), ()), ((1,), (0, 2)), ((0, 1), (0, 1, 3)))
    ]
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
        for reentrant in (False, True):
            moe.check(rank, chunked(moe, tp=2),
                      lambda f, *args, r=reentrant: checkpoint(f, *args, use_reentrant=r))  # fmt: skip

        def without(implementation, *args):
            with torch.no_grad():
                return implementation(*args)

        frozen = {"hidden_grad": False, "weights_grad": False, "experts_grad": False}
        moe.check(rank, chunked(moe, tp=2, **frozen), without)
        narrow = chunked(moe, dtype=torch.float32, more=(("wire_dtype", torch.bfloat16),))
        moe.check(rank, narrow, bound=2**-7)

        case = chunked(moe)
        whole, inputs = moe.whole_inputs(case)
        implementation, experts = moe.build(case, rank, whole)
        hidden, ids, weights, cotangent = inputs[rank]
        leaves = [hidden.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
        out = implementation(hidden, ids, weights)
        first = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
        second = torch.autograd.grad(out, leaves, cotangent)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out, leaves, cotangent)

    ranks.run(run, world=4)


def test_one_exchange_of_counts_and_one_of_slots(ranks, moe):
    """Then rows: each chunk goes there before the one before it is back, in forward and backward."""

    def run(rank):
        case = chunked(moe, tokens=(9, 9, 9, 9))
        implementation, _ = moe.build(case, rank)
        _, inputs = moe.whole_inputs(case)
        hidden, ids, weights, cotangent = inputs[rank]
        original, events = dist.all_to_all_single, []

        def recorded(output, input, *args, async_op=False, **kwargs):
            events.append("start" if async_op else str(input.dtype))
            work = original(output, input, *args, async_op=async_op, **kwargs)
            return Waited(work) if async_op else work

        class Waited:
            def __init__(self, work):
                self.work = work

            def wait(self):
                events.append("end")
                self.work.wait()

        dist.all_to_all_single = recorded
        try:
            out = implementation(hidden.requires_grad_(), ids, weights.requires_grad_())
            forward, events[:] = list(events), []
            out.backward(cotangent)
        finally:
            dist.all_to_all_single = original
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
        implementation, _ = moe.build(chunked(moe, "auto"), rank)
        assert implementation._auto_chunks() == 1
        case = chunked(moe, "auto", tp=2)

        def two(implementation, *args):
            implementation._most_chunks = 2
            sizes = []
            run_chunks = implementation._run_chunks
            implementation._run_chunks = lambda chunks, *more: (
                sizes.append(len(chunks)) or run_chunks(chunks, *more)
            )
            out = implementation(*args)
            with torch.no_grad():
                assert moe.error(implementation(*args), out) < 1e-12
            assert sizes == [2, 1]
            with torch.set_grad_enabled(rank == 1), pytest.raises(RuntimeError, match="grad mode"):
                implementation(*args)
            return out

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
