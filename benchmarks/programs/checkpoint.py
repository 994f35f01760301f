"""A checkpoint of weights and AdamW's moments in each layout: `python checkpoint.py tp=8 ... [--out FILE]`.

Ours alone: native transformers refuses to save the optimizer's state of a sharded model. Beside it the ranks
write as many bytes plainly, in turns with it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from common import main
from step import sizes_of


def measure(layouts: str) -> dict[str, dict[str, float]]:
    """Of each layout of `tp=8,tp=4/fsdp=2`: seconds of a save, a load and plain files, CPU seconds, bytes."""
    import checkpoint_ranks
    import moe_step
    import step_ranks

    with tempfile.TemporaryDirectory() as folder:
        moe_step.write_checkpoint(Path(folder), step_ranks.SHAPE)
        sizes = {layout: {**sizes_of(layout), "ep_size": 8} for layout in layouts.split(",")}
        ranks = step_ranks.on_ranks(checkpoint_ranks.costs, folder, sizes)
    found: dict[str, dict[str, Any]] = {}
    for layout in sizes:
        of = [rank[layout] for rank in ranks]
        found[layout] = ranks[0][layout] | {
            "stall_cpu_seconds": mean(rank["stall_cpu_seconds"] for rank in of),
            "copy_cpu_seconds": mean(rank["copy_cpu_seconds"] for rank in of),
            "staged_bytes": max(rank["staged_bytes"] for rank in of),
        }
    return found


if __name__ == "__main__":
    main(measure, "layouts")
