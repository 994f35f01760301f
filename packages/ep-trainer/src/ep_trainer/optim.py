"""What an optimizer is given: sharded parameters, a group per mesh."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer


def split_by_mesh(optimizer: Optimizer) -> None:
    """Split each parameter group so that its parameters lie on one mesh.

    The fused and foreach optimizers take a whole group in one call, which DTensors of several
    meshes (dense parameters, experts) cannot enter together. Options of a group stay with its
    parts; groups without parameters go, but for the first if all are. Call it before the first step.
    """
    parts = []
    for group in optimizer.param_groups:
        by_mesh: dict[Hashable, list[Parameter]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
        parts += [{**group, "params": parameters} for parameters in by_mesh.values()]
    # A pipeline stage may train nothing.
    optimizer.param_groups[:] = parts or optimizer.param_groups[:1]


def reshard(model: nn.Module) -> None:
    """Give up gathered parameters: an optimizer must be given the sharded ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
