"""Optimizer state in few bits (torchao's AdamW), for checkpoints.

Such a state is quantized in blocks of this rank's part of a parameter, so its codes fit no other way to
cut it. As float32 it is like any other state: it can be saved, cut anew and quantized again, which
rounds once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ep_plans import local
from ep_plans.shards import placed_like
from ep_trainer._compat import is_traceable_wrapper_subclass, new_low_bit_state


def is_low_bit(state: Tensor) -> bool:
    """Whether a tensor of an optimizer's state is a wrapper around codes and scales."""
    return is_traceable_wrapper_subclass(local(state))


def low_bit_parameters(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The parameters whose optimizer state is kept in few bits on this rank, by name.

    torchao quantizes parts of at least 4096 numbers whose size is a multiple of the block size.
    """
    return [
        name
        for name, parameter in model.named_parameters()
        if any(
            isinstance(value, Tensor) and is_low_bit(value)
            for value in optimizer.state.get(parameter, {}).values()
        )
    ]


def widened(state: Tensor) -> Tensor:
    """The state as float32, placed as it was; another tensor than low-bit ones as it is."""
    if not is_low_bit(state):
        return state
    part: Any = local(state)
    wide: Tensor = part.dequantize(torch.float32)
    return placed_like(state, wide) if isinstance(state, DTensor) else wide


def narrowed(optimizer: Optimizer, parameter: Tensor, name: str, wide: Tensor) -> Tensor:
    """A state that `widened` gave, as `optimizer` keeps it for its `parameter`.

    Args:
        optimizer: of any kind; one that quantizes nothing gets `wide` as it is.
        parameter: the parameter.
        name: of the state, such as "exp_avg".
        wide: with the shape and placement of the parameter.
    """
    state = new_low_bit_state(optimizer, parameter, name)
    if state is None or not is_low_bit(state):
        return wide
    local(state).copy_(local(wide))
    return state
