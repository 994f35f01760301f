"""Ranks that watch each other: threads over a store in one process. Under torchrun, with ranks that
are killed, it is in `integration_tests/test_faults.py`."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from ep_trainer import PeerError, Watch
from ep_trainer.failures import follows_from_a_peer, standing, verdict
from ep_trainer.watch import Watchdog

QUICK = {"interval": 0.02, "lost_after": 0.4, "grace": 0.1}
GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:28847."


class Ranks:
    """Watchdogs of several ranks, and how they ended their processes."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.ended: dict[int, int] = {}
        self.dogs: list[Watchdog] = []

    def start(self, size: int, **changes: Any) -> list[Watchdog]:
        watch = Watch(**QUICK | changes)
        for rank in range(size):
            end = functools.partial(self.ended.__setitem__, rank)
            self.dogs.append(Watchdog(watch, self.store, rank, size, end=end))
        for dog in self.dogs:
            dog.start()
            dog.passed(7, "training")
        time.sleep(0.1)
        return self.dogs

    def wait_for_ends(self, count: int) -> None:
        end = time.monotonic() + 20
        while len(self.ended) < count and time.monotonic() < end:
            time.sleep(0.01)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for dog in made.dogs:
        dog.stop()


def test_a_rank_that_raises_is_named_by_all(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = ranks.start(3)
    error = ValueError("out of luck")
    error.add_note("in layer 3")
    second.failed(error)
    second.stop()
    with pytest.raises(
        PeerError, match=r"rank 1, step 7 \(training\), failed: ValueError: .* layer 3"
    ):
        first.failed(RuntimeError(GLOO))
    first.stop()
    ranks.wait_for_ends(1)
    assert ranks.ended == {2: 1}, "only who doesn't leave by itself is ended"
    assert "rank 2, step 7 (training), is ended: rank 1, step 7" in capfd.readouterr().err


def test_an_error_of_a_collective_is_ones_own_if_nobody_failed(ranks: Ranks) -> None:
    first, second = ranks.start(2)
    first.failed(RuntimeError(GLOO))
    with pytest.raises(PeerError, match=r"rank 0, step 7.*closed by peer"):
        second.failed(RuntimeError(GLOO))


def test_a_silent_rank_is_lost(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = ranks.start(3)
    monkeypatch.setattr(second, "_beat", lambda number: second_beat)
    second_beat = '{"n": 1, "place": "step 7 (training)", "pid": 0, "where": null}'
    with pytest.raises(PeerError, match=r"rank 1, step 7 \(training\), is lost: no word of it"):
        third.failed(RuntimeError(GLOO))
    with pytest.raises(PeerError, match="rank 1"):
        first.failed(RuntimeError(GLOO))


def test_a_rank_whose_process_is_gone_is_lost_at_once(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks.start(2, lost_after=1000.0)
    monkeypatch.setattr(second, "_look_at_next", lambda passed: None)
    monkeypatch.setattr("ep_trainer.watch.is_running", lambda pid: False)
    with pytest.raises(PeerError, match=r"rank 1, step 7 .* is gone: its process was killed"):
        first.failed(RuntimeError(GLOO))


def test_ranks_that_leave_are_not_missed(ranks: Ranks) -> None:
    dogs = ranks.start(3)
    for dog in dogs[1:]:
        dog.stop()
    time.sleep(0.8)
    assert not ranks.ended
    dogs[0].failed(ValueError("its own"))


def test_a_step_without_end_is_told_unless_there_is_progress(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    dogs = ranks.start(3, step_timeout=0.5)
    for _ in range(20):
        time.sleep(0.05)
        for dog in dogs:
            dog.passed(7, "evaluating")
    assert not ranks.ended
    for _ in range(60):
        time.sleep(0.05)
        dogs[1].passed(9, "evaluating")
    ranks.wait_for_ends(3)
    assert sorted(ranks.ended) == [0, 1, 2]
    told = "rank 1 is in step 9 (evaluating), but ranks 0, 2 waited for 0.5 seconds"
    assert capfd.readouterr().err.count(told) == 3


def test_whose_fault_a_hang_is() -> None:
    def stuck(step: int, where: str, waits: bool) -> dict[str, Any]:
        return {"step": step, "doing": "training", "where": where, "waits": waits}

    wait, other = stuck(5, "a.py:1 (reduce)", True), stuck(5, "a.py:9 (gather)", True)
    assert verdict({0: wait, 1: stuck(5, "b.py:2 (load)", False)}, {}, 9)[0] == (1,)
    assert verdict({0: wait, 1: wait, 2: other}, {}, 9)[0] == (2,)
    assert verdict({0: wait, 1: stuck(4, "a.py:1 (reduce)", True)}, {}, 9)[0] == (1,)
    assert verdict({0: wait, 2: wait}, {1: "step 6 (saving)"}, 9)[0] == (1,)
    _, text = verdict({0: wait, 1: stuck(5, "b.py:2 (load)", False)}, {}, 9)
    assert text == (
        "rank 1, step 5 (training), hangs at b.py:2 (load); rank 0 waited, rank 0 at a.py:1 (reduce): "
        "no progress for 9 seconds"
    )


def test_where_a_thread_stands() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert thread.ident is not None
    where, waits = standing(thread.ident)
    stop.set()
    assert "(wait)" in where
    assert not waits


def test_which_errors_come_of_a_peer() -> None:
    assert follows_from_a_peer(RuntimeError(GLOO))
    assert follows_from_a_peer(dist.DistBackendError("NCCL communicator was aborted"))
    with pytest.raises(KeyError) as caught:
        raise KeyError("x") from RuntimeError(GLOO)
    assert follows_from_a_peer(caught.value)
    assert not follows_from_a_peer(ValueError("a batch of 3 rows"))


@pytest.mark.parametrize(
    "wrong", [{"interval": 0}, {"lost_after": 1.5}, {"step_timeout": -1.0}, {"step_timeout": 1.0}]
)
def test_times_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Watch(**wrong)
