"""Private parts of PyTorch that this package needs, in one place.

| what | why | seen in |
| --- | --- | --- |
| `placement_types._StridedShard` | a gate and an up projection packed in one weight | 2.11 to 2.13 |
| `_fully_shard._fsdp_common` mesh infos | one FSDP group whose parameters lie on two meshes | 2.13 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard", "per_parameter_mesh"]


def per_parameter_mesh(
    meshes: dict[nn.Parameter, DeviceMesh], default: DeviceMesh
) -> Callable[[nn.Parameter], Any]:
    """A `shard_placement_fn` for `fully_shard` that puts each parameter on a mesh of its own.

    Args:
        meshes: the mesh of each parameter that does not lie on `default`.
        default: the mesh given to `fully_shard`.

    Raises:
        NotImplementedError: this torch has no FSDP2 with a mesh per parameter.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            FSDPMeshInfo,
            HSDPMeshInfo,
            ShardPlacementResult,
        )
    except ImportError:
        raise NotImplementedError(
            "Sharding replicated parameters over the TP ranks needs FSDP2 with a mesh per "
            "parameter (torch 2.13). Update torch, or set fsdp_over_tp=False."
        ) from None

    infos: dict[DeviceMesh, Any] = {}
    for mesh in meshes.values():
        if mesh is not default and mesh not in infos:
            infos[mesh] = (
                FSDPMeshInfo(mesh, shard_mesh_dim=0)
                if mesh.ndim == 1
                else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
            )

    def place(parameter: nn.Parameter) -> Any:
        mesh = meshes.get(parameter, default)
        return ShardPlacementResult(None, infos[mesh]) if mesh in infos else None

    return place
