"""How tokens travel to their experts and back.

High level: `implementation(hidden_states, top_k_index, top_k_weights) -> [T, H]`. Low level, for
frameworks with experts of their own: `AllToAll.prepare`, `.dispatch`, `.combine`, and `.start_dispatch`,
`.start_combine`, which come back while the rows travel.
"""

from .all_reduce import AllReduce
from .all_to_all import AllToAll
from .auto import Auto
from .hierarchical import HierarchicalAllToAll
from .implementation import EPImplementation, EPImplementationInterface, ExpertsForward
from .keeping import keep_communicated
from .megamoe import DeepGemmMegaMoe
from .pending import Pending
from .plan import DispatchPlan, ReceivedRows, Ticket
from .symmetric_memory import SymmetricMemory

__all__ = [
    "AllReduce",
    "AllToAll",
    "Auto",
    "DeepGemmMegaMoe",
    "DispatchPlan",
    "EPImplementation",
    "EPImplementationInterface",
    "ExpertsForward",
    "HierarchicalAllToAll",
    "Pending",
    "ReceivedRows",
    "SymmetricMemory",
    "Ticket",
    "keep_communicated",
]

EPImplementationInterface._register_built_in(
    auto=Auto,
    all_to_all=AllToAll,
    all_to_all_hierarchical=HierarchicalAllToAll,
    all_reduce=AllReduce,
    deepgemm_megamoe=DeepGemmMegaMoe,
    symmetric_memory=SymmetricMemory,
)
