"""Integers between the host and a device, each waiting for no more than it must.

On CUDA a plain `tensor.tolist()` waits for all that its stream was given, and a tensor made of a list
waits as long, since ordinary memory can't be copied behind the host's back. Pinned memory can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["capturing", "on_device", "on_host"]


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """The values as int64 on `device`. No host synchronization."""
    pinned = device.type == "cuda"
    host = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
    return host.to(device, non_blocking=True)


def on_host(x: Tensor) -> Any:
    """`x.tolist()`. One host synchronization.

    On CUDA the copy goes by a stream of its own, and the host waits for that copy alone: not for what
    the present stream is given meanwhile, by another thread or a hook.
    """
    if x.device.type != "cuda":
        return x.tolist()
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    stream = torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        copy.copy_(x, non_blocking=True)
        done = stream.record_event()
    x.record_stream(stream)
    done.synchronize()
    return copy.tolist()


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
