"""Which calls are left to a model's own code, whatever the operator."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

SMALL = 1 << 14
"""Elements. Of fewer on a CPU, Python costs more than passes over memory: the model's own code runs."""


def may_fuse(x: Any, *others: Any) -> TypeGuard[Tensor]:
    """Whether these are plain tensors of one dtype and device, `x` of more than few values.

    Not under torch.compile, which fuses by itself.
    """
    if torch.compiler.is_compiling() or not _is_plain(x):
        return False
    if x.device.type == "cpu" and x.numel() < SMALL:
        return False
    return all(_is_plain(t) and t.dtype is x.dtype and t.device == x.device for t in others)


def _is_plain(x: Any) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and not isinstance(x, DTensor)
