"""Where every parameter goes: the one place that loading, running, saving and planning ask.

[Note: the gradient's divisor]
A rank calls backward on its own batch's loss. The right gradient is the mean over the
`fsdp * dp_replicate` batches.
- A dense parameter is reduced over the ranks that hold different batches, so the group's mean is it.
- An EP group holds `ep / tp` batches, and an expert's gradient on its rank is a sum over those. The
  reduction over `efsdp` adds up `efsdp * ep / tp = fsdp` batches: it must divide by `fsdp` (times
  `dp_replicate`), not by its own size.
- A parameter that TP ranks hold whole and use alike has the same gradient on each; sharded over
  `fsdp * tp` ranks (`fsdp_over_tp`) the mean over that larger group is right as it is. If each rank
  has only a part of the gradient (a norm over its own heads, anything that runs on sequence
  slices), the part is multiplied by `tp` before that mean, which makes it the sum.

[Note: what FSDP leaves out]
An FSDP unit has one dtype, and its parameters have at least one dimension. A parameter kept in
float32 beside others of its module (attention sinks, decay rates) and a scalar stay whole on every
rank; autograd takes the mean of their gradients over the batches.
DeepGEMM Mega MoE, which only infers, keeps its experts' weights in a form of its own and whole: FSDP
would hold them a second time, so they are cut over `ep` alone.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from ep_dispatch import EPImplementationInterface
from ep_dispatch.implementation import MEGAMOE, uses_megamoe
from ep_mesh import DistributedConfig
from ep_plans._compat import has_per_parameter_mesh, kept_in_float32
from ep_plans.checks import attention_heads
from ep_plans.patterns import is_below
from ep_plans.resolve import Plans
from ep_plans.sequence import partial_on_slices
from ep_plans.sharding import Cut, ParameterSharding
from ep_plans.styles import STYLES

# Below this share of a rank's parameters, sharding the replicated ones over TP is not worth its
# gathers.
_WORTH_SHARDING = 0.01
# Linear attention reads the weights of these itself, in place of calling them.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def plan_parameters(
    model: nn.Module, plans: Plans, config: DistributedConfig
) -> dict[str, ParameterSharding]:
    """How each parameter of `model` is sharded, by name; tied names are all listed.

    Pure: nothing is changed, no process group is needed. `ParameterSharding.local_numel` then tells
    what each rank holds.

    Raises:
        ValueError: a packed weight does not divide into its blocks, or `enable_sequence_parallel`
            finds nothing that it could split.
    """
    cuts: dict[str, Cut | None] = {}
    partial: dict[str, str | None] = {}
    on_slices = partial_on_slices(model, plans) if _uses_slices(config) else set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        cuts[name] = _cut(model, plans, config, name, parameter)
        partial[name] = None if cuts[name] else _partial_over(model, plans, name, on_slices)
    over_tp = uses_fsdp_over_tp(model, plans, config, cuts)
    data_parallel = config.dp_size > 1 or over_tp
    float32 = float32_parameters(model, mixed_precision=config.fsdp_mixed_precision)
    left_out = _not_for_fsdp(model, plans, float32) if data_parallel else set()
    mega = _megamoe_experts(model, plans, config)
    # In one copy of the model there is nothing to reduce, and a unit would copy every gradient.
    wraps_experts = config.dp_size > 1 or config.fsdp_mixed_precision or config.fsdp_cpu_offload

    def data_axis(name: str) -> str | None:
        if is_below(name, plans.experts):
            return None if is_below(name, mega) or not wraps_experts else "efsdp"
        if not data_parallel or name in left_out:
            return None
        return "fsdp_tp" if over_tp and cuts[name] is None else "fsdp"

    return {
        name: ParameterSharding(
            cuts[name],
            data_axis(name),
            partial[name],
            "dp" if name in left_out and config.dp_size > 1 else None,
            name in float32,
        )
        for name in cuts
    }


def _megamoe_experts(model: nn.Module, plans: Plans, config: DistributedConfig) -> list[str]:
    """The experts modules that DeepGEMM Mega MoE runs."""
    if not EPImplementationInterface.get(config.ep_implementation).runs_megamoe_experts:
        return []
    named = config.ep_implementation == MEGAMOE
    return [name for name in plans.experts if named or uses_megamoe(model.get_submodule(name))]


def _not_for_fsdp(model: nn.Module, plans: Plans, float32: set[str]) -> set[str]:
    """Scalars, and parameters kept in float32 that can't be an FSDP unit of their own.

    A unit's parameters are gathered when its module's forward is called. So a module that has others
    too can't be one, and neither can a convolution.
    """
    found = set()
    for module_name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{module_name}." if module_name else ""
        below = [name for name, _ in module.named_parameters(prefix.removesuffix("."))]
        mixed = not float32.issuperset(below) or isinstance(module, CONVOLUTIONS)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{prefix}{name}"
            if parameter.ndim == 0 or (mixed and path in float32):
                found.add(path)
    return {name for name in found if not is_below(name, plans.experts)}


def uses_fsdp_over_tp(
    model: nn.Module, plans: Plans, config: DistributedConfig, cuts: dict[str, Cut | None]
) -> bool:
    """Whether parameters that TP ranks would hold whole are sharded over those ranks too."""
    if config.tp_size == 1 or config.fsdp_over_tp is False:
        return False
    if not has_per_parameter_mesh():
        if config.fsdp_over_tp:
            raise ValueError(
                "fsdp_over_tp=True needs FSDP2 with a mesh per parameter (torch 2.13), and torch is "
                f"{torch.__version__}. Update torch, or set fsdp_over_tp=False."
            )
        return False
    if config.fsdp_over_tp:
        return True
    whole = part = 0.0
    for name, parameter in model.named_parameters():
        cut = cuts[name]
        if cut is not None:
            axis = config.tp_size if cut.axis == "tp" else config.ep_size
            part += parameter.numel() * cut.copies / axis
        elif not is_below(name, plans.experts):
            whole += parameter.numel()
    return whole * (1 - 1 / config.tp_size) > _WORTH_SHARDING * (whole + part)


def float32_parameters(model: nn.Module, *, mixed_precision: bool = False) -> set[str]:
    """The parameters that the model wants in float32 though it computes in another precision."""
    named = dict(model.named_parameters(remove_duplicate=False))
    dtypes = {p.dtype for p in named.values() if p.is_floating_point()}
    patterns: set[str] = set()
    if mixed_precision or dtypes & {torch.float16, torch.bfloat16}:
        patterns = kept_in_float32(model, strict_only=torch.float16 not in dtypes)
    kept = {
        name for name, p in named.items() if p.dtype is torch.float32 and dtypes - {torch.float32}
    }
    for pattern in patterns:
        search = re.compile(re.escape(pattern).replace(r"\*", ".*")).search
        kept |= {name for name in named if search(name)}
    return kept


def _uses_slices(config: DistributedConfig) -> bool:
    return config.enable_sequence_parallel and config.tp_size > 1


def _cut(
    model: nn.Module, plans: Plans, config: DistributedConfig, name: str, parameter: nn.Parameter
) -> Cut | None:
    axis = "ep" if name in plans.ep else "tp"
    style = (plans.ep if axis == "ep" else plans.tp).get(name)
    if style is None:
        return None
    module_name, _, parameter_name = name.rpartition(".")
    module = model.get_submodule(module_name)
    found = STYLES[style].cut(module, parameter_name, parameter.ndim)
    if found is None:
        return None
    dim, packs = found
    if parameter.shape[dim] % packs:
        raise ValueError(
            f"{name}: the style {style!r} cuts dimension {dim} in {packs} equal blocks, and its size "
            f"{parameter.shape[dim]} is not a multiple of {packs}."
        )
    copies = 1
    if STYLES[style].keeps_heads and module_name.rpartition(".")[2] in ("k_proj", "v_proj"):
        attention = model.get_submodule(module_name.rpartition(".")[0])
        heads = attention_heads(attention, config.tp_size)
        copies = 1 if heads is None else heads.copies
    return Cut(axis, dim, packs, copies)


def _partial_over(model: nn.Module, plans: Plans, name: str, on_slices: set[str]) -> str | None:
    # An uncut parameter inside experts meets its own rank's rows only.
    if is_below(name, plans.experts):
        return "ep"
    if name in on_slices:
        return "tp"
    # The innermost rule for it, for its module or for one around that.
    parts = name.split(".")
    paths = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    style = next((plans.tp[path] for path in paths if path in plans.tp), None)
    return "tp" if style is not None and STYLES[style].partial_gradients else None
