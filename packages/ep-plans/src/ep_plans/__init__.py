"""What is sharded how: plans, parallel styles, and their application to a model."""

from ep_plans.gradients import clip_grad_norm_, grad_norm
from ep_plans.parallelize import ParallelState, parallel_state, parallelize
from ep_plans.parameters import plan_parameters
from ep_plans.resolve import Plans, resolve_plans
from ep_plans.sharding import Cut, ParameterSharding, full_tensor
from ep_plans.styles import Context, Style, register_style

__all__ = [
    "Context",
    "Cut",
    "ParallelState",
    "ParameterSharding",
    "Plans",
    "Style",
    "clip_grad_norm_",
    "full_tensor",
    "grad_norm",
    "parallel_state",
    "parallelize",
    "plan_parameters",
    "register_style",
    "resolve_plans",
]
