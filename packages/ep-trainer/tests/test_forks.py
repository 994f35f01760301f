"""A fork of the main thread comes after what its other threads had to end."""

from __future__ import annotations

import os
import threading
import time

from ep_testing import RankPool
from ep_trainer.forks import forks_wait_for


class Saver:
    """A save that takes a moment."""

    waited = 0

    def join(self, timeout: float) -> None:
        time.sleep(min(timeout, 0.1))
        self.waited += 1


def fork() -> None:
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)


def forks(rank: int) -> tuple[float, int, int]:
    saver = Saver()
    forks_wait_for(saver)
    begin = time.monotonic()
    fork()
    seconds, waited = time.monotonic() - begin, saver.waited
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return seconds, waited, saver.waited - waited


def test_a_fork_waits_for_a_save_and_for_collectives(ranks: RankPool) -> None:
    for seconds, waited, by_another_thread in ranks.run(forks, world=2):
        assert seconds > 0.1 + 0.05, "the save, then the threads of collectives"
        assert waited == 1
        assert by_another_thread == 0, "which may be the save's own"
