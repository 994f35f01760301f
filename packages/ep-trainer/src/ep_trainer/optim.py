"""Optimizer groups, one per mesh, and which state can't be cut in another way."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ep_plans import local_part
from ep_trainer._compat import is_traceable_wrapper_subclass


def split_by_mesh(optimizer: Optimizer) -> None:
    """Split each parameter group so that its parameters lie on one mesh.

    The fused and foreach optimizers take a whole group in one call, which DTensors of several
    meshes (dense parameters, experts) cannot enter together. Options of a group stay with its
    parts; groups without parameters go. Call it before the first step.
    """
    parts = []
    for group in optimizer.param_groups:
        by_mesh: dict[Hashable, list[Parameter]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
        parts += [{**group, "params": parameters} for parameters in by_mesh.values()]
    optimizer.param_groups[:] = parts


def quantized_state(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The parameters whose optimizer state is kept in few bits (torchao's), by name.

    Such a state is quantized in blocks of this rank's part of the parameter: it fits no other way to
    cut it, so it can be resumed only in the layout that it was saved in.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    found = []
    for parameter, state in optimizer.state.items():
        tensors = [local_part(value) for value in state.values() if isinstance(value, Tensor)]
        # A low-bit tensor is a wrapper around its codes and scales.
        if any(is_traceable_wrapper_subclass(tensor) for tensor in tensors):
            found.append(names[parameter])
    return found
