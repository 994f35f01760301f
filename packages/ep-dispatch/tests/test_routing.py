"""Index arithmetic, without processes. T tokens, K slots, E experts, P ranks."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ep_dispatch.agreement import Notice
from ep_dispatch.checks import DTYPES
from ep_dispatch.collectives import chunk_bounds
from ep_dispatch.routing import (
    SKIPPED,
    SendOrder,
    expert_major_order,
    local_routes,
    transpose_index,
)
from ep_dispatch.stage import Stage


@st.composite
def routings(draw):
    num_experts = draw(st.integers(1, 9))
    tokens, slots = draw(st.integers(0, 7)), draw(st.integers(1, 5))
    ids = st.integers(SKIPPED, num_experts - 1)
    values = draw(st.lists(ids, min_size=tokens * slots, max_size=tokens * slots))
    return torch.tensor(values, dtype=torch.int64).view(tokens, slots), num_experts


def send_order(ids, experts, ranks):
    token = torch.arange(len(ids))[:, None]
    return SendOrder.of(token, ids, tokens=len(ids), experts=experts, ranks=ranks)


@given(routings(), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_send_order(routing, ranks):
    """A row for each distinct (token, owner), by owner and token; slots by expert, each naming its row."""
    ids, local = routing
    num_experts = local * ranks
    ids = torch.where(
        ids < 0, ids, (ids * 7 + torch.arange(ids.numel()).view(ids.shape)) % num_experts
    )
    order = send_order(ids, num_experts, ranks)
    pairs = sorted({(e // local, t) for t, row in enumerate(ids.tolist()) for e in row if e >= 0})
    N = len(pairs)
    assert order.rows_per_owner.tolist() == [sum(p == q for p, _ in pairs) for q in range(ranks)]
    slots = sorted((e, s) for s, e in enumerate(ids.flatten().tolist()) if e >= 0)
    sent = order.sent(len(slots), N)
    assert sent.token_of_row.tolist() == [t for _, t in pairs]

    flat = ids.flatten().tolist()
    assert order.counts.tolist() == [flat.count(e) for e in range(num_experts)]
    assert order.ids.tolist() == sorted(flat)
    assert sent.slots.tolist() == [s for _, s in slots]
    first = [sum(p < q for p, _ in pairs) for q in range(ranks)]
    for (e, s), row in zip(slots, sent.row_of_slot.tolist(), strict=True):
        assert pairs[first[e // local] + row] == (e // local, s // ids.shape[1])

    ends = sent.token_ends.tolist()
    assert ends[0] == 0
    assert len(ends) == len(ids) + 1
    for t, (start, end) in enumerate(pairwise(ends)):
        rows = sent.rows_by_token[start:end].tolist()
        assert rows == [n for n, (_, u) in enumerate(pairs) if u == t]


def test_ids_out_of_range_are_noticed_and_safe_to_order():
    """The rank takes part in the exchanges until all raise: what it sends names no row that isn't there."""
    for bad in (-2, 4, 1 << 40):
        for ids in ([[0, bad], [3, -1]], [[bad, bad]]):
            order = send_order(torch.tensor(ids), 4, 1)
            stage = Stage(None, 4)
            (counted,) = stage.count([order], [Notice()])
            assert counted.invalid
            assert counted.notices[0].bad_ids
            sent = stage._sent(order, counted)
            rows, slots = int(order.rows_per_owner.sum()), int(order.counts.sum())
            assert slots == sum(0 <= e < 4 for row in ids for e in row)
            assert len(sent.token_of_row) == len(sent.rows_by_token) == rows
            assert sent.row_of_slot.tolist() == [0] * slots


@given(st.lists(st.integers(0, 6), max_size=20))
def test_transpose_index(values):
    order, ends = transpose_index(torch.tensor(values, dtype=torch.int64), 7)
    for target, (start, end) in enumerate(pairwise(ends.tolist())):
        assert order[start:end].tolist() == [n for n, v in enumerate(values) if v == target]


@given(st.integers(1, 4), st.integers(1, 4), st.data())
@settings(deadline=None)
def test_expert_major_order(ranks, experts, data):
    """Grouped by expert, in source order within one; offsets are the ends."""
    counts = data.draw(
        st.lists(st.integers(0, 3), min_size=ranks * experts, max_size=ranks * experts)
    )
    table = torch.tensor(counts).view(ranks, experts)
    arrived = [(e, p) for p in range(ranks) for e in range(experts) for _ in range(table[p, e])]
    rows = torch.arange(2, 2 + ranks)
    order, first_rows, ids, offsets = expert_major_order(table, rows, len(arrived))
    assert [arrived[i] for i in order.tolist()] == sorted(arrived)
    assert ids.tolist() == sorted(e for e, _ in arrived)
    assert first_rows.tolist() == [sum(rows[:p].tolist()) for _, p in sorted(arrived)]
    assert offsets.tolist() == table.sum(0).cumsum(0).tolist()
    assert (ids.dtype, offsets.dtype) == (torch.int64, torch.int32)


@given(routings(), st.integers(1, 3))
@settings(deadline=None)
def test_every_route_is_local_to_one_rank(routing, ranks):
    ids, num_local = routing
    ids = torch.where(ids < 0, ids, ids * ranks + ids % ranks)
    owners = torch.zeros_like(ids)
    for rank in range(ranks):
        local, foreign = local_routes(ids, rank, num_local)
        assert torch.equal(local == num_local, foreign)
        assert torch.equal((local + rank * num_local)[~foreign], ids[~foreign])
        owners += ~foreign
    assert torch.equal(owners, (ids >= 0).long())


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_bounds_are_those_of_torch_chunk(size, parts):
    chunks = [c.tolist() for c in torch.arange(size).chunk(parts)] if size else []
    bounds = [chunk_bounds(size, parts, i) for i in range(parts)]
    ours = [list(range(*b)) for b in bounds]
    assert [c for c in ours if c] == [c for c in chunks if c]
    assert sum(ours, []) == list(range(size))  # noqa: RUF017


@given(
    st.builds(
        Notice,
        rank=st.integers(0, 1 << 20),
        grad=st.booleans(),
        hidden=st.booleans(),
        weights=st.booleans(),
        experts=st.booleans(),
        tokens=st.integers(0, 1 << 40),
        batch=st.integers(0, 1 << 20),
        width=st.integers(0, 1 << 20),
        dtype=st.sampled_from([None, *DTYPES]),
        weights_dtype=st.sampled_from([None, *DTYPES]),
        refused=st.booleans(),
        bad_ids=st.booleans(),
    )
)
def test_notices_survive_their_encoding(notice):
    encoded = notice.encode()
    assert len(encoded) == Notice.LENGTH
    assert Notice.decode(encoded) == notice


class Kernels(TorchDispatchMode):
    """Counts operators that give new values: on a GPU each is a launch at least."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = any(value.alias_info is not None for value in func._schema.returns)
        self.count += func.overloadpacket.__name__.endswith("_") or not views
        return func(*args, **kwargs or {})


def test_few_kernels_order_the_rows_of_a_call():
    """A step launches them for every layer, so a host that is slower than its GPU feels each."""
    counts = []
    for tokens in (3, 40):
        ids = torch.stack([torch.randperm(8)[:3] for _ in range(tokens)])
        arriving = torch.full((4, 2), 5)
        with Kernels() as kernels:
            order = send_order(ids, 8, 4)
            order.sent(
                3 * tokens, len({(t, e // 2) for t, row in enumerate(ids.tolist()) for e in row})
            )
            expert_major_order(arriving, arriving[:, 0], 40)
        counts.append(kernels.count)
    assert counts[0] == counts[1] <= 45
