"""Which part of a parameter a rank holds, against `torch.chunk` and brute force; and back again."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from ep_mesh import Layout, ParallelMesh
from ep_plans import Cut, ParameterSharding, full_tensor
from ep_plans._compat import StridedShard, per_parameter_mesh
from ep_plans.sharding import cut_ranges, cut_tensor, shard_tensor
from ep_testing.pool import RankPool


@settings(deadline=None, max_examples=60)
@given(size=st.integers(0, 40), parts=st.integers(1, 9), packs=st.integers(1, 3))
def test_a_cut_is_torch_chunk_inside_each_pack(size: int, parts: int, packs: int) -> None:
    whole = torch.arange(size * packs)
    for index in range(parts):
        expected = []
        for block in whole.view(packs, size):
            chunks = block.chunk(parts)
            expected.append(chunks[index] if index < len(chunks) else block[:0])
        assert torch.equal(cut_tensor(whole, 0, parts, index, packs), torch.cat(expected))


@settings(deadline=None, max_examples=60)
@given(size=st.integers(0, 40), parts=st.integers(1, 9), packs=st.integers(1, 3))
def test_the_parts_cover_a_dimension_once(size: int, parts: int, packs: int) -> None:
    held = [
        i
        for index in range(parts)
        for start, end in cut_ranges(size * packs, parts, index, packs)
        for i in range(start, end)
    ]
    assert sorted(held) == list(range(size * packs))


def test_packs_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"7 must be a multiple of its 2 blocks"):
        cut_ranges(7, 2, 0, packs=2)


def layouts() -> st.SearchStrategy[Layout]:
    sizes = st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3, st.sampled_from([1, 2, 3, 4, 6, 8]))
    return sizes.filter(lambda s: s[3] % s[0] == 0 and s[0] * s[1] % s[3] == 0).map(
        lambda s: Layout(tp=s[0], fsdp=s[1], dp_replicate=s[2], ep=s[3])
    )


@st.composite
def shardings(draw: Any) -> tuple[Layout, ParameterSharding, tuple[int, ...]]:
    layout = draw(layouts())
    shape = draw(st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple))
    axis = draw(st.sampled_from([None, "tp", "ep"]))
    data = draw(st.sampled_from([None, "efsdp" if axis == "ep" else "fsdp"]))
    if axis is None:
        return layout, ParameterSharding(None, draw(st.sampled_from([data, "fsdp_tp"]))), shape
    dim = draw(st.integers(0, len(shape) - 1))
    packs = draw(st.sampled_from([p for p in (1, 2, 3) if shape[dim] % p == 0]))
    copies = draw(
        st.sampled_from([c for c in (1, 2, 4) if axis == "tp" and layout.tp % c == 0] or [1])
    )
    return layout, ParameterSharding(Cut(axis, dim, packs, copies), data), shape


def held_by(
    layout: Layout, sharding: ParameterSharding, shape: tuple[int, ...], rank: int
) -> Tensor:
    """The indices of what a rank holds, cut out of a tensor of indices step by step."""
    held = torch.arange(math.prod(shape)).view(shape)
    if sharding.cut is not None:
        cut = sharding.cut
        group = layout.group(cut.axis, rank)
        parts, index = len(group) // cut.copies, group.index(rank) // cut.copies
        held = cut_tensor(held, cut.dim, parts, index, cut.packs)
    if sharding.data_axis is not None and held.numel():
        ranks = {
            "fsdp": layout.group("fsdp", rank),
            "efsdp": layout.group("efsdp", rank),
            "fsdp_tp": tuple(
                other
                for other in range(layout.world_size)
                if layout.coordinates(other)["dp_replicate"]
                == layout.coordinates(rank)["dp_replicate"]
            ),
        }[sharding.data_axis]
        chunks = held.chunk(len(ranks))
        index = ranks.index(rank)
        held = chunks[index] if index < len(chunks) else held[:0]
    return held


@settings(deadline=None, max_examples=60)
@given(case=shardings())
def test_local_shapes_are_those_of_brute_force(case: Any) -> None:
    layout, sharding, shape = case
    for rank in range(layout.world_size):
        held = held_by(layout, sharding, shape, rank)
        assert sharding.local_shape(shape, layout, rank) == tuple(held.shape)
        assert sharding.local_numel(shape, layout, rank) == held.numel()


@settings(deadline=None, max_examples=60)
@given(case=shardings())
def test_the_ranks_cover_a_parameter_once_per_copy(case: Any) -> None:
    layout, sharding, shape = case
    counts = Counter(
        i
        for rank in range(layout.world_size)
        for i in held_by(layout, sharding, shape, rank).flatten().tolist()
    )
    parts = 1
    if sharding.cut is not None:
        parts *= len(layout.group(sharding.cut.axis, 0)) // sharding.cut.copies
    if sharding.data_axis is not None:
        sizes = {"fsdp": layout.fsdp, "efsdp": layout.efsdp, "fsdp_tp": layout.fsdp * layout.tp}
        parts *= sizes[sharding.data_axis]
    assert counts == dict.fromkeys(range(math.prod(shape)), layout.world_size // parts)


# -- and back, on ranks: (layout, shape, cut, data axis)
GATHERED = [
    (layout, shape, cut, data)
    for layout, axes in (
        (Layout(tp=2, fsdp=4, ep=4), (("tp", "fsdp"), ("ep", "efsdp"))),
        (Layout(tp=4, fsdp=2, ep=8), (("tp", "fsdp"), ("ep", "efsdp"))),
        (Layout(tp=2, fsdp=2, dp_replicate=2, ep=2), (("tp", "fsdp"), ("ep", "efsdp"))),
    )
    for axis, data_axis in axes
    for shape, dim, packs in product([(10, 6, 3), (5, 6)], [0, 1], [1, 2])
    if shape[dim] % packs == 0
    for cut in (Cut(axis, dim, packs),)
    for data in (None, data_axis)
] + [
    (Layout(tp=4, fsdp=2), (6, 5), Cut("tp", 0, 1, copies=2), "fsdp"),
    (Layout(tp=4, fsdp=2), (3, 5), Cut("tp", 0, 1, copies=4), None),
    (Layout(tp=8), (5, 3), Cut("tp", 0, 1, copies=2), None),
    (Layout(tp=4, dp_replicate=2), (6, 5), Cut("tp", 0, 1, copies=2), "fsdp"),
    (Layout(tp=8), (2, 5), Cut("tp", 0), None),
    (Layout(tp=2, fsdp=4), (9, 3), None, "fsdp_tp"),
    (Layout(tp=2, fsdp=4), (3,), None, "fsdp_tp"),
    (Layout(tp=2, fsdp=2, dp_replicate=2), (9, 3), None, "fsdp_tp"),
    (Layout(fsdp=4, dp_replicate=2), (9, 3), None, "fsdp"),
]


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_and_gather(rank: int) -> None:
    for layout, shape, cut, data in GATHERED:
        mesh = ParallelMesh(layout)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(whole.clone())
        if cut is not None:
            on = mesh.split_tp(layout.tp // cut.copies) if cut.copies > 1 else mesh.mesh(cut.axis)
            module.weight = torch.nn.Parameter(shard_tensor(whole, cut, on))
            local = module.weight.to_local()
            assert local.untyped_storage().nbytes() == local.nbytes, "keeps more than its part"
        # FSDP2 can't take a rank's empty part; `parallelize` leaves it out as well.
        if local_of(module.weight).numel() and data is not None:
            replicas = layout.dp_replicate > 1
            place = None
            default = mesh.mesh("dp_replicate", "fsdp") if replicas else mesh.mesh("fsdp")
            if data != "fsdp":
                own = mesh.mesh("dp_replicate", data) if replicas else mesh.mesh(data)
                place = per_parameter_mesh({module.weight: own}, default)
            fully_shard(module, mesh=default, shard_placement_fn=place)
        case = (layout, shape, cut, data)
        sharding = ParameterSharding(cut, data)
        held = local_of(module.weight)
        assert tuple(held.shape) == sharding.local_shape(shape, layout, rank), case
        assert torch.equal(full_tensor(module.weight), whole), case


def test_full_tensor_undoes_every_sharding(ranks: RankPool) -> None:
    ranks.run(shard_and_gather, timeout=120)


def refuse_partial(rank: int) -> None:
    mesh = ParallelMesh(Layout(tp=2)).mesh("tp")
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match="neither sharded nor replicated"):
        full_tensor(partial)
    replicated = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    assert torch.equal(full_tensor(replicated), torch.ones(2))


def test_a_partial_sum_cannot_be_gathered(ranks: RankPool) -> None:
    ranks.run(refuse_partial, world=2)


def test_a_plain_tensor_is_whole() -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert torch.equal(full_tensor(tensor), torch.ones(3))
    assert not full_tensor(tensor).requires_grad


def test_a_packed_cut_says_so_to_dtensor() -> None:
    assert Cut("tp", 1, packs=2).placement == StridedShard(1, split_factor=2)
