"""`start_dispatch` and `start_combine`: what `dispatch` and `combine` give, while rows travel."""

import pytest
import torch


def start(implementation, hidden, ids, weights):
    plan = implementation.prepare(ids, weights, hidden_states=hidden)
    return implementation.start_dispatch(hidden, plan)


def test_two_micro_batches_in_flight(ranks, moe, routed):
    """Each computes while the other travels; all gradients are those of one process."""
    name, settings = routed

    def run(rank, tp, frozen):
        tokens = (7, 0, 5, 1)[: 4 // tp]
        case = moe.Case(world=4, ep=4, tp=tp, name=name, settings=settings, tokens=tokens)
        whole, inputs = moe.whole_inputs(case)
        implementation, experts = moe.build(case, rank, whole)
        hidden, ids, weights, cotangent = inputs[rank // tp]
        leaves = []
        for factor in (1.0, -0.5):
            x = (hidden * factor).requires_grad_(not frozen)
            leaves.append((x, weights.clone().requires_grad_()))
        pending = [start(implementation, x, ids, w) for x, w in leaves]
        coming = []
        for there in pending:
            received, ticket = there.wait()
            coming.append(implementation.start_combine(implementation.run_on(received), ticket))
        outs = [back.wait() for back in coming]
        sum(outs).backward(cotangent)
        for batch, (x, i, w, c) in enumerate(inputs):
            for number, factor in enumerate((1.0, -0.5)):
                y, v = (x * factor).requires_grad_(), w.clone().requires_grad_()
                out = moe.reference(whole, y, i, v)
                out.backward(c)
                if batch == rank // tp:
                    assert moe.error(outs[number], out) < 1e-12
                    assert moe.error(leaves[number][1].grad, v.grad) < 1e-12
                    assert frozen or moe.error(leaves[number][0].grad, y.grad) < 1e-12
        mine = slice(rank * 2, rank * 2 + 2)
        assert moe.error(experts.up.grad, whole.up.grad[mine]) < 1e-12
        assert moe.error(experts.down.grad, whole.down.grad[mine]) < 1e-12

    for tp, frozen in ((1, False), (2, False), (1, True)):
        ranks.run(run, tp, frozen, world=4)


class Told(torch.autograd.Function):
    """The identity, which tells when it is run backward."""

    @staticmethod
    def forward(ctx, x, events, name):
        ctx.told = events, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        events, name = ctx.told
        events.append(name)
        return grad, None, None


def test_other_work_runs_while_rows_travel_also_in_backward(ranks, moe):
    """What is called between start and wait lies between the way back's start and its end."""

    def run(rank):
        case = moe.Case(world=2, ep=2, tp=1, tokens=(5, 4))
        implementation, _ = moe.build(case, rank)
        _, inputs = moe.whole_inputs(case)
        hidden, ids, weights, cotangent = inputs[rank]
        events = []
        x, y = hidden.clone().requires_grad_(), torch.ones(3, requires_grad=True)
        plan = implementation.prepare(ids, weights)
        with moe.exchanges(events):
            there = implementation.start_dispatch(x, plan)
            first = Told.apply(y, events, "first")
            received, ticket = there.wait()
            back = implementation.start_combine(implementation.run_on(received), ticket)
            second = Told.apply(y, events, "second")
            out = back.wait()
            events.clear()
            (out * cotangent).sum().add(first.sum() + second.sum()).backward()
        assert events == ["start", "second", "end", "start", "first", "end"]

    ranks.run(run, world=2)


def test_dropped_instead_of_waited_for(ranks, moe, routed):
    """Nothing is lost, and what follows on the same group is right."""
    name, settings = routed

    def run(rank):
        case = moe.Case(world=4, ep=4, tp=1, name=name, settings=settings)
        whole, inputs = moe.whole_inputs(case)
        implementation, _ = moe.build(case, rank, whole)
        hidden, ids, weights, cotangent = inputs[rank]
        for _ in range(3):
            x = hidden.clone().requires_grad_()
            start(implementation, x, ids, weights)
            torch.full((1000,), float("nan"))  # where freed buffers were
            implementation(x, ids, weights).backward(cotangent)
            y = hidden.clone().requires_grad_()
            moe.reference(whole, y, ids, weights).backward(cotangent)
            assert moe.error(x.grad, y.grad) < 1e-12

    ranks.run(run, world=4)


def test_waited_for_twice(moe):
    case = moe.Case(world=1, ep=1, tp=1, tokens=(4,))
    implementation, _ = moe.build(case, 0)
    _, [(hidden, ids, weights, _)] = moe.whole_inputs(case)
    there = start(implementation, hidden, ids, weights)
    there.wait()
    with pytest.raises(RuntimeError, match="waited for already"):
        there.wait()
