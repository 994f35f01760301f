"""Rows written into other ranks' memory: equal to one process, and safe from stale rows, races and overflow."""

import importlib.util
import os
import random
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ep_dispatch import SymmetricMemory, symmetric_exchange, symmetric_memory
from ep_dispatch import symmetric_buffers as buffers
from ep_dispatch.symmetric_buffers import SharedBuffer

NAME = "symmetric_memory"
SHARED = Path("/dev/shm")


def layout(moe, ep, tp, tokens=(13, 6, 0, 11), world=4, **more):
    return moe.Case(name=NAME, world=world, ep=ep, tp=tp, tokens=tokens[: world // tp], **more)


def settings(**more):
    return tuple(more.items())


class Deferred(SymmetricMemory):
    """As on CUDA: sizes, ids and counts stay on the device."""

    def _asks(self, device):
        return False


@pytest.fixture(autouse=True)
def nothing_left():
    """No file is left in the directory of shared memory, whatever the test did."""
    before = left()
    yield
    assert left() <= before


def left():
    return set(SHARED.glob("ep-dispatch-*"))


@pytest.mark.parametrize(("ep", "tp"), [(4, 1), (4, 2), (4, 4), (2, 1), (2, 2)])
def test_equals_one_process(ranks, moe, ep, tp):
    """K more and less than P, each layer in the memory that the one before left full of NaN."""

    def run(rank):
        routings = ("random", "one", "repeated", "first", "skipped")
        for case in [layout(moe, ep, tp, routing=routing) for routing in routings]:
            moe.check(rank, case, poisoned)
        moe.check(rank, layout(moe, ep, tp, sequence_parallel=True), poisoned)
        moe.check(rank, layout(moe, ep, tp, settings=settings(max_tokens=20)), poisoned)
        enough = settings(max_rows_per_pair=13 if tp == 1 else 7)
        moe.check(rank, layout(moe, ep, tp, routing="first", settings=enough), poisoned)
        moe.check(rank, layout(moe, ep, tp, tokens=(0,) * 4), poisoned)
        moe.check(rank, layout(moe, ep, tp, tokens=(1, 0, 0, 0), routing="one"), poisoned)

    ranks.run(run, world=4)


def poisoned(implementation, *args):
    implementation(*(x.detach() for x in args))  # so that there is memory
    for devices in buffers._held.values():
        for held in devices.values():
            # NaN in float64 and, in int32, experts of this rank.
            own = implementation.ep_rank * implementation.num_local_experts
            held.buffer.words.fill_(0x7FF8 << 48 | own)
    dist.barrier()
    return implementation(*args)


@pytest.mark.parametrize(("ep", "tp"), [(4, 2), (2, 1)])
def test_sizes_of_the_worst_case_change_nothing(ranks, moe, ep, tp):
    """As on CUDA, where they are kept from end to end."""

    def run(rank):
        for routing in ("random", "one", "first", "skipped"):
            case = layout(moe, ep, tp, routing=routing, settings=settings(max_tokens=16))
            moe.check(rank, case, lambda implementation, *args: deferred(implementation)(*args))

    def deferred(implementation):
        implementation.__class__ = Deferred
        return implementation

    ranks.run(run, world=4)


def test_no_host_synchronization(monkeypatch):
    """On tensors without data, which raise if anything reads them: forward and backward."""

    class WithoutData(Deferred):
        def _problem(self, *_):
            return None

    class Memory(buffers.Buffer):
        words = torch.empty(1 << 16, dtype=torch.int64, device="meta")

        def put(self, rows, place, capacity, header):
            assert capacity == 5
            assert rows.shape[:2] == place.shape

        def barrier(self, group):
            pass

    class Group:
        pass

    monkeypatch.setattr(symmetric_exchange, "shared_buffer", lambda *_, **__: Memory())
    monkeypatch.setattr(symmetric_memory._Alarm, "note", lambda *_: None)
    implementation = WithoutData(
        lambda rows, ids, weights: rows * (weights * (ids < 2)).sum(1, keepdim=True),
        num_local_experts=2,
        max_tokens=5,
    )
    implementation.ep_group, implementation.ep_size, implementation.num_experts = Group(), 2, 4
    x, w = (torch.empty(3, size, device="meta", requires_grad=True) for size in (8, 2))
    ids = torch.empty(3, 2, dtype=torch.int64, device="meta")
    out = implementation(x, ids, w)
    out.backward(torch.empty_like(out))
    assert (out.shape, x.grad.shape, w.grad.shape) == (x.shape, x.shape, w.shape)
    with pytest.raises(RuntimeError, match="meta"):
        ids.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_odd_widths(ranks, moe, dtype):
    """Rows and weights of any size in bytes, weights of another dtype, sums in float32 or wider."""

    def scale(rows, ids, weights):
        return rows * (weights * (ids < 2)).sum(1, keepdim=True).to(rows.dtype)

    def run(rank):
        ep_group, _ = moe.groups(layout(moe, 4, 1), rank)
        for width, slots in ((1, 1), (3, 5), (7, 2), (0, 2)):
            implementation = SymmetricMemory(scale, num_local_experts=2, ep_group=ep_group)
            torch.manual_seed(rank)
            hidden = torch.randn(6, width).to(dtype).requires_grad_()
            ids = torch.rand(6, 8).topk(slots).indices
            weights = torch.rand(6, slots, requires_grad=True)
            out = implementation(hidden, ids, weights)
            cotangent = torch.ones_like(out)
            out.backward(cotangent)
            expected = hidden.double() * weights.double().sum(1, keepdim=True)
            bound = 4 * max(torch.finfo(x).eps for x in (dtype, weights.dtype))
            assert moe.error(out, expected) <= bound
            assert moe.error(hidden.grad, weights.sum(1, keepdim=True).expand(6, width)) <= bound
            assert (
                moe.error(weights.grad, hidden.sum(1, keepdim=True).expand(6, slots)) <= 3 * bound
            )

    ranks.run(run, world=4)


def test_ranks_may_have_other_numbers_of_slots(ranks, moe):
    def run(rank):
        ep_group, _ = moe.groups(layout(moe, 4, 1), rank)
        implementation = SymmetricMemory(
            lambda rows, ids, weights: rows * (weights * (ids < 2)).sum(1, keepdim=True),
            num_local_experts=2,
            ep_group=ep_group,
        )
        hidden, ids = torch.ones(3, 4), torch.randint(0, 8, (3, 1 + rank))
        weights = torch.ones(3, 1 + rank, requires_grad=True)
        out = implementation(hidden, ids, weights)
        assert (out == 1 + rank).all()
        out.sum().backward()
        assert (weights.grad == 4).all()

    ranks.run(run, world=4)


def test_frozen_parts(ranks, moe):
    """Whatever is frozen, and where: all ranks take part in each exchange."""
    subsets = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]
    cases = [
        layout(
            moe,
            4,
            2,
            routing="first",
            hidden_grad=a,
            weights_grad=b,
            experts_grad=c,
            settings=given,
        )
        for a, b, c in subsets
        for given in ((), settings(max_tokens=13))
    ]
    cases += [
        layout(moe, 4, 1, frozen_batches=batches, frozen_ranks=frozen)
        for batches, frozen in (((0, 3), ()), ((1,), (0, 2, 3)), ((0, 1, 2, 3), (0, 1)))
    ]
    ranks.run(moe.check_all, cases, world=4)


@pytest.mark.parametrize("reverse", [True, False])
def test_calls_in_flight_share_the_memory(ranks, moe, reverse):
    """Layers of several widths and batches of several sizes; backward in either order."""

    def run(rank):
        random.seed(rank)
        slow = {}
        for name in ("put", "barrier"):
            slow[name] = getattr(SharedBuffer, name)

            def wrapped(self, *args, original=slow[name]):
                time.sleep(random.random() * 0.004)  # so that ranks are far apart
                return original(self, *args)

            setattr(SharedBuffer, name, wrapped)
        try:
            for _ in range(3):
                calls = []
                for tokens in ((4, 0, 9, 2), (30, 1, 2, 3), (5, 5, 5, 5)):
                    case = layout(moe, 4, 1, tokens=tokens)
                    whole, inputs = moe.whole_inputs(case)
                    implementation, _ = moe.build(case, rank, whole)
                    hidden, ids, weights, cotangent = inputs[rank]
                    x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
                    out = implementation(x, ids, w)
                    hidden.requires_grad_()
                    weights.requires_grad_()
                    expected = moe.reference(whole, hidden, ids, weights)
                    expected.backward(cotangent)
                    calls.append((out, expected, cotangent, x, hidden, w, weights))
                for out, expected, cotangent, x, hidden, w, weights in calls[
                    :: -1 if reverse else 1
                ]:
                    out.backward(cotangent)
                    assert moe.error(out, expected) < 1e-12
                    assert moe.error(x.grad, hidden.grad) < 1e-12
                    assert moe.error(w.grad, weights.grad) < 1e-12
        finally:
            for name, original in slow.items():
                setattr(SharedBuffer, name, original)

    ranks.run(run, world=4)


def test_layers_share_one_buffer(ranks, moe):
    """It grows for a larger batch, serves smaller ones, and is made again after `release_buffers`."""

    def run(rank):
        ep_group, _ = moe.groups(layout(moe, 4, 1), rank)
        layers = [
            SymmetricMemory(
                lambda rows, ids, weights: rows * (ids < 2) * weights,
                num_local_experts=2,
                ep_group=ep_group,
            )
            for _ in range(3)
        ]
        made = []
        for tokens in (5, 3, 64, 7):
            for layer in layers:
                x = torch.ones(tokens, 8)
                out = layer(x, torch.randint(0, 8, (tokens, 1)), torch.ones(tokens, 1))
                assert torch.equal(out, x)
                made.append(buffers._held[ep_group]["cpu"].buffer)
        assert len(set(made[:6])) == 1
        assert len(set(made[6:])) == 1
        buffers.release_buffers(ep_group)
        assert ep_group not in buffers._held
        assert torch.equal(layers[0](x, torch.zeros(7, 1, dtype=torch.int64), torch.ones(7, 1)), x)

    ranks.run(run, world=4)


def overflowing(rank, moe, given, kind=SymmetricMemory):
    """A call in which rank 2 has nine rows for rank 3, of seven that fit; and one that fits."""
    ep_group, _ = moe.groups(layout(moe, 4, 1), rank)
    experts = moe.Experts(2)
    implementation = kind(
        experts, num_local_experts=2, ep_group=ep_group, max_rows_per_pair=7, **dict(given)
    )
    tokens = 9 if rank == 2 else 3
    hidden = torch.ones(tokens, 8, requires_grad=True)
    ids = torch.full((tokens, 2), 6 if rank == 2 else 0)
    return implementation, experts, hidden, ids, torch.ones(tokens, 2)


@pytest.mark.parametrize("given", [(), settings(max_tokens=9)])
def test_overflow_is_raised_on_all_ranks(ranks, moe, given):
    def run(rank):
        implementation, _, hidden, ids, weights = overflowing(rank, moe, given)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"had 9 rows .* give a larger max_rows"):
                implementation(hidden, ids, weights)
            implementation(hidden[:7], ids[:7], weights[:7])  # and goes on

    ranks.run(run, world=4)


def test_overflow_is_never_silent(ranks, moe):
    """Where the host does not look: output and gradients are NaN, the next call and `check` raise."""

    def run(rank):
        implementation, experts, hidden, ids, weights = overflowing(
            rank, moe, settings(max_tokens=9), Deferred
        )
        out = implementation(hidden, ids, weights)
        assert out.isnan().all()
        out.sum().backward()
        assert hidden.grad[:7].isnan().all()  # zero for tokens whose rows did not fit
        if rank in (0, 3):  # whose experts have rows
            assert any(p.grad.isnan().any() for p in experts.parameters())
        for next_call in (implementation.check, lambda: implementation(hidden, ids, weights)):
            with pytest.raises(RuntimeError, match=r"had 9 rows .* output of that call was NaN"):
                next_call()
            assert implementation(hidden[:7], ids[:7], weights[:7]).isfinite().all()
            implementation.check()
            implementation(hidden, ids, weights)
        dist.barrier()  # the last overflow is looked at by all, and by none afterwards
        with pytest.raises(RuntimeError, match="had 9 rows"):
            implementation.check()

    ranks.run(run, world=4)


def test_ids_out_of_range(ranks, moe):
    """Found before rows move; with `max_tokens` behind the first exchange, or by `check`."""

    def run(rank):
        ep_group, _ = moe.groups(layout(moe, 4, 1), rank)
        hidden, weights = torch.ones(3, 8), torch.ones(3, 1)
        right = torch.zeros(3, 1, dtype=torch.int64)
        for kind, given in (
            (SymmetricMemory, {}),
            (SymmetricMemory, {"max_tokens": 4}),
            (Deferred, {"max_tokens": 4}),
        ):
            implementation = kind(
                lambda rows, ids, weights: rows * (ids < 2) * weights,
                num_local_experts=2, ep_group=ep_group, **given,
            )  # fmt: skip
            wrong = right + 8 if rank == 1 else right
            if kind is Deferred:
                assert implementation(hidden, wrong, weights).isnan().all()
                with pytest.raises(RuntimeError, match="expert ids out of range on some rank"):
                    implementation.check()
            else:
                expected = ValueError if rank == 1 else RuntimeError
                with pytest.raises(
                    expected, match="got ids from 8" if rank == 1 else r"ranks \[1\]"
                ):
                    implementation(hidden, wrong, weights)
            assert torch.equal(implementation(hidden, right, weights), hidden)

    ranks.run(run, world=4)


def test_all_ranks_hear_of_wrong_input(ranks, moe):
    def run(rank):
        implementation, _ = moe.build(layout(moe, 4, 1), rank)
        hidden = torch.ones(3, 8, dtype=torch.float64)
        ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2, dtype=torch.float64)
        for wrong in (
            (hidden.long(), ids, weights),
            (hidden, ids[:, 0], weights),
            (hidden[:2], ids, weights),
        ):
            with pytest.raises(ValueError if rank == 2 else RuntimeError):
                implementation(*(wrong if rank == 2 else (hidden, ids, weights)))
        narrow = hidden[:, :5] if rank == 2 else hidden
        with pytest.raises(RuntimeError, match="hidden states of one width"):
            implementation(narrow, ids, weights)
        implementation(hidden, ids, weights)

    ranks.run(run, world=4)


def test_what_is_given_is_checked(moe):
    experts = moe.Experts(2)
    for wrong in ({"max_tokens": 0}, {"max_rows_per_pair": -1}):
        with pytest.raises(ValueError, match="must be None or an int of at least 1"):
            SymmetricMemory(experts, num_local_experts=2, **wrong)
    implementation = SymmetricMemory(experts, num_local_experts=2, max_tokens=2)
    x, ids, w = torch.ones(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(ValueError, match="got 3 tokens with max_tokens=2"):
        implementation(x, ids, w)
    with pytest.raises(ValueError, match="got ids from 2 to 2"):
        implementation(x[:2], ids[:2] + 2, w[:2])
    with pytest.raises(ValueError, match="runs on CPU and CUDA, got tensors on meta"):
        implementation(*(a[:2].to("meta") for a in (x, ids, w)))


def test_what_cannot_share_memory_is_refused_by_all(ranks, moe):
    """Before anything is allocated; and by all, if one rank finds no memory or cannot map it."""

    def run(rank, where):
        implementation, _ = moe.build(layout(moe, 4, 1), rank)
        args = (
            torch.ones(3, 8).double(),
            torch.zeros(3, 2, dtype=torch.int64),
            torch.ones(3, 2).double(),
        )
        said = {"hosts": "one machine, got hosts.*node0", "memory": "EP group: no .* bytes of shared",
                "mapping": "rank 1 of the EP group: the shared memory of another"}  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            if where == "hosts":
                patch.setattr(socket, "gethostname", lambda: f"node{rank // 2}")
            elif rank == 1:
                owner, name = (os, "posix_fallocate") if where == "memory" else (torch, "from_file")
                patch.setattr(owner, name, refuse)
            with pytest.raises(RuntimeError, match=said[where]):
                implementation(*args)
        implementation(*args)

    def refuse(*_, **__):
        raise OSError("no space")

    for where in ("hosts", "memory", "mapping"):
        ranks.run(run, where, world=4)


def test_the_file_has_no_name_while_it_is_used(ranks, moe):
    """So that nothing is left, however the processes end."""
    before = left()

    def run(rank):
        implementation, _ = moe.build(layout(moe, 4, 1), rank)
        implementation(
            torch.ones(3, 8).double(),
            torch.zeros(3, 2, dtype=torch.int64),
            torch.ones(3, 2).double(),
        )
        return [str(path) for path in SHARED.glob("ep-dispatch-*")]

    assert all(set(map(Path, names)) <= before for names in ranks.run(run, world=4))


KERNEL = """
    import torch
    from ep_dispatch.put_kernel import put_rows
    from ep_dispatch.symmetric_buffers import HEADER, SharedBuffer

    torch.manual_seed(0)
    P, C = 3, 5
    for N, W in ((7, 6), (0, 6), (4, 1030)):
        size = P * HEADER + (P * C + 1) * W
        ours, theirs = ([torch.full((size,), -7) for _ in range(P)] for _ in range(2))
        pointers = torch.tensor([x.data_ptr() for x in theirs])
        for rank in range(P):
            rows = torch.randint(0, 99, (P, N, W))
            rows = rows if rank else rows[:1].expand(P, N, W)
            place = torch.stack([torch.randperm(max(N, 1))[:N] - 1 for _ in range(P)])
            header = torch.randint(0, 9, (P, HEADER)) if rank < 2 else None
            SharedBuffer(ours, rank).put(rows, place, C, header)
            put_rows(pointers, rows, place, C, header, rank=rank)
        assert all(map(torch.equal, ours, theirs))
        assert N == 0 or sum(int((x != -7).sum()) for x in ours) > P * W
    print("equal")
"""


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_the_kernel_writes_what_the_cpu_writes():
    """In Triton's interpreter, by raw addresses: the same words, and no other, rows that do not fit left out."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KERNEL)],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout == "equal\n", done.stderr
