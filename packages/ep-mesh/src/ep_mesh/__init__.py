"""What runs where: sizes, layouts and device meshes for expert parallelism."""

from ep_mesh.config import PP_SCHEDULES, SHARED_BATCH_IMPLEMENTATIONS, DistributedConfig
from ep_mesh.layout import AXES, VIEWS, Layout, legal_ep_sizes
from ep_mesh.mesh import ParallelMesh

__all__ = [
    "AXES",
    "PP_SCHEDULES",
    "SHARED_BATCH_IMPLEMENTATIONS",
    "VIEWS",
    "DistributedConfig",
    "Layout",
    "ParallelMesh",
    "legal_ep_sizes",
]
