"""What is sharded how: plans, parallel styles, and their application to a model."""

from ep_plans.checks import check_ep_options
from ep_plans.gradients import clip_grad_norm_, grad_norm
from ep_plans.parallelize import ParallelState, parallel_state, parallelize
from ep_plans.parameters import plan_parameters
from ep_plans.resolve import Plans, check_stages, resolve_plans
from ep_plans.sharding import Cut, ParameterSharding, full_tensor
from ep_plans.styles import Context, Scope, Style, register_style
from ep_plans.styles.base import (
    Moved,
    around_forward,
    call_arguments,
    change_input,
    change_output,
    local,
    local_parameters,
    num_experts_of,
    scale_gradient,
)

__all__ = [
    "Context",
    "Cut",
    "Moved",
    "ParallelState",
    "ParameterSharding",
    "Plans",
    "Scope",
    "Style",
    "around_forward",
    "call_arguments",
    "change_input",
    "change_output",
    "check_ep_options",
    "check_stages",
    "clip_grad_norm_",
    "full_tensor",
    "grad_norm",
    "local",
    "local_parameters",
    "num_experts_of",
    "parallel_state",
    "parallelize",
    "plan_parameters",
    "register_style",
    "resolve_plans",
    "scale_gradient",
]
