"""A pool of gloo ranks for tests: processes that are started once and called many times.

The ranks are forked from one warm server (Python's `forkserver`) that has imported torch,
so starting eight takes tenths of a second and a call takes milliseconds. A rank that fails
leaves its peers waiting in a collective, so after any failure the whole world is killed and
the next call forks a new one.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from ep_testing.rank import serve

MAX_WORLD = 8
START_TIMEOUT = 180.0  # seconds; the first start imports torch, slowly on a busy machine
GRACE = 1.0  # seconds that the other ranks get to answer after one has failed
MAX_OPEN_FILES = 600  # each mesh leaves sockets and threads behind: then fork anew

TORCH_MODULES = (
    "pytest",
    "numpy",
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch._dynamo",  # fully_shard imports these two lazily, 2 s in every fresh rank
    "torch._inductor",
)
MODEL_MODULES = (
    "transformers",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama4.modeling_llama4",
)


class RankError(AssertionError):
    """A rank raised, died or gave no answer in time; the message tells of each such rank."""


class RankPool:
    """Worlds of 1 to 8 ranks, each started at its first use and kept.

    Args:
        preload: modules that the server imports once, before any rank is forked. The server
            lives as long as the process, so the first pool's list counts.
        timeout: seconds that a call may take unless `run` says otherwise.
    """

    def __init__(self, preload: Sequence[str] | None = None, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload or default_preload()))
        self._worlds: dict[int, _World] = {}

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world: int = MAX_WORLD,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call `fn(rank, *args)` on ranks 0 to `world - 1` and return their results in order.

        `torch.distributed` is initialised with gloo for exactly these ranks, one thread each,
        seeds set to 0. `fn` may be a closure or a function of a test module. State that
        `fn` leaves in a process stays there until the pool is closed or a call fails.

        Raises:
            RankError: a rank raised or died (known within about two seconds, whatever the
                others do) or one has not answered after `timeout` seconds.
        """
        __tracebackhide__ = True  # pytest then shows the caller's line and the ranks' tracebacks
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world must be 1 to {MAX_WORLD}, got {world}")
        job = _dumps(fn, args)
        if world not in self._worlds:
            self._worlds[world] = _World(self._context, world)
        ranks = self._worlds[world]
        try:
            results = ranks.call(job, self.timeout if timeout is None else timeout)
        except BaseException:  # also a test's time limit or Ctrl-C, which leave ranks at work
            self._worlds.pop(world).kill()
            raise
        if ranks.open_files > MAX_OPEN_FILES:
            self._worlds.pop(world).kill()
        return results

    def close(self) -> None:
        """End every rank. The pool can be used again and then starts new ones."""
        while self._worlds:
            self._worlds.popitem()[1].kill()


class _World:
    """The processes of one world size and the pipes to them."""

    def __init__(self, context: mp.context.ForkServerContext, size: int) -> None:
        self.size = size
        self.open_files = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._conns: list[Connection] = []
        self._processes: list[mp.context.ForkServerProcess] = []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve, args=(rank, size, self._folder.name, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self._conns.append(ours)
                self._processes.append(process)
            self._collect(START_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def call(self, job: bytes, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        for conn in self._conns:
            with suppress(OSError):  # a rank that died since: _collect tells of it
                conn.send_bytes(job)
        return self._collect(timeout)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for conn in self._conns:
            conn.close()
        self._folder.cleanup()

    def _collect(self, timeout: float) -> list[Any]:
        """Wait for each rank's answer; raise if one failed, died or is late."""
        __tracebackhide__ = True
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        pending = set(range(self.size))
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            # A sentinel tells of a death even where a child of the rank holds the pipe open.
            ready = wait(
                [self._conns[r] for r in pending] + [self._processes[r].sentinel for r in pending],
                timeout=left,
            )
            for rank in sorted(pending):
                if self._conns[rank] in ready or self._processes[rank].sentinel in ready:
                    pending.remove(rank)
                    status, value = self._answer(rank)
                    (results if status == "ok" else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE)
        if errors:
            errors |= dict.fromkeys(pending, "gave no answer after another rank failed\n")
        elif pending:
            errors = self._stacks(pending, timeout)
        if errors:
            raise RankError(
                f"{len(errors)} of {self.size} ranks failed\n"
                + "\n".join(f"--- rank {r}: {text}" for r, text in sorted(errors.items()))
            )
        return [results[rank] for rank in range(self.size)]

    def _answer(self, rank: int) -> tuple[str, Any]:
        try:
            if self._conns[rank].poll():  # the last words of a rank that died count as well
                status, value, open_files = pickle.loads(self._conns[rank].recv_bytes())
                self.open_files = max(self.open_files, open_files)
                return status, value
        except (EOFError, OSError):
            pass
        self._processes[rank].join(5)
        return "error", f"died, {_exit_reason(self._processes[rank].exitcode)}\n"

    def _stacks(self, ranks: set[int], timeout: float) -> dict[int, str]:
        """Where each late rank is now, by its own fault handler."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.2)
        return {
            rank: f"no answer within {timeout:g} s; it was here:\n"
            + Path(self._folder.name, f"stack-{rank}").read_text()
            for rank in ranks
        }


def default_preload() -> list[str]:
    """Torch, what this process has of this repository, and the models if transformers is loaded."""
    ours = [name for name in sys.modules if name.startswith(("ep_", "expert_")) and "." not in name]
    models = MODEL_MODULES if "transformers" in sys.modules else ()
    return [*TORCH_MODULES, *models, *ours]


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _dumps(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    with _tests_by_value():
        job: bytes = cloudpickle.dumps((fn, args))
        return job


@contextmanager
def _tests_by_value() -> Iterator[None]:
    """Pickle what test modules define by value: ranks cannot import them."""
    with ExitStack() as stack:
        for module in [m for m in sys.modules.values() if _is_test_module(m)]:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _is_test_module(module: object) -> bool:
    if not isinstance(module, ModuleType):  # sys.modules may hold anything
        return False
    name = module.__name__.rpartition(".")[2]
    return name == "conftest" or name.startswith("test_")
