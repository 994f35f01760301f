from __future__ import annotations

from pathlib import Path

import checkpoint_ranks
import moe_step
import torch

from ep_testing import RankPool

TINY = moe_step.Sizes(hidden=16, intermediate=8, experts=4, top_k=2, layers=1)


def state_bytes(folder: Path) -> int:
    """Of weights, two moments of each, and a count of steps for each parameter."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    each = sum(3 * torch.Size(shape).numel() for shape in shapes)
    experts = 3 * TINY.experts * TINY.layers  # one by one in the file, two tensors in the model
    return 4 * (each + len(shapes) - experts + 2 * TINY.layers)


def test_each_byte_of_the_state_is_staged_and_written_once(ranks: RankPool, tmp_path: Path) -> None:
    """And as many each time: a series of bytes moves only with the code."""
    moe_step.write_checkpoint(tmp_path, TINY)
    state = state_bytes(tmp_path)
    for sizes in ({"tp_size": 2}, {"fsdp_size": 2}):
        arguments = str(tmp_path), {**sizes, "ep_size": 2}, 1
        first, again = (
            ranks.run(checkpoint_ranks.cost, *arguments, world=2, timeout=100) for _ in range(2)
        )
        assert sum(rank["staged_bytes"] for rank in first) == state
        assert state < first[0]["saved_bytes"] < state + 30_000  # headers, indices, the manifest
        for name in ("saved_bytes", "staged_bytes"):
            assert [rank[name] for rank in first] == [rank[name] for rank in again]


def test_what_lives_on_is_counted_once() -> None:
    x = torch.ones(10)
    with checkpoint_ranks.Made() as made:
        kept = torch.empty(7)
        view = kept.view(7, 1).copy_(x[:7, None])
        x.add_(1)
        x * 2
    assert made.living_bytes() == 7 * 4
    del kept, view
    assert made.living_bytes() == 0
