"""`max_rows`: imbalance makes a call slower, not larger; the results are those without a bound."""

import functools
import warnings

import pytest
import torch

from ep_dispatch import AllToAll
from ep_dispatch.testing import check

pytestmark = pytest.mark.filterwarnings("ignore:.*max_rows")


def bounded(moe, max_rows=4, *, name="all_to_all", more=(), ep=4, tp=1, **fields):
    fields = {"tokens": (7, 0, 2, 11)[: 4 // tp], "routing": "one"} | fields
    settings = (("max_rows", max_rows), *more)
    return moe.Case(world=4, ep=ep, tp=tp, name=name, settings=settings, **fields)


@pytest.mark.parametrize(("ep", "tp"), [(2, 2), (4, 1), (4, 2)])
def test_equals_one_process(ranks, moe, routed, ep, tp):
    name, more = routed
    cases = [
        bounded(moe, rows, name=name, more=more, ep=ep, tp=tp, routing=routing)
        for routing, rows in (("one", 4), ("random", 6), ("first", 5), ("skipped", 4), ("one", 99))
    ]
    cases.append(bounded(moe, 4, more=(*more, ("num_chunks", 2)), name=name, ep=ep, tp=tp))
    ranks.run(moe.check_all, cases, world=4)


def test_frozen_parts(ranks, moe):
    cases = moe.frozen_parts(functools.partial(bounded, moe), "one")
    cases += [bounded(moe, tp=2, sequence_parallel=True)]
    ranks.run(moe.check_all, cases, world=4)


def test_modes(ranks, moe):
    ranks.run(moe.check_modes, bounded(moe, tp=2), bounded(moe), world=4)


def test_memory_is_bounded(ranks, moe, routed):
    """The experts never see more rows than the bound, in forward and backward, and a call keeps little
    for backward; without it all tokens are on one rank."""
    name, more = routed

    def run(rank):
        seen = {}
        for bound in (None, 16):
            case = moe.Case(world=4, ep=4, tp=1, name=name, routing="one", tokens=(64,) * 4,
                            settings=(*more, ("max_rows", bound)))  # fmt: skip
            implementation, _ = moe.build(case, rank)
            _, inputs = moe.whole_inputs(case)
            hidden, ids, weights, cotangent = inputs[rank]
            rows, run_on, kept = [], implementation.run_on, []

            def counted(received, rows=rows, run_on=run_on):
                rows.append(len(received.rows))
                return run_on(received)

            def pack(x, kept=kept):
                if x.is_floating_point():
                    kept.append(x.numel() * x.element_size())
                return x

            implementation.run_on = counted
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = implementation(hidden.requires_grad_(), ids, weights.requires_grad_())
            forward = list(rows)
            out.backward(cotangent)
            seen[bound] = forward, rows[len(forward) :], sum(kept)
        forward, backward, kept = seen[None]
        assert backward == []
        assert forward == [4 * 64 if rank == 3 else 0]
        few, again, little = seen[16]
        assert max(few) == (16 if rank == 3 else 0)
        assert again == few[::-1]
        assert sum(few) == sum(forward)
        assert rank != 3 or little < kept / 10

    ranks.run(run, world=4)


def test_told_once(ranks, moe):
    """By each rank: which layer, which rank, how many rows, what bound."""

    def run(rank):
        implementation, _ = moe.build(bounded(moe), rank)
        implementation.layer = "model.layers.3.mlp.experts"
        _, inputs = moe.whole_inputs(bounded(moe))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                implementation(*inputs[rank][:3])
        return [str(warning.message) for warning in caught]

    for (message,) in ranks.run(run, world=4):
        for part in ("model.layers.3.mlp.experts: 20 rows", "rank 3 of", "max_rows=4", "10 rounds"):
            assert part in message


@pytest.mark.parametrize("workload", ["hot_rank", "no_tokens", "skipped"])
def test_conforms(ranks, moe, workload):
    def run(rank):
        ep_group, tp_group = moe.groups(moe.Case(world=4, ep=4, tp=2), rank)

        def build(experts, **settings):
            return AllToAll(experts, max_rows=4, **settings)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(build, workload, ep_group=ep_group, tp_group=tp_group, dtypes=[torch.float32])

    ranks.run(run, world=4)


@pytest.mark.parametrize("wrong", [0, 2.0, True, "few"])
def test_not_a_bound(wrong):
    with pytest.raises(ValueError, match=rf"max_rows must be .*got max_rows={wrong!r}"):
        AllToAll(lambda *args: None, num_local_experts=1, max_rows=wrong)


def test_a_bound_that_the_group_cannot_keep(ranks, moe):
    def run(rank):
        with pytest.raises(ValueError, match=r"at least ep_size, .* max_rows=3 with ep_size=4"):
            moe.build(bounded(moe, 3), rank)

    ranks.run(run, world=4)
