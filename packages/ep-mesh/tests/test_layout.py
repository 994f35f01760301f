"""Laws of `Layout`, over every layout of up to 64 ranks, against brute force."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
from mesh_layouts import every_layout

from ep_mesh import AXES, VIEWS, Layout, legal_ep_sizes

LAYOUTS = list(every_layout(64))
EXPERTS_PER_RANK = 4


def brute_force(layout: Layout) -> dict[str, list[dict[str, int]]]:
    """Each rank's coordinates in each view, by counting through the view, last axis fastest."""
    return {
        view: [
            dict(zip(axes, at, strict=True))
            for at in itertools.product(*(range(getattr(layout, axis)) for axis in axes))
        ]
        for view, axes in VIEWS.items()
    }


def test_the_list_is_whole():
    """8 ranks, by hand: a size for each way to write 8 as tp * fsdp, times the legal EP sizes."""
    eight = {(x.tp, x.fsdp, x.ep) for x in LAYOUTS if x.world_size == x.tp * x.fsdp == 8}
    assert eight == {
        *((1, 8, ep) for ep in (1, 2, 4, 8)),
        *((2, 4, ep) for ep in (1, 2, 4, 8)),
        *((4, 2, ep) for ep in (1, 4, 8)),
        *((8, 1, ep) for ep in (1, 8)),
    }
    assert max(layout.world_size for layout in LAYOUTS) == 64


def test_coordinates_agree_with_brute_force():
    for layout in LAYOUTS:
        views = brute_force(layout)
        assert len(views["dense"]) == len(views["expert"]) == layout.world_size
        for rank in range(layout.world_size):
            assert layout.coordinates(rank) == views["dense"][rank] | views["expert"][rank]


@pytest.mark.parametrize("axis", AXES)
def test_groups_partition_the_world(axis):
    """Groups are the ranks that agree on every other coordinate of the view, each rank in one."""
    view, parts = AXES[axis]
    for layout in LAYOUTS:
        agree = defaultdict(list)
        for rank, at in enumerate(brute_force(layout)[view]):
            agree[tuple(at[other] for other in VIEWS[view] if other not in parts)].append(rank)
        expected = sorted(tuple(ranks) for ranks in agree.values())
        groups = layout.groups(axis)
        assert groups == expected
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {layout.size(axis)}
        last = groups[-1]
        assert [layout.coordinate(axis, rank) for rank in last] == list(range(len(last)))
        assert all(layout.group(axis, rank) == last for rank in last)


def test_both_views_cover_the_same_ranks():
    """A replica of a stage is the same ranks in both views: fsdp x tp == efsdp x ep."""
    for layout in LAYOUTS:
        assert layout.fsdp * layout.tp == layout.efsdp * layout.ep
        assert layout.efsdp == len(layout.group("efsdp", 0))
        expert = defaultdict(set)
        for rank, at in enumerate(brute_force(layout)["expert"]):
            expert[at["pp"], at["dp_replicate"]].add(rank)
        assert sorted(map(sorted, expert.values())) == [list(g) for g in layout.groups("fsdp_tp")]


def test_batch_of_agrees_with_brute_force():
    """The batch counts through dp_replicate and fsdp; TP ranks and pipeline stages share it."""
    for layout in LAYOUTS:
        order = list(itertools.product(range(layout.dp_replicate), range(layout.fsdp)))
        assert layout.data_parallel_size == len(order)
        batches = [layout.batch_of(rank) for rank in range(layout.world_size)]
        for batch, at in zip(batches, brute_force(layout)["dense"], strict=True):
            assert order[batch] == (at["dp_replicate"], at["fsdp"])
        assert set(Counter(batches).values()) == {layout.tp * layout.pp}


def test_an_ep_group_holds_every_expert_once():
    for layout in LAYOUTS:
        experts = layout.ep * EXPERTS_PER_RANK
        held = [layout.experts_of(rank, experts) for rank in range(layout.world_size)]
        for group in layout.groups("ep"):
            assert list(group) == list(range(group[0], group[0] + layout.ep)), "consecutive ranks"
            assert list(itertools.chain(*(held[rank] for rank in group))) == list(range(experts))
        for group in layout.groups("efsdp"):
            assert len({held[rank] for rank in group}) == 1, "they shard the same experts"


def test_an_ep_group_sees_each_token_tp_times():
    for layout in LAYOUTS:
        if layout.ep == 1:
            continue
        for group in layout.groups("ep"):
            batches = Counter(layout.batch_of(rank) for rank in group)
            assert len(batches) == layout.ep // layout.tp
            assert set(batches.values()) == {layout.tp}


@pytest.mark.parametrize("experts", [None, 6, 8, 128])
def test_legal_ep_sizes_are_those_that_are_accepted(experts):
    for tp, fsdp in itertools.product(range(1, 13), range(1, 13)):
        accepted = []
        for ep in range(1, tp * fsdp + 2):
            try:
                layout = Layout(tp=tp, fsdp=fsdp, ep=ep)
                if experts is not None:
                    layout.check_experts(experts)
            except ValueError:
                continue
            accepted.append(ep)
        assert legal_ep_sizes(tp, fsdp, experts) == accepted


def test_a_wrong_ep_size_is_refused_with_those_that_fit():
    with pytest.raises(
        ValueError, match=r"ep_size=3 .*tp_size=2 .*fsdp_size=4.*1 \(off\), 2, 4, 8"
    ):
        Layout(tp=2, fsdp=4, ep=3)
    with pytest.raises(ValueError, match=r"ep_size=2 .*tp_size=4 .*1 \(off\), 4, 8"):
        Layout(tp=4, fsdp=2, ep=2)
    with pytest.raises(ValueError, match=r"ep_size=16 .*divide fsdp_size \* tp_size \(8\)"):
        Layout(tp=2, fsdp=4, ep=16)


def test_experts_that_ep_does_not_divide_are_refused_with_sizes_that_fit():
    layout = Layout(tp=2, fsdp=4, ep=8)
    with pytest.raises(ValueError, match=r"ep_size=8 .* 60 experts.*1 \(off\), 2, 4\."):
        layout.check_experts(60)
    with pytest.raises(ValueError, match="60 experts"):
        layout.experts_of(0, 60)
    layout.check_experts(64)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
@pytest.mark.parametrize("axis", ["tp", "fsdp", "dp_replicate", "pp", "ep"])
def test_a_size_is_a_whole_number_above_zero(axis, size):
    with pytest.raises(ValueError, match=f"{axis}_size must be a whole number >= 1"):
        Layout(**{axis: size})


def test_a_wrong_world_size_is_told_with_what_would_fit():
    layout = Layout(tp=2, fsdp=4)
    layout.check_world_size(8)
    with pytest.raises(ValueError, match=r"= 8 processes, but 6 are running.*fsdp_size=3 for 6"):
        layout.check_world_size(6)
    with pytest.raises(
        ValueError, match=r"but 1 is running. Start 8 \(torchrun --nproc-per-node 8"
    ):
        layout.check_world_size(1)


def test_ranks_and_axes_that_do_not_exist():
    with pytest.raises(ValueError, match="rank 8 is outside the world of 8"):
        Layout(fsdp=8).coordinates(8)
    with pytest.raises(ValueError, match="rank -1"):
        Layout(fsdp=8).batch_of(-1)
    with pytest.raises(ValueError, match=r"unknown axis 'cp'; the axes are pp, dp_replicate"):
        Layout(fsdp=8).group("cp", 0)
