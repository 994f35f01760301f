"""Batches: label counts, rows that only fill up the last batch, and TP ranks that must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_mesh import ParallelMesh
from ep_plans.micro_batches import dim_of_rows

IGNORED = -100
"""The label that torch's cross-entropy and transformers leave out."""

Batch = Mapping[str, Any]


def count_labels(batches: Sequence[Batch], *, shifted: bool) -> Tensor | None:
    """Labels that a loss counts in these batches, int64 [], or None if they can't be counted.

    `shifted`: position 0 of a row is predicted by nothing, so its label doesn't count.
    """
    counts = []
    for batch in batches:
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"]
            if not isinstance(labels, Tensor):
                return None
            labels = labels[..., 1:] if shifted else labels
        counts.append(labels.ne(IGNORED).sum())
    return torch.stack(counts).sum()


def without_fillers(batch: Batch, real: int) -> dict[str, Any]:
    """The batch with the labels of all rows from `real` on ignored.

    Loaders repeat samples to give every data shard a full last batch. The ranks must run those
    rows, as everyone takes part in the collectives, but they are no part of the global batch.
    """
    masked = dict(batch)
    for name in ("labels", "shift_labels"):
        labels = masked.get(name)
        if isinstance(labels, Tensor) and labels.ndim > 0 and labels.shape[0] > real:
            masked[name] = labels.clone()
            masked[name][real:] = IGNORED
    return masked


def filled_up(batch: Batch, rows: int, real: int) -> dict[str, Any]:
    """The batch with its rows again and again until there are `rows`; only the first `real` have labels.

    What holds no row each (`[1, ...]`, numbers) stays as it is.
    """
    held = batch["labels"].shape[0]
    again = torch.arange(rows) % held

    def repeated(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        dim = dim_of_rows(name, value)
        return (
            value.index_select(dim, again.to(value.device)) if value.shape[dim] == held else value
        )

    return without_fillers({name: repeated(name, value) for name, value in batch.items()}, real)


def len_of(loader: Any) -> int | None:
    """How many batches there are; None if it can't tell, as of a stream, whatever its `__len__` raises."""
    try:
        return len(loader)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def sequence_starts(batch: Batch) -> list[int]:
    """Where the sequences of a batch of one row begin, by positions that start again; else nothing.

    A host synchronization.
    """
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[0] != 1:
        return []
    again = positions[0].diff() != 1
    return [0, *(again.nonzero()[:, 0] + 1).tolist()]


def first_sequences(batch: Batch, starts: Sequence[int], real: int) -> Batch:
    """The first `real` of the sequences of a row, at least one; whose labels don't count if none is real.

    Args:
        batch: of one row, as `DataCollatorWithFlattening` makes it.
        starts: where its sequences begin.
        real: how many of them are in the global batch, fewer than there are.
    """
    kept = max(real, 1)
    end, size = starts[kept], batch["labels"].shape[1]
    cut = {
        name: value[:, :end]
        if isinstance(value, Tensor) and value.shape[:2] == (1, size)
        else value
        for name, value in batch.items()
    }
    lengths = [after - before for before, after in pairwise(starts[: kept + 1])]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if isinstance(cut.get(name), Tensor):
            cut[name] = cut[name][: kept + 1]
    for name in ("max_length_q", "max_length_k"):
        if name in cut:
            cut[name] = max(lengths)
    return cut if real else without_fillers(cut, 0)


def check_shared(batch: Batch, mesh: ParallelMesh) -> None:
    """Check that the ranks of each TP group, and the stages of each pipeline, hold the same batch.

    Raises:
        ValueError: on every rank, if one of them doesn't.

    Costs an all-gather of a few numbers over TP and over pp, and an all-reduce of one over the world.
    """
    mine = _fingerprint(batch).to(mesh.device)
    differ = False
    for axis in ("tp", "pp"):
        copies = [torch.empty_like(mine) for _ in range(mesh.size(axis))]
        dist.all_gather(copies, mine, group=mesh.group(axis))
        differ = differ or any(not torch.equal(mine, copy) for copy in copies)
    differs = torch.tensor(float(differ), device=mesh.device)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    if differs.item():
        raise ValueError(
            f"ranks of one TP group (tp_size={mesh.size('tp')}) or one pipeline "
            f"(pp_size={mesh.size('pp')}) got different batches, so they "
            "would train on neither. A dataset or collator draws from a generator that differs "
            "between ranks, or splits the data by rank itself: seed it by the data shard "
            "(trainer.accelerator.data_shard), or give every rank the whole dataset."
        )


def _fingerprint(batch: Batch) -> Tensor:
    """Numbers that differ if the batches do, float64 [3]."""
    total = torch.zeros(3, dtype=torch.float64)
    for index, name in enumerate(sorted(batch)):
        value = batch[name]
        if isinstance(value, Tensor):
            flat = value.detach().reshape(-1).to("cpu", torch.float64).nan_to_num()
            places = torch.arange(1, flat.numel() + 1, dtype=torch.float64)
            total += (index + 1) * torch.stack(
                [flat.sum(), (flat * places).sum(), torch.tensor(float(flat.numel())).double()]
            )
    return total
