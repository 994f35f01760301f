"""Gradients of several micro-batches: kept on the rank, reduced with the last one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of these backwards on the rank; the next backward outside reduces them.

    With and without it the accumulated gradients are the same. It saves a reduce-scatter per
    micro-batch, and costs memory: gradients stay unsharded, in the dtype they are reduced in. What
    autograd reduces itself (the norms of heads over TP) is reduced in each micro-batch, once.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
