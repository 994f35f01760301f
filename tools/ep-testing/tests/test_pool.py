from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ep_testing import RankError, RankPool

pytest_plugins = ["pytester"]


@dataclass(frozen=True)
class Answer:
    rank: int
    total: float


def total_of(rank: int, offset: float) -> Answer:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return Answer(rank, value.item())


def assert_works(ranks: RankPool) -> None:
    assert ranks.run(total_of, 0.0) == [Answer(r, 28.0) for r in range(8)]


@pytest.mark.parametrize("world", range(1, 9))
def test_results_come_in_order_from_a_world_of_that_size(ranks: RankPool, world: int) -> None:
    want = sum(range(world)) + 0.5 * world
    assert ranks.run(total_of, 0.5, world=world) == [Answer(r, want) for r in range(world)]


def test_worlds_are_kept(ranks: RankPool) -> None:
    first = ranks.run(lambda rank: os.getpid(), world=3)
    ranks.run(total_of, 0.0, world=2)
    assert ranks.run(lambda rank: os.getpid(), world=3) == first


def test_closures_work_and_ranks_have_one_thread(ranks: RankPool) -> None:
    weights = torch.arange(3.0)
    results = ranks.run(lambda rank: (weights * rank, torch.get_num_threads()), world=2)
    assert torch.equal(results[1][0], weights)
    assert [threads for _, threads in results] == [1, 1]


def test_every_call_starts_from_the_same_seeds(ranks: RankPool) -> None:
    def draw(rank: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    first = ranks.run(draw, world=2)
    assert first == ranks.run(draw, world=2)
    assert first[0] == first[1]


@pytest.mark.parametrize("world", [0, 9])
def test_a_world_of_another_size_is_refused(ranks: RankPool, world: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 8, got {world}"):
        ranks.run(total_of, 0.0, world=world)


def test_a_failing_rank_shows_its_traceback_while_its_peers_wait(ranks: RankPool) -> None:
    def fail(rank: int) -> None:
        if rank in (2, 5):
            assert rank == 7
        dist.barrier()

    assert_works(ranks)
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        ranks.run(fail)
    assert time.monotonic() - start < 10
    for rank in (2, 5):
        assert re.search(
            rf"--- rank {rank}: Traceback(.|\n)*in fail(.|\n)*assert {rank} == 7", str(error.value)
        )
    assert "--- rank 0: gave no answer" in str(error.value)
    assert_works(ranks)


@pytest.mark.parametrize(
    ("die", "reason"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "signal SIGSEGV"),
    ],
)
def test_a_dying_rank_fails_the_call_within_seconds(ranks: RankPool, die, reason) -> None:
    def run(rank: int) -> None:
        if rank == 1:
            die()
        dist.barrier()

    assert_works(ranks)
    start = time.monotonic()
    with pytest.raises(RankError, match=f"--- rank 1: died, {reason}"):
        ranks.run(run)
    assert time.monotonic() - start < 10
    assert_works(ranks)


def test_a_rank_that_dies_between_calls_is_told(ranks: RankPool) -> None:
    pids = ranks.run(lambda rank: os.getpid(), world=2)
    os.kill(pids[1], signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(RankError, match="--- rank 1: died, signal SIGKILL"):
        ranks.run(total_of, 0.0, world=2)
    ranks.run(total_of, 0.0, world=2)


def test_a_hang_ends_at_the_limit_and_shows_where(ranks: RankPool) -> None:
    def wait_for_nobody(rank: int) -> None:
        if rank != 3:
            dist.barrier()

    assert_works(ranks)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0: no answer within 2 s(.|\n)*wait_for_nobody"):
        ranks.run(wait_for_nobody, timeout=2)
    assert 2 <= time.monotonic() - start < 10
    assert_works(ranks)


@pytest.mark.parametrize("leave", [sys.exit, pytest.skip, pytest.exit])
def test_no_exception_ends_a_rank_in_silence(ranks: RankPool, leave) -> None:
    def run(rank: int) -> None:
        leave("told")

    with pytest.raises(RankError, match="told"):
        ranks.run(run, world=1)


def test_a_result_that_cannot_be_pickled_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        ranks.run(lambda rank: (x for x in ()), world=1)


def test_a_world_that_has_opened_many_files_is_replaced(ranks: RankPool) -> None:
    def leak(rank: int) -> int:
        import builtins

        builtins.leaked = [os.open(os.devnull, os.O_RDONLY) for _ in range(800)]
        return os.getpid()

    assert ranks.run(leak, world=1) != ranks.run(lambda rank: os.getpid(), world=1)


def test_ranks_end_with_the_process_that_started_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, signal, pathlib

        def test_abort(ranks):
            pids = ranks.run(lambda rank: os.getpid(), world=2)
            pathlib.Path("pids").write_text(" ".join(map(str, pids)))
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    pytester.runpytest_subprocess("-s", timeout=120)
    pids = [int(pid) for pid in (pytester.path / "pids").read_text().split()]
    deadline = time.monotonic() + 10
    while any(map(_lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_lives, pids))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
