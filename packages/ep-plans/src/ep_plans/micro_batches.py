"""Micro-batches of a pipeline: how many, and a batch cut into them. Pure functions.

Shapes: B rows of a batch, M micro-batches, L sequence length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Batch = Mapping[str, Any]

_MAIN = ("input_ids", "inputs_embeds", "labels", "attention_mask")  # who tells the rows, in order


def micro_batch_count(rows: int, stages: int, schedule: str, given: int | None) -> int:
    """Into how many micro-batches a batch of `rows` is cut.

    Args:
        rows: B, of this data shard.
        stages: ranks of the pipeline.
        schedule: a name of `ep_mesh.PP_SCHEDULES`.
        given: what the user asks for. None: the least number from `2 * stages` on that fits, else
            the greatest below.

    Raises:
        ValueError: `given` doesn't divide the rows, or the schedule doesn't run with it; or no
            number fits. It names the numbers that fit.
    """
    fits = [m for m in range(1, rows + 1) if rows % m == 0 and _runs(schedule, m, stages)]
    if given is not None and given in fits:
        return given
    if given is None and fits:
        return min((m for m in fits if m >= 2 * stages), default=fits[-1])
    asked = "" if given is None else f"pp_micro_batches={given} does not fit: "
    what_fits = (
        f"For this batch these fit: {', '.join(map(str, fits))}."
        if fits
        else f"Make batches of {2 * stages} rows or a multiple of it."
    )
    raise ValueError(
        f"{asked}a batch of {rows} rows per data shard must divide into equal micro-batches, "
        f"{_needs(schedule, stages)}. {what_fits}"
    )


def _runs(schedule: str, micro_batches: int, stages: int) -> bool:
    if schedule == "1f1b":
        return micro_batches >= stages
    if schedule == "interleaved_1f1b":
        return micro_batches % max(1, micro_batches // stages) == 0
    return True


def _needs(schedule: str, stages: int) -> str:
    if schedule == "1f1b":
        return f"and pp_schedule='1f1b' with pp_size={stages} needs {stages} of them or more"
    if schedule == "interleaved_1f1b":
        return (
            f"and pp_schedule='interleaved_1f1b' with pp_size={stages} needs a number that "
            f"its rounds (the number // {stages}) divide"
        )
    return f"for pp_schedule={schedule!r} with pp_size={stages}"


def count_rows(batch: Batch) -> int:
    """B, by the first of the usual names that the batch has.

    Raises:
        ValueError: it has none of them.
    """
    for name in _MAIN:
        value = batch.get(name)
        if isinstance(value, Tensor) and value.ndim > 0:
            return value.shape[0]
    raise ValueError(
        f"A pipeline cuts a batch along the rows of {', '.join(_MAIN)}, but this one has "
        f"{', '.join(map(str, batch)) or 'nothing'}."
    )


def split_batch(batch: Batch, count: int) -> list[dict[str, Any]]:
    """The `count` micro-batches of a batch, views of it.

    Tensors `[B, ...]` are cut, also in dicts (masks of several kinds of attention); those for all rows
    (`[1, ...]`, numbers) and what is no tensor go with each micro-batch; positions of several kinds are
    `[kinds, B, L]`.

    Raises:
        ValueError: a tensor has no dimension of B rows.
    """
    rows = count_rows(batch)
    cut = {name: _cut(name, value, rows, count) for name, value in batch.items()}
    return [{name: parts[index] for name, parts in cut.items()} for index in range(count)]


def _cut(name: str, value: Any, rows: int, count: int) -> list[Any]:
    """What each micro-batch gets of a value."""
    if isinstance(value, Mapping):
        cut = {key: _cut(f"{name}[{key!r}]", each, rows, count) for key, each in value.items()}
        return [{key: parts[index] for key, parts in cut.items()} for index in range(count)]
    dim = _row_dim(name, value, rows)
    if dim is None:
        return [value] * count
    size = rows // count
    return [value.narrow(dim, index * size, size) for index in range(count)]


def dim_of_rows(name: str, value: Tensor) -> int:
    """The dimension of B in a tensor of a batch: 1 of positions of several kinds, `[kinds, B, L]`, else 0.

    By the name, since there may be as many kinds as rows.
    """
    return 1 if name == "position_ids" and value.ndim == 3 else 0


def _row_dim(name: str, value: Any, rows: int) -> int | None:
    """The dimension to cut; None: every micro-batch takes all."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return None
    dim = dim_of_rows(name, value)
    if value.shape[dim] == rows:
        return dim
    if value.shape[dim] == 1:
        return None
    raise ValueError(
        f"{name} has the shape {list(value.shape)}, so it can't be cut into micro-batches of a batch "
        f"of {rows} rows: give it {rows} rows, or 1 for all. Sequences packed into one row without "
        "padding (cu_seq_lens) can't be cut: pack several rows, whose position_ids start again."
    )
