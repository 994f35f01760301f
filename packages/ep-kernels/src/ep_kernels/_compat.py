"""Private APIs of torch, with the versions they were seen in."""

from __future__ import annotations

# torch 2.11 to 2.13: what sees each operator before it runs.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
