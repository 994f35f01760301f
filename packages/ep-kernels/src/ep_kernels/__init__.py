"""How experts compute: the MLP of a mixture-of-experts layer over rows grouped by expert."""

from __future__ import annotations

from . import operators as operators  # for what it registers
from .experts import experts_forward
from .grouped import BackendRequest, Choice, choose_backend
from .low_rank import ExpertsLowRank, LowRank, takes_low_rank, with_low_rank
from .mlp import Recompute
from .module import RoutedExperts, compacted_forward, module_experts_forward
from .norm import rms_norm
from .rotary import apply_rotary
from .spec import ExpertsSpec, ExpertsWeights, why_not

__all__ = [
    "BackendRequest",
    "Choice",
    "ExpertsLowRank",
    "ExpertsSpec",
    "ExpertsWeights",
    "LowRank",
    "Recompute",
    "RoutedExperts",
    "apply_rotary",
    "choose_backend",
    "compacted_forward",
    "experts_forward",
    "module_experts_forward",
    "rms_norm",
    "takes_low_rank",
    "why_not",
    "with_low_rank",
]
