"""The drawing of a layout, in columns of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_mesh.layout import Layout

_LABEL = 12  # columns before the first rank
_CELL = 4  # an expert cell is at least as wide as "E0-3"
_GAP = 3  # columns between two ranks of a TP group; one more between groups
_NOTE = 2  # further columns before the words at the end of a row
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def draw(layout: Layout, num_experts: int | None, ranks_per_block: int) -> str:
    """See `Layout.picture`."""
    ranks = range(layout.world_size)
    experts = [_experts(layout, rank, num_experts) for rank in ranks]
    cell = max(_CELL, *(len(text) for text in experts), len(str(ranks[-1])) + 1)
    # A batch's bracket spans its TP group; the longest name must fit the narrowest span.
    name = len(f"[B{layout.data_parallel_size - 1}]")
    while layout.tp * (cell + _GAP) - 2 < name:
        cell += 1
    pitch = cell + _GAP

    def row(block: range, label: str, text: Callable[[int], str], note: str = "") -> str:
        line = label.ljust(_LABEL)
        for rank in block:
            line += text(rank).ljust(pitch)
            if rank % layout.tp == layout.tp - 1:
                line += " "
        return (line + " " * _NOTE + note).rstrip()

    def place(axis: str) -> Callable[[int], str]:
        return lambda rank: f" {layout.coordinate(axis, rank)}"

    # Rows are cut between TP groups where these are small enough.
    step = max(ranks_per_block // layout.tp, 1) * layout.tp
    if layout.tp > ranks_per_block:
        step = ranks_per_block
    blocks = []
    for start in range(0, layout.world_size, step):
        block = range(start, min(start + step, layout.world_size))
        first = start == 0
        rows = [row(block, "rank", lambda rank: f" {rank}")]
        if layout.pp > 1:
            rows.append(row(block, "stage", place("pp"), "pipeline stage" if first else ""))
        if layout.dp_replicate > 1:
            rows.append(row(block, "replica", place("dp_replicate")))
        rows.append(_batches(layout, block, pitch, _batch_note(layout) if first else ""))
        rows.append(row(block, "tp", place("tp")))
        note = _group_note(layout) if first else ""
        rows.append(row(block, f"ep={layout.ep}", experts.__getitem__, note))
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def _batches(layout: Layout, block: range, pitch: int, note: str) -> str:
    line = "batch".ljust(_LABEL)
    for rank in block:
        if rank != block[0] and rank % layout.tp:
            continue  # drawn with the first rank of its TP group
        until = min(rank - rank % layout.tp + layout.tp, block[-1] + 1)
        opens, closes = rank % layout.tp == 0, until % layout.tp == 0
        inner = (until - rank) * pitch - 4
        body = f"B{layout.batch_of(rank)}".center(inner, "=")
        line += ("[" if opens else "=") + body + ("]" if closes else "=")
        line += " " * (3 if closes else 2)
    return (line + " " * _NOTE + note).rstrip()


def _experts(layout: Layout, rank: int, num_experts: int | None) -> str:
    if num_experts is None:
        return f" {layout.coordinate('ep', rank)}"
    mine = layout.experts_of(rank, num_experts)
    if len(mine) <= 2:
        return "".join(f"E{expert}" for expert in mine)
    return f"E{mine[0]}-{mine[-1]}"


def _count(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def _batch_note(layout: Layout) -> str:
    if layout.tp == 1:
        return "one batch per rank"
    return "one batch per TP pair" if layout.tp == 2 else f"one batch per TP group of {layout.tp}"


def _group_note(layout: Layout) -> str:
    if layout.ep == 1:
        return "EP off" if layout.tp == 1 else "EP off: TP may shard inside each expert"
    if layout.ep == layout.world_size:
        who = "all ranks"
    elif layout.tp == 1:
        who = f"{_count(layout.ep)} ranks"
    else:
        kind = "pair" if layout.tp == 2 else "TP group"
        batches = layout.ep // layout.tp
        if batches == 1:
            who = "a TP pair" if layout.tp == 2 else "a TP group"
        else:
            who = f"{_count(batches)} {kind}s"
    return f"group = {who},  efsdp={layout.efsdp}"
