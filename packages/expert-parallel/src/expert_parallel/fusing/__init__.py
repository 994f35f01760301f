"""Compute by one operator what a model composes of several: RMS norms and rotary embeddings.

[Note: what is recognised]
A norm's code is not read but tried: its own forward has to give what `ep_kernels.rms_norm` does, gradients
included (`trial`). A weight of `1 + w`, a gate, dropped or detached terms and another epsilon all fail, and
such a module stays as it is. So it is with the function that rotates queries and keys.
Nothing is changed but the `forward` of the objects of one model: other models of the process keep
theirs.
"""

from __future__ import annotations

from torch import nn

from .norms import fuse_norms
from .rotary import fuse_rotary


def fuse(model: nn.Module) -> list[nn.Module]:
    """`fuse_norms` and `fuse_rotary`."""
    return fuse_norms(model) + fuse_rotary(model)


__all__ = ["fuse", "fuse_norms", "fuse_rotary"]
