"""What is sharded how: plans, parallel styles, and their application to a model."""

from ep_plans.accumulation import no_sync
from ep_plans.checks import check_ep_options
from ep_plans.flops import Attention, Flops, ModelFlops, model_flops
from ep_plans.gradients import GradNorm, clip_grad_norm_, clip_grads_with_norm_, grad_norm
from ep_plans.low_rank import (
    cut_mesh,
    factor_shardings,
    gradient_reduction,
    reduce_gradients,
    transposed_sharding,
)
from ep_plans.nonfinite import NonFinite, find_nonfinite
from ep_plans.parallelize import ParallelState, note_parameters, parallel_state, parallelize
from ep_plans.parameters import plan_parameters
from ep_plans.resolve import Plans, resolve_plans
from ep_plans.sharding import Cut, ParameterSharding, full_tensor, shard_tensor
from ep_plans.splitting import StageParts, find_parts
from ep_plans.stage_forward import StageForward, stage_forward
from ep_plans.stage_inference import OtherStageError
from ep_plans.stages import (
    Passthrough,
    Pipeline,
    Stages,
    TiedWeight,
    keep_stages,
    layer_costs,
    place_stages,
    plan_stages,
    stage_ranges,
)
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
    "Passthrough",
    "Pipeline",
    "Plans",
    "Scope",
    "StageForward",
    "StageParts",
    "Stages",
    "Style",
    "TiedWeight",
    "around_forward",
    "attributes",
    "call_arguments",
    "change_input",
    "change_output",
    "check_ep_options",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "cut_mesh",
    "factor_shardings",
    "find_nonfinite",
    "find_parts",
    "full_tensor",
    "grad_norm",
    "gradient_reduction",
    "inside_forward",
    "keep_stages",
    "layer_costs",
    "local",
    "local_parameters",
    "model_flops",
    "no_sync",
    "note_parameters",
    "num_experts_of",
    "parallel_state",
    "parallelize",
    "place_stages",
    "plan_parameters",
    "plan_stages",
    "reduce_gradients",
    "register_style",
    "resolve_plans",
    "scale_gradient",
    "shard_tensor",
    "stage_forward",
    "stage_ranges",
    "transposed_sharding",
]
