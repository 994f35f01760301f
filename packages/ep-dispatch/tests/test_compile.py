"""torch.compile: few graphs, and none for new sizes."""

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ep_dispatch import AllReduce, AllToAll, keep_communicated
from ep_dispatch.collectives import (
    copy_to_group,
    gather_over_group,
    reduce_over_group,
    reduce_scatter_over_group,
    split_over_group,
)
from ep_dispatch.routing import transpose_index
from ep_dispatch.rows import gather_rows, sum_rows

SIZES = (5, 9, 17, 2, 40)


def compiled(function, **options):
    """The function compiled, with a list that grows by each graph."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    return torch.compile(function, backend=backend, **options), graphs


def test_row_operators_are_one_graph_for_all_sizes():
    """The first is compiled for its size, the second for any."""

    def there_and_back(x, *index):
        return sum_rows(2 * gather_rows(x, *index), *index)

    call, graphs = compiled(there_and_back, fullgraph=True)
    for tokens in SIZES:
        index = torch.randint(0, tokens, (3 * tokens + 1,))
        both = index, *transpose_index(index, tokens)
        x = torch.randn(tokens, 8, requires_grad=True)
        out = call(x, *both)
        torch.testing.assert_close(out, there_and_back(x, *both))
        out.sum().backward()
        torch.testing.assert_close(x.grad, (2 * both[2].diff()[:, None]).expand(-1, 8).float())
    assert len(graphs) == 2


def scale(rows, ids, weights):
    return rows * ((ids + 1) * weights).sum(1, keepdim=True)


def steps(moe, dispatch):
    """Compiled calls of a layer in a model, with new sizes and routings, beside those as written."""

    def block(x, ids, weights):
        return x + dispatch(2 * x, ids, weights.softmax(-1))

    call, graphs = compiled(block)
    counts = []
    for seed, tokens in enumerate(SIZES):
        torch.manual_seed(seed)
        ids = torch.randint(0, 4, (tokens, 2)) if seed else torch.zeros(tokens, 2, dtype=int)
        given = torch.randn(tokens, 8), torch.rand(tokens, 2)
        found = []
        for function in (call, block):
            x, weights = (leaf.clone().requires_grad_() for leaf in given)
            out = function(x, ids, weights)
            out.square().sum().backward()
            found.append((out, x.grad, weights.grad))
        counts.append(len(graphs))
        for one, other in zip(*found, strict=True):
            assert moe.error(one, other) < 1e-6
    return counts


def test_a_layer_breaks_the_graph_once_whatever_the_routing(ranks, moe):
    """Two graphs, before `all_to_all` and behind it: compiled for one size, then for any.

    What it does between works with sizes that the host reads from the routing.
    """
    dispatch = AllToAll(scale, num_local_experts=4)
    assert steps(moe, dispatch) == [2, 4, 4, 4, 4]

    def run(rank):
        implementation, _ = moe.build(moe.Case(world=2, ep=2, tp=1, experts=4), rank,
                                      experts_forward=scale, experts=None)  # fmt: skip
        return steps(moe, implementation)

    assert ranks.run(run, world=2) == [[2, 4, 4, 4, 4]] * 2


def test_a_decoding_step_is_one_graph_with_its_collective(ranks, moe):
    """`all_reduce` without gradients; with them, too, on one rank."""
    call, graphs = compiled(AllReduce(scale, num_local_experts=4), fullgraph=True)
    for tokens in SIZES:
        x = torch.randn(tokens, 8, requires_grad=True)
        given = x, torch.randint(0, 4, (tokens, 2)), torch.rand(tokens, 2)
        assert moe.error(call(*given), scale(*given)) < 1e-6
    assert len(graphs) == 2

    def run(rank):
        case = moe.Case(world=2, ep=2, tp=2, experts=4, name="all_reduce")
        implementation, _ = moe.build(case, rank, experts_forward=scale, experts=None)
        call, graphs = compiled(implementation, fullgraph=True)
        with torch.no_grad():
            for tokens in SIZES:
                torch.manual_seed(tokens)
                given = (
                    torch.randn(tokens, 8),
                    torch.randint(0, 4, (tokens, 2)),
                    torch.rand(tokens, 2),
                )
                assert moe.error(call(*given), implementation(*given)) < 1e-6
        assert len(graphs) == 2
        assert "all_reduce" in graphs[-1].code

    ranks.run(run, world=2)


def test_phases_break_the_graph_once_each(moe):
    """For experts that are compiled between them: a graph before `prepare`, and one behind each phase
    (one of two phases in a row is empty)."""
    layer = AllToAll(scale, num_local_experts=4)

    def block(x, ids, weights):
        plan = layer.prepare(ids, weights)
        received, ticket = layer.dispatch(2 * x, plan)
        slots = received.by_expert() * received.weights[:, None]
        return layer.combine(received.sum(slots), ticket) + x

    call, graphs = compiled(block)
    for tokens in SIZES:
        x, ids, w = torch.randn(tokens, 8), torch.randint(0, 4, (tokens, 2)), torch.rand(tokens, 2)
        assert moe.error(call(x, ids, w), x + 2 * x * w.sum(1, keepdim=True)) < 1e-6
    assert len(graphs) == 2 * 3


def test_collectives_are_operators_that_a_recomputation_does_not_repeat(ranks):
    """Uneven and empty chunks; a checkpointed region takes from its tape what its graph asks for."""

    def run(rank):
        group = dist.group.WORLD

        def block(x):
            parts = split_over_group(copy_to_group(x.sin(), group), group)
            whole = gather_over_group(parts.exp(), group, size=x.shape[0], partial_grad=True)
            summed = reduce_over_group((rank + 1) * whole.cos(), group)
            return reduce_scatter_over_group(summed * x, group, dim=1).sin()

        call, graphs = compiled(block, fullgraph=True)
        sent = []

        def counted(*args, **kwargs):
            sent.append(1)
            return reduce(*args, **kwargs)

        reduce, dist.all_reduce = dist.all_reduce, counted
        try:
            for tokens in SIZES[:-1]:
                found = []
                for function in (block, call):
                    x = torch.linspace(0, 3, tokens * 3, dtype=torch.float64).view(tokens, 3)
                    x.requires_grad_()
                    out = checkpoint(function, x, use_reentrant=False, context_fn=keep_communicated)
                    out.square().sum().backward()
                    found.append((out.detach(), x.grad, len(sent)))
                    sent.clear()
                for one, other in zip(*found, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
        finally:
            dist.all_reduce = reduce
        assert found[0][2] == 2  # one in forward, one in backward
        assert len(graphs) <= 3
        assert "ep.all_gather" in graphs[0].print_readable(False)

    ranks.run(run, world=2)
