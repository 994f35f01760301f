"""What runs inside a rank of the pool: join the process group, then serve calls one by one."""

from __future__ import annotations

import ctypes
import datetime as dt
import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

# A collective that nobody ends must not outlive an aborted run for long; the time limit of a
# call is the pool's business and is far shorter.
GROUP_TIMEOUT = dt.timedelta(minutes=10)


def serve(rank: int, world: int, folder: str, conn: Connection) -> None:
    """Serve calls from `conn` until the process at its other end closes it or ends.

    A message is a cloudpickled `(fn, args)`; the answer is `("ok", value, open_files)` or
    `("error", traceback, open_files)`, pickled by value so that it needs no shared memory.
    """
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends the ranks
    stacks = Path(folder, f"stack-{rank}").open("w")  # noqa: SIM115 (open as long as the rank)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    with suppress(EOFError, OSError):  # nobody is there to be told
        conn.send_bytes(_answer(_join, rank, world, folder))
        while True:
            message = conn.recv_bytes()
            _seed(0)
            conn.send_bytes(_answer(_call, rank, message))


def _answer(fn: Callable[..., Any], *args: Any) -> bytes:
    """What `fn` returns or raises, ready to be sent."""
    try:
        answer: bytes = cloudpickle.dumps(("ok", fn(*args), _open_files()))
    except BaseException:  # noqa: BLE001 (SystemExit and pytest's outcomes are told too)
        answer = cloudpickle.dumps(("error", traceback.format_exc(), _open_files()))
    return answer


def _call(rank: int, message: bytes) -> Any:
    fn, args = pickle.loads(message)
    return fn(rank, *args)


def _join(rank: int, world: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
    )
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=GROUP_TIMEOUT,
    )


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (only the count is wanted)
    except OSError:
        return 0


def _seed(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _die_with_parent() -> None:
    """Have the kernel end this rank when the fork server ends, which ends with pytest."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
