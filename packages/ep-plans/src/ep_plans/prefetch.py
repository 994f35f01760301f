"""In which order FSDP gathers the units of a stack of layers.

[Note: gathers ahead of the host]
By itself FSDP starts a unit's gather when the host reaches the unit, and counts on the host to be ahead
of the device. The dispatch of an MoE layer reads its split sizes on the host, which waits there until the
device has caught up: the next layer's gather would begin only then, and the device wait for it. So as a
layer begins, the gathers of the next one are started, its experts' too, before anything of the layer
waits. In backward, where nothing is read on the host, the layer before is gathered in the same way, as the
layers then come in the order that is known here and not in the one that FSDP guesses from the forward.
At most two layers are gathered at one time, as with a host that is ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import nn
from torch.distributed.fsdp import FSDPModule


def order_gathers(model: nn.Module) -> None:
    """Let each layer of `model` start the gathers of the next, and of the one before in backward.

    Costs no communication by itself.
    """
    stacks = list(_stacks(model))
    for units in stacks:
        for here, following in pairwise(units):
            here[0].set_modules_to_forward_prefetch(following)
            following[0].set_modules_to_backward_prefetch(here)
    if not stacks:
        return
    longest = max(stacks, key=len)
    embedding, head = (
        _unit(model, name) for name in ("get_input_embeddings", "get_output_embeddings")
    )
    if embedding is not None:
        embedding.set_modules_to_forward_prefetch(longest[0])
    if head is not None:
        longest[-1][0].set_modules_to_forward_prefetch([head])
        head.set_modules_to_backward_prefetch(longest[-1])


def _stacks(module: nn.Module) -> Iterator[list[list[FSDPModule]]]:
    """The units of each layer, of each list of layers that is in no other one."""
    if isinstance(module, nn.ModuleList):
        units = [_units(layer) for layer in module]
        if len(units) > 1 and all(units):
            yield units
        return
    for child in module.children():
        yield from _stacks(child)


def _units(layer: nn.Module) -> list[FSDPModule]:
    """Those of a layer, the one around the others first."""
    return [module for module in layer.modules() if isinstance(module, FSDPModule)]


def _unit(model: nn.Module, method: str) -> FSDPModule | None:
    try:
        module = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return module if isinstance(module, FSDPModule) else None
