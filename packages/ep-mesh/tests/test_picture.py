"""`Layout.picture` draws the documented diagrams, and tells the truth about any layout."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_layouts import every_layout

from ep_mesh import Layout

EIGHT_RANKS = """\
rank         0      1       2      3       4      5       6      7
batch       [====B0====]   [====B1====]   [====B2====]   [====B3====]     one batch per TP pair
tp           0      1       0      1       0      1       0      1
"""
EP_ROWS = {
    2: "ep=2        E0-3   E4-7    E0-3   E4-7    E0-3   E4-7    E0-3   E4-7      "
    "group = a TP pair,  efsdp=4",
    4: "ep=4        E0E1   E2E3    E4E5   E6E7    E0E1   E2E3    E4E5   E6E7      "
    "group = two pairs,  efsdp=2",
    8: "ep=8        E0     E1      E2     E3      E4     E5      E6     E7        "
    "group = all ranks,  efsdp=1",
}


@pytest.mark.parametrize("ep", EP_ROWS)
def test_the_documented_diagrams(ep):
    assert Layout(tp=2, fsdp=4, ep=ep).picture(8) == EIGHT_RANKS + EP_ROWS[ep]


def test_without_experts_the_place_in_the_group_is_drawn():
    last = Layout(tp=2, fsdp=4, ep=4).picture().splitlines()[-1]
    assert last.split("group")[0].split() == ["ep=4", *"01230123"]


def test_replicas_and_stages_have_rows():
    text = Layout(tp=1, fsdp=2, dp_replicate=2, pp=2).picture(4)
    assert "stage        0       0       0       0       1       1       1       1" in text
    assert "replica      0       0       1       1       0       0       1       1" in text
    assert "batch       [=B0]   [=B1]   [=B2]   [=B3]   [=B0]" in text


def test_experts_must_divide():
    with pytest.raises(ValueError, match="ep_size=8 does not divide the 12 experts"):
        Layout(fsdp=8, ep=8).picture(12)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(list(every_layout(64))),
    st.integers(1, 40),
    st.integers(1, 17),
)
def test_what_is_drawn_is_true(layout, experts_per_rank, ranks_per_block):
    """Reading the picture back gives each rank's batch, place and experts, in columns."""
    experts = experts_per_rank * layout.ep
    ranks, batches, places, held = [], [], [], []
    for block in layout.picture(experts, ranks_per_block=ranks_per_block).split("\n\n"):
        rows = {line.split()[0]: line for line in block.splitlines()}
        columns = [m.start() for m in re.finditer(r"\d+", rows["rank"])]
        ranks += [int(text) for text in rows["rank"].split()[1:]]
        places += [int(text) for text in rows["tp"].split()[1:]]
        ep_row = rows[f"ep={layout.ep}"]
        for column in columns:
            cell = ep_row[column - 1 :].split()[0]
            numbers = [int(n) for n in re.findall(r"\d+", cell)]
            held.append(range(numbers[0], numbers[-1] + 1))
            batches.append(_batch_at(rows["batch"], column))
    world = range(layout.world_size)
    assert ranks == list(world)
    assert places == [layout.coordinates(rank)["tp"] for rank in world]
    assert held == [layout.experts_of(rank, experts) for rank in world]
    assert batches == [layout.batch_of(rank) for rank in world]


def _batch_at(row: str, column: int) -> int:
    """The number in the bracket that covers a column."""
    for bracket in re.finditer(r"[\[=]=*B(\d+)=*\]?", row):
        if bracket.start() <= column < bracket.end():
            return int(bracket.group(1))
    raise AssertionError(f"no batch over column {column} of {row!r}")
