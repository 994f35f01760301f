"""Label counts and rows that only fill up a batch."""

import pytest
import torch

from ep_mesh import Layout, ParallelMesh
from ep_testing import RankPool
from ep_trainer.data import (
    check_shared,
    count_labels,
    first_sequences,
    len_of,
    sequence_starts,
    without_fillers,
)


@pytest.mark.parametrize("error", [TypeError, AttributeError, NotImplementedError])
def test_a_stream_has_no_length(error: type[Exception]) -> None:
    class Stream:
        def __len__(self) -> int:
            raise error

    assert len_of(Stream()) is None
    assert len_of([1, 2]) == 2


def test_a_shifted_loss_predicts_nothing_at_the_first_position() -> None:
    batches = [
        {"labels": torch.tensor([[5, 6, -100, 7], [5, -100, -100, -100]])},
        {"labels": torch.tensor([[1, 2, 3]])},
    ]
    assert count_labels(batches, shifted=True).item() == 2 + 0 + 2
    assert count_labels(batches, shifted=False).item() == 3 + 1 + 3


def test_labels_that_the_collator_shifted_count_as_they_are() -> None:
    batch = {"labels": torch.ones(1, 9), "shift_labels": torch.tensor([[4, 5, -100]])}
    assert count_labels([batch], shifted=True).item() == 2


def test_labels_that_are_no_tensor_are_not_counted() -> None:
    assert count_labels([{"labels": [{"boxes": 1}]}], shifted=False) is None


def test_fillers_lose_their_labels_and_nothing_else() -> None:
    batch = {"input_ids": torch.arange(6).reshape(3, 2), "labels": torch.arange(6).reshape(3, 2)}
    masked = without_fillers(batch, 1)
    assert masked["labels"].tolist() == [[0, 1], [-100, -100], [-100, -100]]
    assert torch.equal(masked["input_ids"], batch["input_ids"])
    assert batch["labels"].min() == 0, "the batch itself is left alone"


def test_sequences_that_fill_up_a_row_are_cut_off() -> None:
    batch = {
        "input_ids": torch.arange(6)[None],
        "labels": torch.arange(6)[None],
        "position_ids": torch.tensor([[0, 1, 0, 0, 1, 2]]),
        "cu_seq_lens_q": torch.tensor([0, 2, 3, 6]),
        "max_length_q": 3,
    }
    starts = sequence_starts(batch)
    assert starts == [0, 2, 3]
    cut = first_sequences(batch, starts, 2)
    assert cut["input_ids"].tolist() == cut["labels"].tolist() == [[0, 1, 2]]
    assert cut["cu_seq_lens_q"].tolist() == [0, 2, 3]
    assert cut["max_length_q"] == 2
    nothing = first_sequences(batch, starts, 0)
    assert nothing["labels"].tolist() == [[-100, -100]], "one stays, since every rank must run"
    assert sequence_starts({"position_ids": torch.zeros(2, 3)}) == []


def check(rank: int, differing: tuple[int, ...]) -> str | None:
    mesh = ParallelMesh(Layout(tp=2, fsdp=2))
    ids = torch.arange(8) + 100 * mesh.layout.batch_of(rank)
    if rank in differing:
        ids = ids.flip(0)  # the same numbers in another order
    try:
        check_shared({"input_ids": ids, "other": "text"}, mesh)
    except ValueError as error:
        return str(error)
    return None


def test_batches_that_differ_within_a_tp_group_are_told_on_every_rank(ranks: RankPool) -> None:
    assert ranks.run(check, (), world=4) == [None] * 4
    assert ranks.run(check, (2, 3), world=4) == [None] * 4, "both ranks of a group alike"
    messages = ranks.run(check, (3,), world=4)
    assert all(message and "different batches" in message for message in messages)
