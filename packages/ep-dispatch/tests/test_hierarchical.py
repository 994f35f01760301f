"""Two hops, between nodes and inside them: equal to one process, and a token crosses once to a node."""

import pytest
import torch
import torch.distributed as dist

NAME = "all_to_all_hierarchical"


def on_nodes(moe, ranks_per_node, **fields):
    return moe.Case(name=NAME, settings=(("ranks_per_node", ranks_per_node),), **fields)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
@pytest.mark.parametrize(("ep", "tp"), [(8, 1), (8, 2), (8, 8), (4, 1), (4, 2), (4, 4)])
def test_equals_one_process(ranks, moe, ranks_per_node, ep, tp):
    tokens = (13, 6, 9, 1, 4, 17, 3, 8)[: 8 // tp]
    cases = [
        on_nodes(moe, ranks_per_node, ep=ep, tp=tp, tokens=tokens, experts=16, routing=routing)
        for routing in ("random", "one", "repeated", "first", "skipped")
    ]
    ranks.run(moe.check_all, cases)


def test_few_tokens_and_frozen_parts(ranks, moe):
    subsets = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]
    cases = [
        on_nodes(moe, 4, ep=8, tp=2, tokens=tokens, routing=routing,
                 hidden_grad=a, weights_grad=b, experts_grad=c)
        for a, b, c in subsets
        for tokens in ((1, 0, 0, 2), (0,) * 4)
        for routing in ("random", "first")
    ]  # fmt: skip
    cases += [
        on_nodes(moe, 2, ep=8, tp=2, tokens=(7, 2, 0, 5), routing="first",
                 frozen_batches=batches, frozen_ranks=frozen)
        for batches, frozen in (((0, 3), ()), ((1,), (0, 2, 3)), ((0, 1, 2, 3), (0, 1, 6, 7)))
    ]  # fmt: skip
    ranks.run(moe.check_all, cases, timeout=120)


@pytest.mark.parametrize("routing", ["random", "first", "one", "repeated", "skipped"])
def test_a_token_crosses_once_to_a_node(ranks, moe, routing):
    """Rows to other nodes are the distinct (token, node) pairs, rows inside the (row, owner) pairs."""

    def run(rank):
        case = on_nodes(moe, 4, ep=8, tp=1, tokens=(9, 5, 7, 3, 4, 0, 6, 8), experts=16, top_k=6,
                        routing=routing)  # fmt: skip
        original, sent = dist.all_to_all_single, []

        def counted(output, input, receive, send, group=None, **kwargs):
            if input.dtype == torch.float64 and input.ndim == 2:
                members = dist.get_process_group_ranks(group)
                sent.extend(zip(members, send, strict=True))
            return original(output, input, receive, send, group=group, **kwargs)

        implementation, _ = moe.build(case, rank)
        _, inputs = moe.whole_inputs(case)
        hidden, ids, weights, _ = inputs[rank]
        plan = implementation.prepare(ids, weights)
        dist.all_to_all_single = counted
        try:
            implementation.dispatch(hidden, plan)
        finally:
            dist.all_to_all_single = original
        node = rank // 4
        crossed = sum(n for to, n in sent if to // 4 != node)
        experts_of_node = 8
        assert crossed == sum(
            len({e // experts_of_node for e in row if e >= 0} - {node}) for row in ids.tolist()
        )
        came = [rank, (rank + 4) % 8]
        spread = sum(
            len({e // 2 for e in row if e >= 0 and e // experts_of_node == node})
            for source in came
            for row in inputs[source][1].tolist()
        )
        assert sum(plan.hops[-1].send_sizes) == spread

    ranks.run(run)


def test_all_ranks_hear_of_wrong_input(ranks, moe):
    """Whichever rank it is, and whether shapes or ids are wrong: it says why, all others say who."""

    def run(rank):
        case = on_nodes(moe, 4, ep=8, tp=1, tokens=(3,) * 8)
        implementation, _ = moe.build(case, rank)
        _, inputs = moe.whole_inputs(case)
        hidden, ids, weights, _ = inputs[rank]
        for guilty in (0, 6):
            for wrong in (ids + 100, ids.float(), ids[:, 0]):
                mine = wrong if rank == guilty else ids
                with pytest.raises((ValueError, RuntimeError)) as caught:
                    implementation(hidden, mine, weights)
                if rank == guilty:
                    assert caught.type is ValueError
                    assert "top_k_" in str(caught.value)
                else:
                    assert "of the EP group refused" in str(caught.value)
        implementation(hidden, ids, weights)  # and goes on

    ranks.run(run)


@pytest.mark.parametrize("tp", [2, 8])
def test_all_ranks_hear_of_a_batch_that_is_not_shared(ranks, moe, tp):
    """A rank of a TP group, inside a node or across nodes, that holds one token more."""

    def run(rank):
        case = on_nodes(moe, 4, ep=8, tp=tp, tokens=(3,) * (8 // tp))
        implementation, _ = moe.build(case, rank)
        for guilty in (1, 6):
            tokens = 3 + (rank == guilty)
            hidden = torch.ones(tokens, 8, dtype=torch.float64)
            ids = torch.zeros(tokens, 3, dtype=torch.int64)
            with pytest.raises(RuntimeError, match="must hold the same tokens"):
                implementation(hidden, ids, torch.ones(tokens, 3, dtype=torch.float64))

    ranks.run(run)


def test_nodes_must_be_even(ranks, moe):
    def run(rank):
        case = moe.Case(name=NAME, ep=8, tp=1, settings=(("ranks_per_node", 3),))
        with pytest.raises(
            ValueError, match=r"same number of consecutive ranks .* nodes \[0, 0, 0, 1"
        ):
            moe.build(case, rank)

    ranks.run(run)
