"""A conformance kit: laws that any token dispatcher must keep, to be run under pytest on ranks that exist.

The thing under test is a callable `(hidden [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]`
that a factory builds from `(experts_forward, num_local_experts, ep_group, tp_group)`. Every rank of the
group calls `check`; `cases()` gives what to parametrize a test with.
"""

from .check import CAPABILITIES, ConformanceError, Failure, cases, check
from .experts import KitExperts, LinearExperts, ScalingExperts, SmoothExperts
from .laws import LAWS
from .setting import Dispatcher, DispatcherFactory
from .workloads import WORKLOADS, Workload

__all__ = [
    "CAPABILITIES",
    "LAWS",
    "WORKLOADS",
    "ConformanceError",
    "Dispatcher",
    "DispatcherFactory",
    "Failure",
    "KitExperts",
    "LinearExperts",
    "ScalingExperts",
    "SmoothExperts",
    "Workload",
    "cases",
    "check",
]
