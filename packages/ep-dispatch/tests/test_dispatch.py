"""`all_to_all` in three phases: plain data, traffic, calls in flight, gradients of idle experts."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn


def test_rows_come_grouped_by_expert_with_their_weights(ranks, moe):
    """Each rank gets exactly the rows routed to its experts, with offsets, ids and weights."""

    def run(rank, case):
        implementation, _ = moe.build(case, rank)
        _, inputs = moe.whole_inputs(case)
        hidden, ids, weights, _ = inputs[rank // case.tp]
        plan = implementation.prepare(ids, weights)
        received, ticket = implementation.dispatch(hidden, plan)
        local = case.experts // case.ep
        members = range(
            rank // case.ep * case.ep // case.tp, (rank // case.ep + 1) * case.ep // case.tp
        )
        start, slots = 0, received.by_expert()
        for expert, end in enumerate(received.offsets.tolist()):
            expected = []
            for batch in members:
                x, i, w, _ = inputs[batch]
                token, slot = torch.where(i == rank % case.ep * local + expert)
                expected += [
                    [*x[t].tolist(), w[t, s].item()] for t, s in zip(token, slot, strict=True)
                ]
            got = torch.cat([slots[start:end], received.weights[start:end, None]], 1).tolist()
            assert sorted(got) == sorted(expected)
            assert (received.expert_ids[start:end] == expert).all()
            start = end
        assert start == len(slots) == len(received.weights)
        assert plan.num_rows == len(received.rows)
        # A token comes once from each rank, whatever number of its experts is here.
        came = [
            (batch * case.tp + t // (-(-len(i) // case.tp)), t)
            for batch in members
            for i in [inputs[batch][1]]
            for t in range(len(i))
            if ((i[t] >= 0) & (i[t] // local == rank % case.ep)).any()
        ]
        assert len(received.rows) == len(came)
        # The identity as experts: every token times the sum of its weights.
        out = implementation.combine(received.sum(slots * received.weights[:, None]), ticket)
        kept = weights.masked_fill(ids < 0, 0).sum(1, keepdim=True)
        assert moe.error(out, hidden * kept) < 1e-12

    for routing in ("random", "one", "skipped", "repeated"):
        ranks.run(run, moe.Case(routing=routing))


@pytest.mark.parametrize("hidden_grad", [True, False])
def test_rows_sent_are_those_that_the_routing_needs(ranks, moe, hidden_grad):
    """Rows over all-to-alls are the distinct (token, owner) pairs, forward and backward; beside them a
    small table, and an integer and a weight for each slot."""

    def run(rank, case):
        original, sent = dist.all_to_all_single, []

        def counted(output, input, *args, **kwargs):
            sent.append((str(input.dtype).removeprefix("torch."), input.numel()))
            return original(output, input, *args, **kwargs)

        implementation, _ = moe.build(case, rank)
        _, inputs = moe.whole_inputs(case)
        hidden, ids, weights, cotangent = inputs[rank // case.tp]
        plan = implementation.prepare(ids, weights)
        dist.all_to_all_single = counted
        try:
            x = hidden.requires_grad_(case.hidden_grad)
            out = implementation(x, ids, weights)
            forward, sent[:] = list(sent), []
            out.backward(cotangent)
        finally:
            dist.all_to_all_single = original
        first, last = plan.first, plan.last
        local = case.experts // case.ep
        mine = ids[first:last].tolist()
        rows = sum(len({e // local for e in row if e >= 0}) for row in mine)
        slots = sum(e >= 0 for row in mine for e in row)
        table = ("int64", case.ep * (local + 11))
        assert forward == [
            table, ("uint8", slots * 12), ("float64", rows * 8), ("float64", plan.num_rows * 8)
        ]  # fmt: skip
        assert sent == [("float64", rows * 8)] + [("float64", plan.num_rows * 8)] * case.hidden_grad

    for routing in ("random", "first", "one", "repeated", "skipped"):
        case = moe.Case(routing=routing, hidden_grad=hidden_grad, weights_grad=False)
        ranks.run(run, case)


def test_micro_batches_in_flight(ranks, moe):
    """Two calls interleaved on one object: dispatch, dispatch, combine, combine, backward twice."""

    def run(rank):
        case = moe.Case()
        whole, inputs = moe.whole_inputs(case)
        implementation, _ = moe.build(case, rank, whole)
        hidden, ids, weights, cotangent = inputs[rank // case.tp]
        pairs = []
        for factor in (1.0, -0.5):
            x = (hidden * factor).requires_grad_()
            pairs.append((x, implementation.prepare(ids, weights)))
        sent = [implementation.dispatch(x, plan) for x, plan in pairs]
        computed = [implementation.run_on(received) for received, _ in sent]
        outs = [implementation.combine(c, t) for c, (_, t) in zip(computed, sent, strict=True)]
        for out in reversed(outs):
            out.backward(cotangent)
        for x, _ in pairs:
            y = x.detach().clone().requires_grad_()
            moe.reference(whole, y, ids, weights).backward(cotangent)
            assert moe.error(x.grad, y.grad) < 1e-12

    ranks.run(run)


def test_plan_is_plain_data(ranks, moe):
    """A plan that was saved, and made without gradients, serves again, and again."""

    def run(rank):
        case = moe.Case()
        whole, inputs = moe.whole_inputs(case)
        implementation, _ = moe.build(case, rank, whole)
        hidden, ids, weights, cotangent = inputs[rank // case.tp]
        with torch.no_grad():
            plan = implementation.prepare(ids, weights)
        file = io.BytesIO()
        torch.save(plan, file)
        file.seek(0)
        plan = torch.load(file, weights_only=False)
        for factor in (1.0, -0.5):
            x = (hidden * factor).requires_grad_()
            received, ticket = implementation.dispatch(x, plan)
            out = implementation.combine(implementation.run_on(received), ticket)
            out.backward(cotangent)
            y = (hidden * factor).requires_grad_()
            moe.reference(whole, y, ids, weights).backward(cotangent)
            assert moe.error(x.grad, y.grad) < 1e-12

    ranks.run(run)


@pytest.mark.parametrize("phases", [False, True])
def test_recorded_expert_ids_are_replayed(ranks, moe, phases):
    """Router replay: another router's choice with this router's weights. Its gradient is that of one
    process; slots that were not recorded (-1) are left out."""

    def run(rank, case):
        whole, inputs = moe.whole_inputs(case)
        implementation, _ = moe.build(case, rank, whole)
        hidden, recorded, _, cotangent = inputs[rank // case.tp]
        grads = []
        for ours in (True, False):
            torch.manual_seed(3)
            router = nn.Linear(8, case.experts, dtype=torch.float64)
            x, ids = hidden.clone().requires_grad_(), recorded.int() if ours else recorded
            scores = router(x).softmax(-1)
            assert not torch.equal(scores.topk(case.top_k).indices, recorded)
            weights = scores.gather(1, ids.long().clamp(min=0))
            if not ours:
                out = moe.reference(whole, x, ids, weights)
            elif phases:
                received, ticket = implementation.dispatch(x, implementation.prepare(ids, weights))
                out = implementation.combine(implementation.run_on(received), ticket)
            else:
                out = implementation(x, ids, weights)
            out.backward(cotangent)
            grads.append([out, x.grad, *(p.grad for p in router.parameters())])
        for one, other in zip(*grads, strict=True):
            assert moe.error(one, other) < 1e-12

    for name, tp in (("all_to_all", 2), ("all_reduce", 4)):
        if name == "all_to_all" or not phases:
            ranks.run(run, moe.Case(name=name, tp=tp, routing="skipped"))


def test_a_plan_with_gradients_serves_twice(ranks, moe):
    """Two dispatches of one plan: the routing weights get the sum of both gradients."""

    def run(rank):
        case = moe.Case()
        whole, inputs = moe.whole_inputs(case)
        implementation, _ = moe.build(case, rank, whole)
        hidden, ids, weights, cotangent = inputs[rank // case.tp]
        w, v = (weights.clone().requires_grad_() for _ in range(2))
        plan = implementation.prepare(ids, w)
        outs = []
        for factor in (1.0, -0.5):
            received, ticket = implementation.dispatch(hidden * factor, plan)
            outs.append(implementation.combine(implementation.run_on(received), ticket))
        sum(outs).backward(cotangent)
        sum(moe.reference(whole, hidden * f, ids, v) for f in (1.0, -0.5)).backward(cotangent)
        assert moe.error(w.grad, v.grad) < 1e-12

    ranks.run(run)


class ExpertList(nn.Module):
    """One module per expert: an idle one would have no gradient of its own."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(count))

    def forward(self, rows, ids, weights):
        out = torch.zeros_like(rows)
        for expert in ids.unique().tolist():
            if expert < len(self.layers):
                row, slot = torch.where(ids == expert)
                out = out.index_add(
                    0, row, self.layers[expert](rows[row]) * weights[row, slot, None]
                )
        return out


@pytest.mark.parametrize(("name", "tp"), [("all_to_all", 2), ("all_reduce", 4)])
def test_idle_experts_have_a_gradient_of_zero(ranks, moe, name, tp):
    """Every parameter has one, also where it is not finite: 0 * inf is never computed."""

    def run(rank):
        case = moe.Case(name=name, tp=tp, routing="one")
        experts = ExpertList(2)
        idle = list(experts.layers[0].parameters()) if rank % 4 == 3 else list(experts.parameters())
        with torch.no_grad():
            for parameter in idle:
                parameter.fill_(float("inf"))
        for forward in (experts, experts.forward):
            experts.zero_grad()
            implementation, _ = moe.build(case, rank, experts_forward=forward)
            _, inputs = moe.whole_inputs(case)
            hidden, ids, weights, cotangent = inputs[rank // case.tp]
            x = hidden.clone().requires_grad_()
            out = implementation(x, ids, weights)
            out.backward(cotangent)
            assert out.isfinite().all()
            assert x.grad.isfinite().all()
            assert all((p.grad == 0).all() for p in idle)
            if rank % 4 == 3:
                assert (experts.layers[1].weight.grad != 0).any()

    ranks.run(run)


@pytest.mark.parametrize(("name", "tp"), [("all_to_all", 1), ("all_to_all", 2), ("all_reduce", 2)])
@pytest.mark.parametrize("kind", ["fused", "list"])
def test_fsdp_over_expert_copies(ranks, moe, name, tp, kind):
    """FSDP2 reduces the experts' gradients over their copies, though some got no token; the reduction
    may be put off to the last micro-batch."""

    def run(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        case = moe.Case(
            name=name, ep=2, tp=tp, experts=4, tokens=(5, 1, 0, 3, 2, 1, 7, 0)[: 8 // tp]
        )
        whole, inputs = moe.whole_inputs(case)
        implementation, experts = moe.build(case, rank, whole)
        layer = MoELayer(ExpertList(2) if kind == "list" else experts, implementation)
        if kind == "list":
            torch.manual_seed(rank % 2)
            for parameter in layer.experts.parameters():
                nn.init.normal_(parameter)
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("copies", "ep"))["copies"]
        fully_shard(layer.experts, mesh=mesh)
        hidden, ids, weights, cotangent = inputs[rank // case.tp]
        # All tokens to one expert of rank 0 of each group: another in copy 0 in the first step.
        for step, last in ((0, False), (1, True)):
            layer.experts.set_requires_gradient_sync(last)
            chosen = torch.full_like(ids, 0 if step or rank // case.ep else 1)
            layer(hidden.clone().requires_grad_(), chosen, weights).backward(cotangent)
            for batch, (x, i, w, c) in enumerate(inputs):
                chosen = torch.full_like(i, 0 if step or batch * tp // case.ep else 1)
                moe.reference(whole, x, chosen, w).backward(c)
        for which, parameter in layer.experts.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.full_tensor()
            if rank % 2:
                assert (gradient == 0).all()
            elif kind == "fused":  # FSDP2's mean over the four copies
                mine = slice(rank % 2 * 2, rank % 2 * 2 + 2)
                assert moe.error(gradient * 4, whole.get_parameter(which).grad[mine]) < 1e-12

    ranks.run(run)


class MoELayer(nn.Module):
    """Experts whose forward is replaced by the implementation, so that FSDP2's hooks run around it."""

    def __init__(self, experts, implementation):
        super().__init__()
        self.experts = experts
        forward = experts.forward
        implementation.experts_forward, implementation.experts = forward, experts
        experts.forward = implementation.__call__

    def forward(self, *args):
        return self.experts(*args)


def test_a_group_of_one_rank(moe):
    """Without torch.distributed at all."""
    for name in ("all_to_all", "all_reduce", "auto"):
        case = moe.Case(world=1, ep=1, tp=1, tokens=(9,), name=name)
        whole, inputs = moe.whole_inputs(case)
        implementation, experts = moe.build(case, 0, whole)
        hidden, ids, weights, cotangent = inputs[0]
        x = hidden.clone().requires_grad_()
        implementation(x, ids, weights).backward(cotangent)
        y = hidden.clone().requires_grad_()
        moe.reference(whole, y, ids, weights).backward(cotangent)
        assert moe.error(x.grad, y.grad) < 1e-12
        assert moe.error(experts.up.grad, whole.up.grad) < 1e-12


def test_masked_routes_have_no_weight_and_get_no_gradient(ranks, moe):
    """`all_reduce`: whatever an expert makes of a slot that is not its own, even NaN, stays there."""

    def run(rank):
        case = moe.Case(name="all_reduce", tp=4)
        seen = []

        def poisonous(rows, ids, weights):
            skipped = ids == 2
            seen.append((skipped, weights))
            # NaN times the weight in backward, where the slot is skipped.
            poison = torch.where(skipped, float("nan"), 1.0)
            used = torch.where(skipped, (weights * poison).nan_to_num(), weights * (ids + 1))
            return rows * used.sum(1, keepdim=True)

        implementation, _ = moe.build(case, rank, experts_forward=poisonous)
        _, inputs = moe.whole_inputs(case)
        hidden, ids, weights, cotangent = inputs[rank // case.tp]
        w = weights.clone().requires_grad_()
        out = implementation(hidden, ids, w)
        out.backward(cotangent)
        ((skipped, given),) = seen
        assert (given[skipped] == 0).all()
        assert moe.error(out, hidden * (weights * (ids % 2 + 1)).sum(1, keepdim=True)) < 1e-12
        expected = (hidden * cotangent).sum(1, keepdim=True) * (ids % 2 + 1)
        assert moe.error(w.grad, expected) < 1e-12

    ranks.run(run)
