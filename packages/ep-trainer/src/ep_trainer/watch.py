"""Ranks that watch each other, so that one that fails stops all, and is named.

[Note: who tells whom]
Each rank of a run has a thread with a connection of its own to the launcher's store; it takes part
in no collective. It writes what its rank does; every `interval` it does so anew, and looks at the
rank after it and at one key where a failure is told: a few small requests, however many the ranks. Who finds a failure
first tells it: a rank that raises, by itself; a rank that is gone, by the rank before it; a step that
takes too long, by one of those that wait. A collective whose peer is gone raises too, at once and
with no word about whose fault it is: such an error waits until the cause is told. A rank that
doesn't leave the run by itself then, since it hangs in a collective, is ended by its thread.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from ep_trainer.failures import (
    Failure,
    PeerError,
    follows_from_a_peer,
    is_running,
    machine,
    standing,
    verdict,
)

logger = logging.getLogger(__name__)

_CONNECT_S, _SAVES_S = 30.0, 60.0


@dataclass(frozen=True)
class Watch:
    """How the ranks of a run watch each other.

    Attributes:
        step_timeout: seconds without any progress (a step, a micro-batch, a batch of an evaluation,
            a save) after which the run is taken to hang. None: only the time limit of the process
            groups holds, whose error doesn't say which rank was missing.
        lost_after: seconds without a word of a rank's thread after which the rank is lost. One of
            the same machine whose process is gone is lost at once.
        grace: seconds that a rank has to leave the run by itself when another one has failed.
        interval: seconds between two looks.

    Raises:
        ValueError: a time that isn't positive, or shorter than two intervals.
    """

    step_timeout: float | None = None
    lost_after: float = 20.0
    grace: float = 5.0
    interval: float = 1.0

    def __post_init__(self) -> None:
        for name in ("interval", "grace", "lost_after", "step_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"Watch: {name} must be a positive number of seconds, got {value}")
        for name in ("lost_after", "step_timeout"):
            value = getattr(self, name)
            if value is not None and value < 2 * self.interval:
                raise ValueError(
                    f"Watch: {name}={value} is shorter than two intervals of {self.interval} seconds"
                )


class Watchdog(TrainerCallback):
    """One rank's part of the watch; a callback, so that it knows where the training is.

    Args:
        watch: the times.
        store: a connection of this object's own, under a prefix of this run's own.
        rank: this one.
        size: ranks in all.
        finish: waits for what should not be cut off, such as a save, so many seconds at most.
        end: ends the process.
    """

    def __init__(
        self,
        watch: Watch,
        store: Any,
        rank: int,
        size: int,
        *,
        finish: Callable[[float], None] = lambda seconds: None,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._watch, self._store = watch, store
        self._rank, self._size = rank, size
        self._finish, self._end = finish, end
        self._main = threading.get_ident()
        self._step, self._doing = 0, "starting"
        self._progress = 0
        self._age = 0.0  # of the progress; by looks, so that a process that was stopped is not late
        self._stuck_told = False
        self._next_beat = ""
        self._next_age = 0.0
        self._wake = threading.Event()
        self._left = threading.Event()
        self._told = threading.Event()
        self._failure: Failure | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # -- in the main thread

    def start(self) -> None:
        """Begin."""
        self._store.set(f"beat/{self._rank}", self._beat(0))
        self._thread.start()

    def stop(self) -> None:
        """End; the others don't miss this rank."""
        self._left.set()
        self._wake.set()
        self._thread.join(2 * self._watch.interval)

    def passed(self, step: int, doing: str) -> None:
        """Note progress."""
        self._progress += 1
        if (step, doing) != (self._step, self._doing):
            self._step, self._doing = step, doing
            self._wake.set()

    def failed(self, error: BaseException) -> None:
        """Tell the others of an error, or learn of which failure it is the consequence.

        Raises:
            PeerError: another rank has failed, and `error` came of that.
        """
        if follows_from_a_peer(error) and self._told.wait(
            self._watch.lost_after + 3 * self._watch.interval
        ):
            assert self._failure is not None
            if self._rank not in self._failure.ranks:
                raise PeerError(self._failure.text) from error
        said = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        self._tell(Failure((self._rank,), f"{self._who()} failed: {said}", alive=True))

    def _who(self) -> str:
        return f"rank {self._rank}, {self._place()},"

    def _place(self) -> str:
        return f"step {self._step} ({self._doing})"

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins."""
        self.passed(state.global_step + 1, "training")

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch is done."""
        self.passed(state.global_step + 1, "training")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done; what comes is logging, an evaluation, a save."""
        self.passed(state.global_step, "after the step")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch of an evaluation is done."""
        self.passed(state.global_step, "evaluating")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint is saved."""
        self.passed(state.global_step, "after a save")

    # -- in the thread

    def _run(self) -> None:
        number, silent, seen, last = 0, 0.0, self._progress, time.monotonic()
        try:
            while not self._left.is_set():
                self._wake.wait(max(last + self._watch.interval - time.monotonic(), 0.0))
                self._wake.clear()
                now = time.monotonic()
                looks = now - last >= self._watch.interval
                passed = min(now - last, 2 * self._watch.interval) if looks else 0.0
                last = now if looks else last
                self._age = 0.0 if self._progress != seen else self._age + passed
                seen, number = self._progress, number + 1
                try:
                    self._store.set(f"beat/{self._rank}", self._beat(number))
                    if looks:
                        self._look_around(passed)
                    silent = 0.0
                except Exception as error:  # noqa: BLE001 (whatever it is, the store is not there)
                    silent += passed
                    if silent > self._watch.lost_after:
                        self._store_is_gone(error)
                        return
                if self._failure is not None:
                    self._leave(self._failure)
                    return
        finally:
            with suppress(Exception):
                self._store.set(f"beat/{self._rank}", "")

    def _beat(self, number: int) -> str:
        told = {"n": number, "place": self._place(), "pid": os.getpid(), "where": machine()}
        return json.dumps(told)

    def _look_around(self, passed: float) -> None:
        text = self._read("failed")
        if text:
            self._failure = Failure.decoded(text)
            self._told.set()
            return
        self._look_at_next(passed)
        limit = self._watch.step_timeout
        if limit is not None and self._age > limit:
            self._hangs()
        elif self._stuck_told:
            self._stuck_told = False
            self._store.set(f"stuck/{self._rank}", "")

    def _look_at_next(self, passed: float) -> None:
        """Tell of the rank after this one if it is gone."""
        other = (self._rank + 1) % self._size
        beat = self._read(f"beat/{other}")
        self._next_age = 0.0 if beat != self._next_beat else self._next_age + passed
        self._next_beat = beat
        if not beat:  # it has not begun, or has left
            return
        told = json.loads(beat)
        who = f"rank {other}, {told['place']},"
        if told["where"] == machine() is not None and not is_running(told["pid"]):
            how = (
                "is gone: its process was killed (by the system if it ran out of memory) or exited"
            )
            if self._read(f"beat/{other}"):  # it did not leave meanwhile
                self._tell(Failure((other,), f"{who} {how}", alive=False))
        elif self._next_age > self._watch.lost_after:
            how = f"is lost: no word of it for {self._next_age:.0f} seconds"
            self._tell(Failure((other,), f"{who} {how}", alive=False))

    def _hangs(self) -> None:
        """Tell where this rank stands; after the others did so, one of them tells all."""
        if not self._stuck_told:
            self._stuck_told = True
            where, waits = standing(self._main)
            told = {"step": self._step, "doing": self._doing, "where": where, "waits": waits}
            self._store.set(f"stuck/{self._rank}", json.dumps(told))
            return
        assert self._watch.step_timeout is not None
        if self._age < self._watch.step_timeout + 3 * self._watch.interval:
            return
        stuck, moving = {}, {}
        for rank in range(self._size):
            text = self._read(f"stuck/{rank}")
            if text:
                stuck[rank] = json.loads(text)
            elif beat := self._read(f"beat/{rank}"):
                moving[rank] = json.loads(beat)["place"]
        if moving and self._age < 2 * self._watch.step_timeout:
            return  # they may have come to a halt only after this rank
        ranks, text = verdict(stuck, moving, self._watch.step_timeout)
        self._tell(Failure(ranks, text, alive=True))

    def _tell(self, failure: Failure) -> None:
        """Tell all, unless a failure is told already: the first one counts."""
        with suppress(Exception):
            first = self._store.compare_set("failed", "", failure.encoded())
            self._failure = Failure.decoded(bytes(first).decode())
            self._told.set()

    def _read(self, key: str) -> str:
        """A key of the store; "" if it isn't there."""
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""

    def _leave(self, failure: Failure) -> None:
        if self._left.wait(self._watch.grace):
            return
        if failure.alive:
            self._finish(_SAVES_S)
        if not self._left.is_set():
            self._exit(failure.text)

    def _store_is_gone(self, error: Exception) -> None:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # The first rank has it, which may have ended its run before this one.
            logger.warning("the ranks are no longer watched: the store is gone (%s)", error)
            return
        self._exit(f"the launcher of the first node is gone: its store does not answer ({error})")

    def _exit(self, text: str) -> None:
        who = f"rank {self._rank}, {self._place()}"
        with suppress(Exception):
            print(f"{who}, is ended: {text}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        self._end(1)


@contextmanager
def watched(
    watch: Watch | None, finish: Callable[[float], None], group: dist.ProcessGroup | None = None
) -> Iterator[Watchdog | None]:
    """Watch the ranks while the body runs; every rank must call, with its main thread.

    None where there is one rank, or no launcher with a store that others can connect to
    (`MASTER_ADDR` and `MASTER_PORT`). Costs one broadcast over `group`, a gloo one.

    Raises:
        PeerError: the body failed since another rank has.
    """
    store = None
    if watch is not None and dist.is_initialized() and dist.get_world_size() > 1:
        # The store outlives a start by torchrun, whose number need not be the same on all machines.
        run = [uuid.uuid4().hex]
        dist.broadcast_object_list(run, src=0, group=group)
        store = _store()
    if watch is None or store is None:
        yield None
        return
    own = dist.PrefixStore(f"ep_trainer/watch/{run[0]}", store)  # type: ignore[attr-defined]
    dog = Watchdog(watch, own, dist.get_rank(), dist.get_world_size(), finish=finish)
    dog.start()
    try:
        yield dog
    except BaseException as error:
        dog.failed(error)
        raise
    finally:
        dog.stop()


def _store() -> Any:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        return None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, int(port), is_master=False, timeout=timedelta(seconds=_CONNECT_S)
        )
    except (RuntimeError, ValueError) as error:
        logger.warning(
            "the ranks don't watch each other: no store at %s:%s (%s)", address, port, error
        )
        return None
