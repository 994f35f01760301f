"""What is sharded how: plans, parallel styles, and their application to a model."""

from ep_plans.accumulation import no_sync
from ep_plans.checks import check_ep_options
from ep_plans.compiling import compile_layers
from ep_plans.flops import Attention, Flops, ModelFlops, model_flops
from ep_plans.gradients import GradNorm, clip_grad_norm_, clip_grads_with_norm_, grad_norm
from ep_plans.nonfinite import NonFinite, find_nonfinite
from ep_plans.parallelize import ParallelState, parallel_state, parallelize
from ep_plans.parameters import plan_parameters
from ep_plans.resolve import Plans, resolve_plans
from ep_plans.sharding import Cut, ParameterSharding, full_tensor, shard_tensor
from ep_plans.stage_inference import OtherStageError
from ep_plans.stages import Pipeline, Stages, plan_stages
from ep_plans.styles import Context, Scope, Style, register_style
from ep_plans.styles.base import (
    Moved,
    around_forward,
    attributes,
    call_arguments,
    change_input,
    change_output,
    inside_forward,
    local,
    local_parameters,
    num_experts_of,
    scale_gradient,
)

__all__ = [
    "Attention",
    "Context",
    "Cut",
    "Flops",
    "GradNorm",
    "ModelFlops",
    "Moved",
    "NonFinite",
    "OtherStageError",
    "ParallelState",
    "ParameterSharding",
    "Pipeline",
    "Plans",
    "Scope",
    "Stages",
    "Style",
    "around_forward",
    "attributes",
    "call_arguments",
    "change_input",
    "change_output",
    "check_ep_options",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "compile_layers",
    "find_nonfinite",
    "full_tensor",
    "grad_norm",
    "inside_forward",
    "local",
    "local_parameters",
    "model_flops",
    "no_sync",
    "num_experts_of",
    "parallel_state",
    "parallelize",
    "plan_parameters",
    "plan_stages",
    "register_style",
    "resolve_plans",
    "scale_gradient",
    "shard_tensor",
]
