"""Grad modes, autocast, checkpointing, and inputs that are not plain contiguous tensors."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ep_dispatch import AllReduce

ALL = [
    ("all_to_all", 4, 2),
    ("all_to_all", 4, 4),
    ("all_reduce", 4, 4),
    ("auto", 4, 4),
    ("auto", 8, 2),
    ("symmetric_memory", 4, 2),
]


def cases(moe, **more):
    tokens = (13, 6, 0, 11)
    return [moe.Case(name=n, ep=ep, tp=tp, tokens=tokens[: 8 // tp], **more) for n, ep, tp in ALL]


def each(rank, moe, cases, call=None, prepare=None, bound=None):
    for case in cases:
        try:
            moe.check(rank, case, call, prepare, bound)
        except BaseException as failure:
            failure.add_note(str(case))
            raise


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(ranks, moe, reentrant):
    """Recomputed in backward, with the collectives of the recomputation in the same order."""

    def call(implementation, *args):
        return checkpoint(implementation, *args, use_reentrant=reentrant)

    ranks.run(each, moe, cases(moe), call)
    ranks.run(each, moe, cases(moe, routing="first"), call)


def test_two_layers_under_one_checkpoint(ranks, moe):
    """Layers that follow each other in one checkpointed region recompute alike on all ranks."""

    def two(rank, name, ep, tp):
        case = moe.Case(name=name, ep=ep, tp=tp, routing="first")
        whole, inputs = moe.whole_inputs(case)
        layers = [moe.build(case, rank, whole) for _ in range(2)]
        hidden, ids, weights, cotangent = inputs[rank // tp]
        grads = []
        for wrap in (lambda f, x: f(x), functools.partial(checkpoint, use_reentrant=False)):
            x = hidden.clone().requires_grad_()
            for _, experts in layers:
                experts.zero_grad()

            def both(x):
                for layer, _ in layers:
                    x = x + layer(x.tanh(), ids, weights)
                return x

            wrap(both, x).backward(cotangent)
            grads.append([x.grad, *(p.grad for _, e in layers for p in e.parameters())])
        for plain, recomputed in zip(*grads, strict=True):
            assert torch.equal(plain, recomputed)

    for name, ep, tp in ALL:
        ranks.run(two, name, ep, tp)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(ranks, moe, mode):
    """The same output, no history, and `auto` takes `all_reduce` where a batch is shared."""

    def call(implementation, *args):
        with mode():
            if type(implementation).__name__ == "Auto":
                shares = implementation.ep_size == implementation.tp_size
                assert (type(implementation.chosen()).__name__ == "AllReduce") == shares
            out = implementation(*args)
        assert not out.requires_grad
        return out

    nothing = {"hidden_grad": False, "weights_grad": False, "experts_grad": False}
    ranks.run(each, moe, cases(moe, **nothing), call)


def test_inputs_made_in_inference_mode(ranks, moe):
    def prepare(*args):
        with torch.inference_mode():
            return [x.detach().clone() for x in args]

    def call(implementation, *args):
        with torch.inference_mode():
            return implementation(*args)

    nothing = {"hidden_grad": False, "weights_grad": False, "experts_grad": False}
    ranks.run(each, moe, cases(moe, **nothing), call, prepare)


def test_autocast(ranks, moe):
    """Experts compute in bf16; the hidden states and the output stay float32."""

    def call(implementation, *args):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return implementation(*args)

    ranks.run(each, moe, cases(moe, dtype=torch.float32), call, None, 3e-2)


def test_inputs_that_are_not_contiguous(ranks, moe):
    def prepare(x, ids, w):
        wide = torch.stack([x, x.detach()], dim=2)
        return wide[:, :, 0], ids.T.contiguous().T, torch.cat([w, w.detach()], 1)[:, : w.shape[1]]

    ranks.run(each, moe, cases(moe), None, prepare)


def test_int32_ids(ranks, moe):
    ranks.run(each, moe, cases(moe), None, lambda x, ids, w: (x, ids.int(), w))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dtensor_inputs(ranks, moe, sequence_parallel):
    """Hidden states as DTensors over TP: the output is one too, placed alike."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def run(rank, name, ep, tp):
        mesh = init_device_mesh("cpu", (8 // tp, tp), mesh_dim_names=("dp", "tp"))["tp"]
        placement = Shard(0) if sequence_parallel else Replicate()

        def distribute(x, tokens):
            shape, stride = (tokens, x.shape[1]), (x.shape[1], 1)
            return DTensor.from_local(x, mesh, [placement], shape=shape, stride=stride)

        case = moe.Case(name=name, ep=ep, tp=tp, sequence_parallel=sequence_parallel,
                        tokens=(13, 6, 9, 11)[: 8 // tp])  # fmt: skip
        tokens = case.tokens[rank // tp]

        def call(implementation, x, ids, w):
            out = implementation(
                distribute(x, tokens), distribute(ids, tokens), distribute(w, tokens)
            )
            assert isinstance(out, DTensor)
            assert out.placements == (placement,)
            assert out.shape == (tokens, 8)
            return out.to_local()

        moe.check(rank, case, call)

    for name, ep, tp in ALL:
        if not (sequence_parallel and name == "all_reduce"):
            ranks.run(run, name, ep, tp)


def test_dtensor_on_other_ranks_is_refused(ranks, moe):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    def run(rank):
        case = moe.Case()
        implementation, _ = moe.build(case, rank)
        mesh = init_device_mesh("cpu", (8,))
        x = DTensor.from_local(torch.zeros(3, 8), mesh, [Replicate()])
        with pytest.raises(ValueError, match="ranks that share the batch"):
            implementation(x, torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2))

    ranks.run(run)


def test_output_may_be_changed_in_place(ranks, moe):
    def call(implementation, *args):
        return implementation(*args).mul_(1)

    ranks.run(each, moe, cases(moe), call)
    ranks.run(each, moe, [moe.Case(world=1, ep=1, tp=1, tokens=(5,), name=n)
                          for n in ("all_to_all", "all_reduce")], call, world=1)  # fmt: skip


def test_backward_twice(ranks, moe):
    """A graph that is kept gives the same gradients again."""

    def run(rank):
        for case in cases(moe):
            whole, inputs = moe.whole_inputs(case)
            implementation, experts = moe.build(case, rank, whole)
            hidden, ids, weights, cotangent = inputs[rank // case.tp]
            x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
            out = implementation(x, ids, w)
            leaves = [x, w, *experts.parameters()]
            first = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
            second = torch.autograd.grad(out, leaves, cotangent)
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    ranks.run(run)


def test_all_reduce_never_asks_the_device():
    """On tensors without data, which raise if anything reads them: no host synchronization."""
    implementation = AllReduce(
        lambda rows, ids, weights: rows * weights.sum(1, True), num_local_experts=4
    )
    x, w = torch.empty(3, 8, device="meta"), torch.empty(3, 2, device="meta", requires_grad=True)
    ids = torch.empty(3, 2, dtype=torch.long, device="meta")
    out = implementation(x, ids, w)
    out.backward(torch.empty_like(out))
    assert w.grad.shape == w.shape
    with pytest.raises(RuntimeError, match="meta"):
        ids.tolist()


@pytest.mark.parametrize(
    ("name", "tp", "calls"),
    [("all_to_all", 2, 1), ("all_to_all", 2, 2), ("symmetric_memory", 2, 2), ("all_reduce", 4, 2)],
)
def test_a_near_tie_in_the_recomputed_router_changes_nothing(ranks, moe, name, tp, calls):
    """The recomputation routes as the forward did, also in a second backward and a second call."""

    def run(rank):
        case = moe.Case(name=name, tp=tp, routing="random")
        whole, inputs = moe.whole_inputs(case)
        implementation, _ = moe.build(case, rank, whole)
        hidden, ids, weights, cotangent = inputs[rank // case.tp]
        flips = []

        def region(x, w):
            for _ in range(calls):
                chosen = ids.roll(len(flips), dims=0) if flips else ids  # another router, then
                flips.append(1)
                x = implementation(x, chosen, w)
            return x

        def reference(x, w):
            for number in range(calls):
                x = moe.reference(whole, x, ids.roll(number, dims=0) if number else ids, w)
            return x

        x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        out = checkpoint(region, x, w, use_reentrant=False)
        assert implementation._memory._routings
        out.backward(cotangent, retain_graph=True)
        out.backward(cotangent)
        assert len(flips) == 3 * calls
        y, v = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        reference(y, v).backward(cotangent)
        assert moe.error(x.grad, 2 * y.grad) < 1e-12
        assert moe.error(w.grad, 2 * v.grad) < 1e-12
        assert not implementation._memory._routings, "it goes with the graph"

    ranks.run(run)
