"""Dispatchers of other systems under the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import DistributedConfig as NativeConfig

from ep_dispatch import _compat
from ep_dispatch.testing import WORKLOADS, KitExperts, check
from ep_testing import RankError, RankPool

WORLD = 4

# What transformers 5.24 breaks.
KNOWN = {
    ("AllToAllEP", "skipped"): pytest.mark.xfail(
        raises=RankError, strict=True, reason="it counts slots by id, and -1 is no index"
    ),
}
CASES = [
    pytest.param(name, tp, workload, marks=KNOWN.get((name, workload), ()))
    for name, tp in (("AllToAllEP", 1), ("AllToAllEP", 2), ("AllReduceEP", 4))
    for workload in WORKLOADS
]


def native(rank: int, name: str, tp: int, workload: str) -> None:
    """Transformers' implementation, as its plan builds it: from an experts module and two meshes."""
    ep_mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    tp_mesh = init_device_mesh("cpu", (WORLD // tp, tp), mesh_dim_names=("dp", "tp"))["tp"]
    implementation: Any = getattr(_compat.transformers_expert_parallel(), name)

    def build(
        experts_forward: KitExperts,
        *,
        num_local_experts: int,
        ep_group: ProcessGroup | None,
        tp_group: ProcessGroup | None,
    ) -> Any:
        return implementation(experts_forward, ep_mesh, tp_mesh)

    check(build, workload, ep_group=ep_mesh.get_group(), tp_group=tp_mesh.get_group())


@pytest.mark.skipif(
    "ep_size" not in NativeConfig.__dataclass_fields__, reason="transformers moves no tokens"
)
@pytest.mark.parametrize(("name", "tp", "workload"), CASES)
def test_transformers(ranks: RankPool, name: str, tp: int, workload: str) -> None:
    ranks.run(native, name, tp, workload, world=WORLD)
