"""Index arithmetic, without processes. T tokens, K slots, E experts, P ranks."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_dispatch.agreement import Notice
from ep_dispatch.checks import DTYPES
from ep_dispatch.collectives import chunk_bounds
from ep_dispatch.routing import (
    SKIPPED,
    SlotOrder,
    expert_major_order,
    inverse_permutation,
    local_routes,
)


@st.composite
def routings(draw):
    num_experts = draw(st.integers(1, 9))
    tokens, slots = draw(st.integers(0, 7)), draw(st.integers(1, 5))
    ids = st.integers(SKIPPED, num_experts - 1)
    values = draw(st.lists(ids, min_size=tokens * slots, max_size=tokens * slots))
    return torch.tensor(values, dtype=torch.int64).view(tokens, slots), num_experts


@given(routings())
@settings(max_examples=150, deadline=None)
def test_slot_order(routing):
    """Rows lie by expert, equal ids in slot order; skipped slots have no row; counts count."""
    ids, num_experts = routing
    order = SlotOrder.of(ids, num_experts)
    flat = ids.flatten()
    sent = int((flat != SKIPPED).sum())
    slots = order.slots[:sent]
    assert not order.invalid
    assert flat[slots].tolist() == sorted(flat[flat != SKIPPED].tolist())
    assert all(a < b for a, b in pairwise(slots.tolist()) if flat[a] == flat[b])
    assert order.counts.tolist() == [int((flat == e).sum()) for e in range(num_experts)]
    assert torch.equal(order.rows.flatten()[slots], torch.arange(sent))
    assert (order.rows[ids == SKIPPED] >= sent).all()


def test_ids_out_of_range_are_noticed_and_have_no_row():
    for bad in (-2, 4, 1 << 40):
        order = SlotOrder.of(torch.tensor([[0, bad], [3, -1]]), 4)
        assert order.invalid
        assert order.counts.tolist() == [1, 0, 0, 1]


@given(st.lists(st.integers(0, 20), unique=True, max_size=20))
def test_inverse_permutation(values):
    order = torch.tensor(values, dtype=torch.int64).argsort()
    assert torch.equal(order[inverse_permutation(order)], torch.arange(len(values)))


@given(st.integers(1, 4), st.integers(1, 4), st.data())
@settings(deadline=None)
def test_expert_major_order(ranks, experts, data):
    """Grouped by expert, in source order within one; offsets are the ends."""
    counts = data.draw(
        st.lists(st.integers(0, 3), min_size=ranks * experts, max_size=ranks * experts)
    )
    table = torch.tensor(counts).view(ranks, experts)
    arrived = [(e, p) for p in range(ranks) for e in range(experts) for _ in range(table[p, e])]
    order, ids, offsets = expert_major_order(table, len(arrived))
    assert [arrived[i] for i in order.tolist()] == sorted(arrived)
    assert ids.tolist() == sorted(e for e, _ in arrived)
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
