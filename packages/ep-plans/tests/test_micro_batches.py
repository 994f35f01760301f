"""A batch is cut into equal micro-batches, and what can't be is refused with what fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_mesh import PP_SCHEDULES
from ep_plans.micro_batches import micro_batch_count, split_batch


@pytest.mark.parametrize("schedule", PP_SCHEDULES)
def test_a_chosen_number_divides_the_batch_and_is_given_back(schedule: str) -> None:
    for stages in range(2, 9):
        for rows in range(2 * stages, 40, 2 * stages):
            assert micro_batch_count(rows, stages, schedule, None) == 2 * stages
        for rows in range(stages, 40):
            chosen = micro_batch_count(rows, stages, schedule, None)
            assert rows % chosen == 0
            assert micro_batch_count(rows, stages, schedule, chosen) == chosen


def test_the_next_number_that_fits_is_chosen() -> None:
    assert micro_batch_count(30, 4, "1f1b", None) == 10
    assert micro_batch_count(6, 4, "1f1b", None) == 6
    assert micro_batch_count(7, 4, "zero_bubble", None) == 7


@pytest.mark.parametrize(
    ("rows", "schedule", "given", "told"),
    [
        (8, "1f1b", 3, "pp_micro_batches=3 does not fit.*needs 4 of them or more.*these fit: 4, 8"),
        (8, "1f1b", 2, "these fit: 4, 8"),
        (3, "1f1b", None, "batches of 8 rows or a multiple"),
        (9, "interleaved_1f1b", 9, "rounds.*these fit: 1, 3"),
        (6, "zero_bubble", 4, "these fit: 1, 2, 3, 6"),
    ],
)
def test_other_numbers_are_refused_with_what_fits(
    rows: int, schedule: str, given: int | None, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        micro_batch_count(rows, 4, schedule, given)


def test_parts_put_together_are_the_batch() -> None:
    batch: dict[str, Any] = {
        "input_ids": torch.arange(24).view(6, 4),
        "position_ids": torch.arange(72).view(3, 6, 4),
        "inverse": torch.arange(4).view(1, 4),
        "scale": torch.tensor(2.0),
        "attention_mask": {"full": torch.arange(6).view(6, 1, 1, 1), "sliding": None},
        "use_cache": False,
    }
    parts = split_batch(batch, 3)
    whole = {
        "input_ids": torch.cat([part["input_ids"] for part in parts]),
        "position_ids": torch.cat([part["position_ids"] for part in parts], dim=1),
    }
    for name, value in whole.items():
        assert torch.equal(value, batch[name])
    masks = [part["attention_mask"]["full"] for part in parts]
    assert torch.equal(torch.cat(masks), batch["attention_mask"]["full"])
    for part in parts:
        assert part["inverse"] is batch["inverse"]
        assert part["scale"] is batch["scale"]
        assert part["attention_mask"]["sliding"] is None
        assert part["use_cache"] is False


def test_positions_of_as_many_kinds_as_rows_are_cut_along_the_rows() -> None:
    ids, positions = torch.arange(12).view(3, 4), torch.arange(36).view(3, 3, 4)
    for row, part in enumerate(split_batch({"input_ids": ids, "position_ids": positions}, 3)):
        assert torch.equal(part["position_ids"], positions[:, row : row + 1])
    shared = positions[:, :1]
    for part in split_batch({"input_ids": ids, "position_ids": shared}, 3):
        assert part["position_ids"] is shared


def test_what_has_no_rows_is_refused() -> None:
    ids = torch.zeros(4, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="cu_seq_lens_q has the shape"):
        split_batch({"input_ids": ids, "cu_seq_lens_q": torch.arange(3)}, 2)
    with pytest.raises(ValueError, match="pixels"):
        split_batch({"pixels": ids}, 2)
