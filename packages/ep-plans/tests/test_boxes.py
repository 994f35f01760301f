"""Boxes against torch.chunk and torch.cat on real tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_plans.boxes import (
    Box,
    Part,
    clipped,
    intersection,
    lengths,
    local_box,
    numel,
    pieces,
    positions,
    whole_box,
)


def taken(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box of a tensor, the plain way."""
    for dim, intervals in enumerate(box):
        parts = [tensor.narrow(dim, low, high - low) for low, high in intervals]
        tensor = torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)
    return tensor


def cut(tensor: torch.Tensor, how: Part) -> torch.Tensor:
    """A cut, the plain way: `torch.chunk` of each block, empty where there are too few."""
    blocks = tensor.unflatten(how.dim, (how.packs, -1)) if how.packs > 1 else tensor
    dim = how.dim + (how.packs > 1)
    chunks = list(torch.chunk(blocks, how.parts, dim))
    chunk = chunks[how.place] if how.place < len(chunks) else blocks.narrow(dim, 0, 0)
    return chunk.flatten(how.dim, dim) if how.packs > 1 else chunk


@st.composite
def tensor_and_cuts(draw: st.DrawFn) -> tuple[torch.Tensor, list[Part]]:
    packs = draw(st.sampled_from([1, 1, 2, 3]))
    shape = [packs * draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(0, 5))]
    cuts = []
    for index in range(draw(st.integers(0, 3))):
        parts = draw(st.integers(1, 8))
        # A model axis may cut a packed dimension; what FSDP cuts afterwards is not packed.
        cuts.append(
            Part(
                draw(st.integers(0, 1)) if index else 0,
                parts,
                draw(st.integers(0, parts - 1)),
                packs if index == 0 else 1,
            )
        )
    numbers = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
    return numbers, cuts


@settings(max_examples=300, deadline=None)
@given(tensor_and_cuts())
def test_local_box_is_what_torch_chunk_leaves(case: tuple[torch.Tensor, list[Part]]) -> None:
    tensor, cuts = case
    expected = tensor
    for how in cuts:
        expected = cut(expected, how)
    box = local_box(tensor.shape, cuts)
    assert lengths(box) == tuple(expected.shape)
    assert torch.equal(taken(tensor, box), expected)


@settings(max_examples=100, deadline=None)
@given(tensor_and_cuts())
def test_pieces_are_the_local_tensor(case: tuple[torch.Tensor, list[Part]]) -> None:
    tensor, cuts = case
    box = local_box(tensor.shape, cuts)
    local = torch.full(lengths(box), -1)
    for place, target in pieces(box):
        source, out = tensor, local
        for dim, ((low, high), (start, end)) in enumerate(zip(place, target, strict=True)):
            source, out = source.narrow(dim, low, high - low), out.narrow(dim, start, end - start)
        out.copy_(source)
    assert torch.equal(local, taken(tensor, box))


@settings(max_examples=200, deadline=None)
@given(tensor_and_cuts(), st.data())
def test_intersection_and_positions(
    case: tuple[torch.Tensor, list[Part]], data: st.DataObject
) -> None:
    tensor, cuts = case
    held = local_box(tensor.shape, cuts)
    wanted = tuple(
        ((low, data.draw(st.integers(low, size))),) if size else ()
        for size in tensor.shape
        for low in [data.draw(st.integers(0, size))]
    )
    part = intersection(wanted, held)
    if numel(part):
        local = taken(tensor, held)
        assert torch.equal(taken(local, positions(part, held)), taken(tensor, part))
        assert torch.equal(
            taken(taken(tensor, wanted), positions(part, wanted)), taken(tensor, part)
        )
    shared = {*taken(tensor, held).flatten().tolist()} & {*taken(tensor, wanted).flatten().tolist()}
    assert numel(part) == len(shared)


def test_clipped_tells_the_position_of_what_is_inside() -> None:
    assert clipped([(0, 3), (10, 15)], 2, 12) == (2, ((2, 3), (10, 12)))
    assert clipped([(0, 3), (10, 15)], 12, 20) == (5, ((12, 15),))
    assert clipped([(0, 3)], 5, 9) == (3, ())


def test_positions_outside_are_an_error() -> None:
    with pytest.raises(ValueError, match="not inside"):
        positions((((0, 4),),), (((0, 3),),))


def test_whole_box_of_a_scalar_and_of_nothing() -> None:
    assert whole_box(()) == ()
    assert numel(whole_box(())) == 1
    assert numel(whole_box((0, 3))) == 0
