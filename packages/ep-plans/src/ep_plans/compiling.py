"""Compiled layers: what is dense in them, while the experts run as they are written.

[Note: what is compiled]
A decoder layer is compiled in pieces (regional compilation): attention, norms, dense MLPs, shared experts
and routers. Each is one graph, with the collectives of its TP rules in it as operators (`ep.all_reduce` and
so on, see `ep_dispatch.compiling`). The dispatch of an experts module reads sizes on the host, so it stays
outside, and so does what lies around a piece: FSDP's hooks, activation checkpointing, the gather and split
of sequence parallelism. Only what runs as a piece's own `forward` is replaced: modules, parameters, hooks
and the state dict stay what they are. Pieces of one class and one kind of input share one compiled code.
Source: torch's tutorial on regional compilation; torchtitan compiles MoE layers in such pieces too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ep_plans.parallelize import parallel_state
from ep_plans.patterns import is_below
from ep_plans.styles.base import Forward, inside_forward

_OPTIONS = "_ep_compile_options"
# Arguments of a call that runs as written: a cache is indexed by a layer's number, each of which would be
# compiled anew.
_CACHES = ("cache", "past_key_values", "past_key_value")


def compile_layers(model: nn.Module, **options: Any) -> list[str]:
    """Compile what is dense in the layers of a sharded model, in place.

    Compilation happens at the first call of each kind: in training and in evaluation, and once more when
    sizes differ from the first ones, for all sizes from then on. Calls with a cache of keys and values
    (generation) run as written. Call it on every rank, and again to change the options.

    Args:
        model: a model that `parallelize` sharded; adapters are in it already.
        **options: of `torch.compile` (`backend`, `mode`, `dynamic`, ...).

    Returns:
        The names of the modules that are compiled.

    Raises:
        ValueError: the model isn't sharded, has no layers, or its pipeline splits backwards.
        Exception: torch.compile doesn't know the options.
    """
    state = parallel_state(model)
    if state is None:
        raise ValueError(
            f"compile_layers needs a model that parallelize sharded, got a {type(model).__name__} that "
            "isn't; torch.compile(model) compiles one."
        )
    if state.pipeline is not None and state.config.pp_schedule == "zero_bubble":
        raise ValueError(
            "pp_schedule='zero_bubble' computes the gradients of weights apart, which a compiled layer "
            "computes in one; take '1f1b', 'interleaved_1f1b' or 'gpipe', or don't compile."
        )
    torch.compile(_nothing, **options)  # what it refuses, it refuses before anything is changed
    pieces = dict(_pieces(model, "", state.plans.experts, in_layers=False))
    if not pieces:
        raise ValueError(
            f"compile_layers finds no list of layers in {type(model).__name__}: it compiles what is in "
            "torch.nn.ModuleLists."
        )
    for module in pieces.values():
        if _OPTIONS not in module.__dict__:
            inside_forward(module, _compiled(module))
        module.__dict__[_OPTIONS] = options
    return list(pieces)


def _nothing() -> None:
    pass


def _pieces(
    module: nn.Module, name: str, experts: Collection[str], *, in_layers: bool
) -> Iterator[tuple[str, nn.Module]]:
    """What is compiled below `module`: the largest modules in layers that hold no experts."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if path in experts or next(child.parameters(), None) is None:
            continue
        if isinstance(module, nn.ModuleList) or not in_layers:
            inside = in_layers or isinstance(module, nn.ModuleList)
            yield from _pieces(child, path, experts, in_layers=inside)
        elif type(child).forward is nn.Linear.forward:
            continue  # one product, and what lies around it
        elif _is_whole(child, path, experts):
            yield path, child
        else:
            yield from _pieces(child, path, experts, in_layers=True)


def _is_whole(module: nn.Module, name: str, experts: Collection[str]) -> bool:
    """Whether nothing in `module` runs as written: experts, or a module that FSDP gathers by itself."""
    units = (part for part in module.modules() if part is not module)
    return not any(is_below(path, (name,)) for path in experts) and not any(
        isinstance(part, FSDPModule) for part in units
    )


def _compiled(module: nn.Module) -> Callable[..., Any]:
    function: Forward | None = None
    options: Any = None

    def run(own: Forward, *args: Any, **kwargs: Any) -> Any:
        nonlocal function, options
        if any(kwargs.get(name) is not None for name in _CACHES):
            return own(*args, **kwargs)
        if function is None or options is not module.__dict__[_OPTIONS]:
            options = module.__dict__[_OPTIONS]
            function = torch.compile(own, **options)
        return function(*args, **kwargs)

    return run
