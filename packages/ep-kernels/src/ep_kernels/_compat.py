"""What this package knows of the insides of others, with the versions it was seen in."""

from __future__ import annotations

# torch 2.11 to 2.13: what sees each operator before it runs.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SILU_CLASSES", "TorchDispatchMode"]

# By name, since transformers is not imported here. Its own (5.17 to 5.24) is what "silu" in a config
# stands for, and calls `torch.nn.functional.silu`.
SILU_CLASSES = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")
