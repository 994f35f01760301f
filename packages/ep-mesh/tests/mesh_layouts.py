"""Every layout, by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ep_mesh import Layout


def every_layout(max_ranks: int, min_ranks: int = 1) -> Iterator[Layout]:
    """All layouts of `min_ranks` to `max_ranks` ranks, with every EP size that is accepted."""
    sizes = range(1, max_ranks + 1)
    for tp, fsdp in itertools.product(sizes, sizes):
        if tp * fsdp > max_ranks:
            continue
        for replicate, pp in itertools.product(sizes, sizes):
            if not min_ranks <= tp * fsdp * replicate * pp <= max_ranks:
                continue
            for ep in range(1, tp * fsdp + 1):
                try:
                    yield Layout(tp=tp, fsdp=fsdp, dp_replicate=replicate, pp=pp, ep=ep)
                except ValueError:
                    continue


def name(layout: Layout) -> str:
    return f"tp{layout.tp}-fsdp{layout.fsdp}-rep{layout.dp_replicate}-pp{layout.pp}-ep{layout.ep}"
