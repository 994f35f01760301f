"""Initial values for parameters that no file holds, the same in every layout.

A parameter is drawn whole in host memory, as on a single process, and cut: so shards differ from
each other, copies agree, and the values don't depend on the layout or the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

import ep_plans
from ep_plans.shards import box_of, home_of, replacement
from ep_plans.stages import TiedWeight
from expert_parallel import _compat
from expert_parallel.lazy import Constant


def initialize(model: nn.Module, seed: int = 0) -> None:
    """Give a model that was sharded on the meta device memory and initial values.

    The values depend on `seed` alone, not on the layout. A transformers model is initialized by
    its family's rule, another module by its parts' `reset_parameters`, which has to fill their
    buffers too. Every rank must call.

    Raises:
        ValueError: the model was not sharded, or some of its parameters have values already.
        TypeError: a module has parameters and neither rule, or a buffer that its rule leaves unfilled.

    Memory: the whole of one module's own parameters at a time, in host memory.
    """
    state = ep_plans.parallel_state(model)
    if state is None:
        raise ValueError("initialize() takes a model that parallelize() sharded.")
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("initialize() takes a model on the meta device; this one has values.")
    unfilled = _leave_meta(model, state.mesh.device, offload=state.config.fsdp_cpu_offload)
    with torch.random.fork_rng(), torch.no_grad():
        _initialize_all(model, seed)
        for family in _families(model):
            family.initialize_weights()  # buffers: the parameters have their mark
    _check_filled(model, unfilled)


def _families(module: nn.Module) -> Iterator[PreTrainedModel]:
    """The outermost transformers models."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _families(child)


def _check_filled(model: nn.Module, unfilled: Mapping[str, tuple[torch.Tensor, int]]) -> None:
    """Each of these buffers, given with its version, was written since or replaced."""
    for name, (buffer, version) in unfilled.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if getattr(module, leaf) is buffer and buffer._version == version and buffer.numel():
            raise TypeError(
                f"The buffer {name} was on the meta device, and nothing in {type(module).__name__} gives "
                "it values: fill it in reset_parameters(), or build the model off the meta device."
            )


def initialize_missing(model: PreTrainedModel, rest: Callable[[], None]) -> None:
    """Initialize the parameters that loading did not mark, then let `rest` do buffers.

    The seed is drawn on rank 0; every rank must call. Memory: one module's whole parameters.
    """
    with torch.random.fork_rng(), torch.no_grad():
        _initialize_all(model, shared_seed())
        rest()


def shared_seed() -> int:
    """A seed that rank 0 draws. One broadcast."""
    seed = [int(torch.randint(2**48, ()))]
    if dist.is_initialized():
        dist.broadcast_object_list(seed, src=0)
    return seed[0]


def _leave_meta(
    model: nn.Module, device: torch.device, *, offload: bool
) -> dict[str, tuple[torch.Tensor, int]]:
    """Replace meta tensors by empty ones, tied ones by the same; give the buffers and versions."""
    buffers: dict[str, tuple[torch.Tensor, int]] = {}
    made: dict[nn.Parameter, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                held = ep_plans.local(parameter)
                home = home_of(parameter, device, offload=offload)
                made[parameter] = replacement(
                    parameter, torch.empty(held.shape, dtype=held.dtype, device=home)
                )
            setattr(module, name, made[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                empty = torch.empty_like(buffer, device=device)
                setattr(module, name, empty)
                buffers[f"{path}.{name}".lstrip(".")] = (empty, empty._version)
    return buffers


def _initialize_all(model: nn.Module, seed: int) -> None:
    drawn: list[nn.Parameter] = []
    state = ep_plans.parallel_state(model)
    places: dict[str, int] = {}
    if state is not None and state.pipeline is not None:  # numbers of the whole model's modules
        places = {name: place for place, name in enumerate(state.pipeline.modules)}
    for index, (name, owner, module) in enumerate(_in_order(model, model)):
        # Of its own, since a rule may draw into a child's shards, which differ in size by rank.
        torch.manual_seed(seed + places.get(name, index))
        drawn += _initialize_module(owner, module)
    for parameter in drawn:
        _compat.mark_initialized(parameter)


def _in_order(
    owner: nn.Module, module: nn.Module, name: str = ""
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Modules, children first, each with its name and the innermost model that it belongs to."""
    for leaf, child in module.named_children():
        inner = child if isinstance(child, PreTrainedModel) else owner
        yield from _in_order(inner, child, f"{name}.{leaf}" if name else leaf)
    yield name, owner, module


def _initialize_module(owner: nn.Module, module: nn.Module) -> list[nn.Parameter]:
    missing = {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if not _compat.is_initialized(parameter)
    }
    if not missing and not _has_rule_for_buffers(owner, module):
        return []
    # Drawn by the rule of the module that a stage which does not run it put this one in place of.
    kind = module.shell if isinstance(module, TiedWeight) else module
    try:
        for name, parameter in missing.items():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            kind._parameters[name] = nn.Parameter(whole, requires_grad=False)
        _draw(owner, kind)
        for name, parameter in missing.items():
            drawn = kind._parameters[name]
            assert drawn is not None
            Constant(drawn).read(box_of(parameter), ep_plans.local(parameter).detach())
    finally:
        if kind is module:
            module._parameters.update(missing)
        else:
            kind._parameters.update(dict.fromkeys(missing))
    return list(missing.values())


def _has_rule_for_buffers(owner: nn.Module, module: nn.Module) -> bool:
    """Whether a module without parameters fills buffers of its own; a family's rule comes last."""
    has_buffers = next(module.buffers(recurse=False), None) is not None
    has_rule = callable(getattr(module, "reset_parameters", None))
    return has_buffers and has_rule and not isinstance(owner, PreTrainedModel)


def _draw(owner: nn.Module, module: nn.Module) -> None:
    if isinstance(owner, PreTrainedModel):
        _compat.init_module(owner, module)
    elif callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    else:
        raise TypeError(
            f"{type(module).__name__} has parameters and no reset_parameters() to give them values."
        )
