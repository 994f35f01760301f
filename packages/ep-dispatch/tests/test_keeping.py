"""A checkpointed region that keeps what was communicated: the same gradients, and nothing sent twice."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ep_dispatch import keep_communicated
from ep_dispatch import keeping as keeping_module
from ep_dispatch.collectives import reduce_over_group

COUNTED = (
    "all_to_all_single",
    "all_reduce",
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)


@contextlib.contextmanager
def collectives():
    """The names of the collectives that run meanwhile."""
    from ep_dispatch import collectives as ours

    names, before = [], {name: getattr(dist, name) for name in COUNTED if hasattr(dist, name)}
    bound = {name: getattr(ours, name) for name in ("_gather_single", "_reduce_scatter_single")}

    def counted(name, function):
        def call(*args, **kwargs):
            names.append(name)
            return function(*args, **kwargs)

        return call

    for name, function in before.items():
        setattr(dist, name, counted(name, function))
    for name, function in bound.items():
        setattr(ours, name, counted(name, function))
    try:
        yield names
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
        for name, function in bound.items():
            setattr(ours, name, function)


def region(implementation, tp_group):
    """Two layers with something between that needs the first one's values in backward."""

    def run(x, ids, weights):
        y = implementation(x.tanh(), ids, weights)
        y += x  # released models change what the experts gave in place
        z = implementation(reduce_over_group(y, tp_group).sigmoid(), ids, weights)
        return z.exp()

    return run


def gradients(run, wrap, x, ids, weights, cotangent, experts):
    experts.zero_grad()
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    with collectives() as names:
        out = wrap(run, x, ids, weights)
        forward = len(names)
        out.backward(cotangent)
    assert keeping_module._now.tape is None
    grads = [out.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())]
    return grads, names[:forward], names[forward:]


def keeping(run, *args):
    return checkpoint(run, *args, use_reentrant=False, context_fn=keep_communicated)


def compare(rank, moe, cases):
    for case in cases:
        whole, inputs = moe.whole_inputs(case)
        implementation, experts = moe.build(case, rank, whole)
        run = region(implementation, implementation.tp_group)
        given = inputs[rank // case.tp]
        plain, forward, backward = gradients(run, lambda f, *args: f(*args), *given, experts)
        found, kept_forward, kept_backward = gradients(run, keeping, *given, experts)
        for value, expected in zip(found, plain, strict=True):
            assert torch.equal(value, expected), case
        assert kept_forward == forward
        again, _, full_backward = gradients(
            run, lambda f, *args: checkpoint(f, *args, use_reentrant=False), *given, experts
        )
        assert torch.equal(again[1], plain[1])
        assert len(full_backward) > len(backward), case
        assert kept_backward == backward, case


def cases(moe, name, settings=(), **more):
    layouts = [(4, 2), (4, 1), (2, 2)]
    tokens = (13, 6, 0, 5)
    return [
        moe.Case(
            world=4, ep=ep, tp=tp, tokens=tokens[: 4 // tp], name=name, settings=settings, **more
        )
        for ep, tp in layouts
    ]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("all_to_all", ()),
        ("all_to_all", (("num_chunks", 2), ("wire_dtype", torch.bfloat16))),
        ("all_to_all", (("max_rows", 9),)),
        ("all_to_all_hierarchical", (("ranks_per_node", 2),)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*rounds")
def test_nothing_is_sent_twice(ranks, moe, name, settings):
    ranks.run(compare, moe, cases(moe, name, settings), world=4)


def test_other_routings_and_implementations(ranks, moe):
    whole = [case for case in cases(moe, "all_reduce") if case.ep == case.tp]
    ranks.run(compare, moe, cases(moe, "all_to_all", routing="first")[:1] + whole, world=4)


def test_backward_twice_and_regions_in_regions(ranks, moe):
    def run(rank, name):
        case = moe.Case(world=4, ep=4, tp=1, tokens=(5, 3, 0, 4), name=name)
        whole, inputs = moe.whole_inputs(case)
        implementation, _ = moe.build(case, rank, whole)
        hidden, ids, weights, cotangent = inputs[rank]
        inner = region(implementation, None)

        def outer(x):
            return keeping(inner, x, ids, weights) + implementation(x.cos(), ids, weights)

        found = []
        for wrap in (lambda f, x: f(x), keeping):
            x = hidden.clone().requires_grad_()
            out = wrap(outer, x)
            out.backward(cotangent, retain_graph=True)
            out.backward(cotangent)
            found.append(x.grad)
        assert torch.equal(*found)

    for name in ("all_to_all", "symmetric_memory"):
        ranks.run(run, name, world=4)


def test_a_region_that_runs_another_way_is_refused(ranks):
    def run(rank):
        group, calls = dist.group.WORLD, []

        def changing(x):
            calls.append(1)
            for _ in range(len(calls)):
                x = reduce_over_group(x, group).exp()
            return x.exp()

        out = keeping(changing, torch.ones(2, requires_grad=True))
        with pytest.raises(RuntimeError, match="does not run alike"):
            out.sum().backward()

    ranks.run(run, world=2)


def test_experts_that_change_their_rows_are_refused(ranks, moe):
    def run(rank):
        case = moe.Case(world=2, ep=2, tp=1, tokens=(5, 3))
        _, inputs = moe.whole_inputs(case)
        hidden, ids, weights, cotangent = inputs[rank]

        class Rude(moe.Experts):
            def grouped(self, rows, row_of_slot, weights, offsets):
                with torch.no_grad():
                    rows.mul_(2.0)
                return rows * self.up.sum()

        from ep_dispatch import AllToAll

        experts = Rude(4).double()
        rude = AllToAll(experts, num_local_experts=4, ep_group=dist.group.WORLD)
        out = keeping(lambda x: rude(x, ids, weights).exp(), hidden.requires_grad_())
        with pytest.raises(RuntimeError, match="changed in place"):
            out.backward(cotangent)

    ranks.run(run, world=2)
