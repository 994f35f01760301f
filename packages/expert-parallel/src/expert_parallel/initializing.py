"""Initial values for parameters that no file holds, the same in every layout.

A parameter is drawn whole, as on a single process, and cut: so shards differ from each other,
copies agree, and the values don't depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from expert_parallel import _compat
from expert_parallel.lazy import Constant
from expert_parallel.shards import box_of


def initialize_missing(model: PreTrainedModel, rest: Callable[[], None]) -> None:
    """Initialize the sharded parameters without a mark, then let ``rest`` do the others.

    The seed is drawn on rank 0; every rank must call.  Memory: one module's whole parameters.
    """
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_shared_seed())
        for owner, module in _in_order(model, model):
            _initialize_module(owner, module)
        rest()


def _shared_seed() -> int:
    seed = [int(torch.randint(2**62, ()))]
    if dist.is_initialized():
        dist.broadcast_object_list(seed, src=0)
    return seed[0]


def _in_order(
    owner: PreTrainedModel, module: nn.Module
) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Modules, children first, each with the innermost model that it belongs to."""
    for child in module.children():
        yield from _in_order(child if isinstance(child, PreTrainedModel) else owner, child)
    yield owner, module


def _initialize_module(owner: PreTrainedModel, module: nn.Module) -> None:
    missing = {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor) and not getattr(parameter, "_is_hf_initialized", False)
    }
    if not missing:
        return
    try:
        for name, parameter in missing.items():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            module._parameters[name] = nn.Parameter(whole, requires_grad=False)
        _compat.init_module(owner, module)
        for name, parameter in missing.items():
            drawn = module._parameters[name]
            assert drawn is not None
            Constant(drawn).read(box_of(parameter), parameter.to_local())
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    finally:
        module._parameters.update(missing)
