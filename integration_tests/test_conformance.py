"""Dispatchers of other systems under the conformance kit: what they keep, and what they are known to break."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import DistributedConfig as NativeConfig

from ep_dispatch import _compat
from ep_dispatch.testing import ConformanceError, KitExperts, WORKLOADS, check
from ep_testing import RankPool

WORLD = 4
MOVES_TOKENS = "ep_size" in NativeConfig.__dataclass_fields__  # 5.17 masks routes only


def meshes(rank: int, tp: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The EP mesh over all ranks, and this rank's TP mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    ep = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    return ep, init_device_mesh("cpu", (WORLD // tp, tp), mesh_dim_names=("dp", "tp"))["tp"]


def native(rank: int, name: str, tp: int, workload: str) -> dict[str, list[str]]:
    """The laws that transformers' implementation breaks, with what is wrong on each rank."""
    ep_mesh, tp_mesh = meshes(rank, tp)
    implementation: Any = getattr(_compat.transformers_expert_parallel(), name)

    def build(
        experts_forward: KitExperts,
        *,
        num_local_experts: int,
        ep_group: ProcessGroup | None,
        tp_group: ProcessGroup | None,
    ) -> Any:
        return implementation(experts_forward, ep_mesh, tp_mesh)

    groups = {"ep_group": ep_mesh.get_group(), "tp_group": tp_mesh.get_group()}
    broken: dict[str, list[str]] = {}
    try:
        check(build, workload, **groups)
    except ConformanceError as error:
        for failure in error.failures:
            broken.setdefault(failure.law, []).append(str(failure))
    return broken


if __name__ == "__main__":
    import sys
