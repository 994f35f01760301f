"""The row operators of `ep_dispatch`, for CUDA.

Its operators `ep::gather_rows` and `ep::sum_rows` have plain torch for every device, fake kernels and
autograd. Here is what the dispatcher takes instead on CUDA, whichever package is imported first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rows import gather, segment_sums


def gather_rows(x: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Row `index[n]` of `x` [T, ...] at n: [N, ...]."""
    return gather(_flat(x), index).view(index.shape[0], *x.shape[1:])


def sum_rows(rows: Tensor, index: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """The sum of the rows [N, ...] that `order` [N] names from one of `ends` [T + 1] to the next."""
    shape = ends.shape[0] - 1, *rows.shape[1:]
    if rows.numel() == 0:
        return rows.new_zeros(shape)
    return segment_sums(_flat(rows), order, ends[:-1]).view(shape)


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


torch.library.impl("ep::gather_rows", "CUDA", gather_rows)
torch.library.impl("ep::sum_rows", "CUDA", sum_rows)
