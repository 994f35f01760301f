"""`parallelize`: the plans become sharded parameters and changed forwards."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from ep_dispatch import ExpertsForward
from ep_dispatch.collectives import copy_to_group
from ep_dispatch.links import join_parameters
from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans._compat import join_norms_over_meshes, mark_expert_parallel, show_plan
from ep_plans.checks import attention_heads, check_ep_options
from ep_plans.data_parallel import apply_fsdp
from ep_plans.low_rank import cut_mesh
from ep_plans.own_forward import own_experts_forward
from ep_plans.parameters import CONVOLUTIONS, plan_parameters
from ep_plans.patterns import is_below
from ep_plans.resolve import Plans, resolve_plans
from ep_plans.sequence import install_sequence_parallel
from ep_plans.sharding import ParameterSharding, shard_tensor
from ep_plans.stage_inference import install_inference
from ep_plans.stages import Pipeline, keep_stages, plan_stages
from ep_plans.styles import STYLES, Style
from ep_plans.styles.base import (
    Context,
    Forward,
    around_forward,
    attributes,
    local,
    local_parameters,
    scale_gradient,
)

_STATE = "_ep_parallel_state"


@dataclass(frozen=True)
class ParallelState:
    """What was done to a model.

    Attributes:
        mesh: the meshes.
        config: the configuration.
        plans: the rules applied.
        shardings: where each parameter lies, by name.
        pipeline: how the model was split into stages; None: it wasn't.
    """

    mesh: ParallelMesh
    config: DistributedConfig
    plans: Plans
    shardings: Mapping[str, ParameterSharding]
    pipeline: Pipeline | None = None


def parallel_state(model: nn.Module) -> ParallelState | None:
    """What `parallelize` did to `model`; None if it was not called."""
    return getattr(model, _STATE, None)


def note_parameters(
    model: nn.Module, added: Mapping[str, ParameterSharding], pipeline: Pipeline | None = None
) -> None:
    """Let `parallel_state(model)` know parameters that were added since; nothing if it is None.

    `pipeline`: of a model that was split, with the names that all stages added.
    """
    if (state := parallel_state(model)) is not None:
        known = {**state.shardings, **added}
        setattr(model, _STATE, replace(state, shardings=known, pipeline=pipeline or state.pipeline))


def parallelize(
    model: nn.Module,
    mesh: ParallelMesh,
    config: DistributedConfig,
    *,
    plans: Plans | None = None,
    experts_forward: Callable[[nn.Module], ExpertsForward] | None = None,
    ep_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Shard `model` in place over the meshes and change how its modules run.

    Args:
        model: on the meta device, or built with the same values on every rank.
        mesh: the meshes of `config.layout`. Every rank calls with the same model and config.
        config: what to do.
        plans: the resolved rules; None: `resolve_plans(model, config)`.
        experts_forward: makes the function that runs an experts module, by the contract of
            `ep_dispatch`; None: the module's own code.
        ep_options: further settings of the implementation that `config` names, such as `num_chunks`,
            `max_rows` and `wire_dtype` of `ep_dispatch.AllToAll`.

    Returns:
        The same model. Its sharded parameters are DTensors; `model.tp_plan`, `ep_plan` and
        `fsdp_plan` show the merged rules, `parallel_state(model)` the rest.

    Raises:
        ValueError: as `resolve_plans`; the mesh is of another layout; the ranks hold different
            models; with `pp_size > 1` the model can't be split into that many stages; the model is
            parallel already; an implementation can't run here. Nothing is cut or moved then.

    With `pp_size > 1` a rank keeps the layers of its stages, under their names, and calling the model
    to infer runs all stages, see `ep_plans.stage_inference`.

    Cost: an all-reduce of two numbers (do the ranks agree), for a built model one more of two
    numbers per parameter.
    """
    if parallel_state(model) is not None:
        raise ValueError(
            f"This {type(model).__name__} is parallel already; build or load a new one."
        )
    if mesh.layout != config.layout:
        raise ValueError(f"The mesh is of the layout {mesh.layout}, the config of {config.layout}.")
    options = ep_options or {}
    _check_same_model(model, mesh, config, options)
    check_ep_options(config, options)
    plans = resolve_plans(model, config) if plans is None else plans
    if options and not any(STYLES[style].dispatches for style in plans.ep.values()):
        raise ValueError(
            f"ep_options={dict(options)!r}, but no experts of this {type(model).__name__} are dispatched "
            f"(ep_size={config.ep_size}): leave them out."
        )
    shardings = plan_parameters(model, plans, config)
    pipeline: Pipeline | None = None
    if config.pp_size > 1:
        stages = plan_stages(model, config)
        pipeline = Pipeline.of(model, stages, mesh.coordinate("pp"))
        plans = pipeline.part_of(plans)
    with _on_all_stages(mesh, config):
        contexts = _prepare_styles(
            model, mesh, config, plans, shardings, experts_forward or own_experts_forward, options
        )

    if pipeline is not None:
        keep_stages(model, pipeline)
        here = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        shardings = {name: found for name, found in shardings.items() if name in here}
    _cut_parameters(model, mesh, config, shardings)
    _install_styles(contexts, config)
    _reduce_gradients(model, mesh, shardings)
    _reduce_inside_experts(model, mesh, plans.experts, shardings)
    if config.enable_sequence_parallel and config.tp_size > 1:
        install_sequence_parallel(model, plans, mesh.group("tp"), _layers_here(pipeline))
    show_plan(model, "tp_plan", plans.tp_rules)
    show_plan(model, "ep_plan", plans.ep_rules)
    show_plan(model, "fsdp_plan", plans.fsdp_rules)
    with _without_holder(model, pipeline):
        apply_fsdp(model, mesh, config, plans, shardings)
    _move_rest(model, mesh.device)
    join_norms_over_meshes()
    if pipeline is not None:
        install_inference(model, mesh, pipeline)
    setattr(model, _STATE, ParallelState(mesh, config, plans, shardings, pipeline))
    return model


@contextlib.contextmanager
def _on_all_stages(mesh: ParallelMesh, config: DistributedConfig) -> Iterator[None]:
    """Raise on every rank what the body, which is not the same on all stages, raised on some."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
        error = caught
    if config.pp_size > 1:
        failed = torch.tensor(0 if error is None else 1, device=mesh.device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if error is None and failed.item():
            raise ValueError("Another pipeline stage can't run as configured; its ranks say why.")
    if error is not None:
        raise error


def _layers_here(pipeline: Pipeline | None) -> list[range] | None:
    return None if pipeline is None else [pipeline.stages.ranges[i] for i in pipeline.here]


@contextlib.contextmanager
def _without_holder(model: nn.Module, pipeline: Pipeline | None) -> Iterator[None]:
    """Take a tied weight from where it isn't run meanwhile: FSDP would wait for that to be called."""
    found = None if pipeline is None else pipeline.tied_holder(model)
    if found is None:
        yield
        return
    holder, user = found
    del holder.weight
    yield
    holder.weight = user.weight


def _known(value: object) -> str:
    """What ranks can compare of a setting: of an object, whose address differs, its type alone."""
    return str(value) if isinstance(value, torch.dtype) else type(value).__qualname__


def _check_same_model(
    model: nn.Module, mesh: ParallelMesh, config: DistributedConfig, options: Mapping[str, Any]
) -> None:
    """Each rank cuts its part out of its own copy, so all must start from the same."""
    if dist.get_world_size() == 1:
        return
    facts = [config.to_dict(), dict(options)] + [
        [name, list(p.shape), str(p.dtype), p.is_meta, p.requires_grad]
        for name, p in model.named_parameters()
    ]
    text = json.dumps(facts, sort_keys=True, default=_known).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:6])  # exact in float64
    if not _agrees(torch.tensor([float(digest)], dtype=torch.float64), mesh).all():
        raise ValueError(
            "The ranks were given different configurations or ep_options, or different "
            f"{type(model).__name__} "
            "models (names, shapes, dtypes, frozen parameters, some built and some on the meta "
            "device). Call parallelize with the same on every rank."
        )
    built = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    if not built:
        return
    sums = torch.stack([p.to(mesh.device).double().abs().sum() for p in built.values()])
    same = _agrees(sums.nan_to_num(), mesh)
    if not same.all():
        name = list(built)[int(same.logical_not().nonzero()[0])]
        raise ValueError(
            f"The ranks hold different values of {name} (and perhaps of others). Build the model "
            "with the same seed on every rank, or load it."
        )


def _agrees(values: Tensor, mesh: ParallelMesh) -> Tensor:
    """Which of `values`, of the same number on every rank, are equal on all ranks."""
    both = torch.cat([values, -values]).to(mesh.device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    most, least = both.chunk(2)
    return most == -least


def _cut_parameters(
    model: nn.Module,
    mesh: ParallelMesh,
    config: DistributedConfig,
    shardings: Mapping[str, ParameterSharding],
) -> None:
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = {parameter for parameter, count in uses.items() if count > 1}
    uses.clear()  # what is cut is freed at once, so that a whole model and its parts never coexist
    done: dict[nn.Parameter, nn.Parameter] = {}
    for name, sharding in shardings.items():
        if sharding.cut is None:
            continue
        module_name, _, parameter_name = name.rpartition(".")
        module = model.get_submodule(module_name)
        parameter = module._parameters[parameter_name]
        assert parameter is not None
        if (part := done.get(parameter)) is None:
            sharded = shard_tensor(parameter.detach(), sharding.cut, cut_mesh(mesh, sharding.cut))
            part = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            if parameter in tied:  # cut once
                done[parameter] = part
        module._parameters[parameter_name] = part
        if sharding.cut.axis == "ep":
            module.num_experts = parameter.shape[0] // config.ep_size  # type: ignore[assignment]
            mark_expert_parallel(module)


def _prepare_styles(
    model: nn.Module,
    mesh: ParallelMesh,
    config: DistributedConfig,
    plans: Plans,
    shardings: Mapping[str, ParameterSharding],
    experts_forward: Callable[[nn.Module], ExpertsForward],
    ep_options: Mapping[str, Any],
) -> list[tuple[Style, Context]]:
    """Each rule on a module, in the order of installation, with what its style prepared."""
    modules = dict(model.named_modules())
    prepared: list[tuple[Style, Context]] = []
    for axis, rules in (("tp", plans.tp), ("ep", plans.ep)):
        for name, style in rules.items():
            if name not in modules:
                continue
            sharding = shardings.get(f"{name}.weight")
            copies = sharding.cut.copies if sharding is not None and sharding.cut else 1
            context = Context(
                mesh, config, model, name, modules[name], axis, copies, experts_forward, ep_options
            )
            found = STYLES[style]
            prepared.append((found, replace(context, prepared=found.prepare(context))))
    return prepared


def _install_styles(prepared: list[tuple[Style, Context]], config: DistributedConfig) -> None:
    ratios: dict[nn.Module, int] = {}
    for style, context in prepared:
        if context.copies > 1:
            heads = attention_heads(context.parent, config.tp_size)
            assert heads is not None
            ratios[context.parent] = heads.query // config.tp_size
        style.install(context)
    for attention, ratio in ratios.items():
        # Each rank has one key-value head for its query heads.
        attention.num_key_value_groups = ratio  # type: ignore[assignment]


def _reduce_gradients(
    model: nn.Module, mesh: ParallelMesh, shardings: Mapping[str, ParameterSharding]
) -> None:
    """Let autograd reduce the gradients that FSDP doesn't, or not over all of their ranks."""
    owners: dict[str, dict[str, ParameterSharding]] = {}
    for name, sharding in shardings.items():
        if sharding.partial_over == "ep":
            continue
        if sharding.partial_over is not None or sharding.mean_over is not None:
            owner, _, parameter_name = name.rpartition(".")
            owners.setdefault(owner, {})[parameter_name] = sharding
    for owner, parts in owners.items():
        module = reader = model.get_submodule(owner)
        if isinstance(module, CONVOLUTIONS):
            reader = model.get_submodule(owner.rpartition(".")[0])
        _reduce_gradients_of(module, parts, mesh, reader)


def _reduce_inside_experts(
    model: nn.Module,
    mesh: ParallelMesh,
    experts: Collection[str],
    shardings: Mapping[str, ParameterSharding],
) -> None:
    """Sum the gradients of uncut parameters inside experts, such as a norm, over the expert axis.

    Around the experts as a whole: a rank whose experts get no row never runs the norm, and still has
    to take part in the sum.
    """
    for experts_name in experts:
        inside = [
            name.rpartition(".")
            for name, sharding in shardings.items()
            if sharding.partial_over == "ep" and is_below(name, [experts_name])
        ]
        if inside and mesh.size("ep") > 1:
            owners = [(model.get_submodule(owner), name) for owner, _, name in inside]
            _sum_inside(model.get_submodule(experts_name), owners, mesh.group("ep"))


def _sum_inside(
    experts: nn.Module, owners: Sequence[tuple[nn.Module, str]], group: ProcessGroup
) -> None:
    def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        shown = [copy_to_group(local(getattr(owner, name)), group) for owner, name in owners]
        with contextlib.ExitStack() as stack:
            for (owner, name), value in zip(owners, shown, strict=True):
                stack.enter_context(attributes(owner, {name: value}))
            output = forward(*args, **kwargs)
        return join_parameters(output, [value for value in shown if value.requires_grad])

    around_forward(experts, run)


def _reduce_gradients_of(
    module: nn.Module,
    parts: Mapping[str, ParameterSharding],
    mesh: ParallelMesh,
    reader: nn.Module,
) -> None:
    """Reduce the gradients of a module's own `parts`, which the forward of `reader` reads."""
    # What is asked of the mesh is asked once: torch.compile traces `change`.
    facts = {
        name: (
            sharding,
            _group_or_none(mesh, sharding.mean_over) if sharding.mean_over else None,
            1.0 / mesh.size(sharding.mean_over) if sharding.mean_over else 1.0,
            _group_or_none(mesh, sharding.partial_over) if sharding.partial_over else None,
        )
        for name, sharding in parts.items()
    }
    over_tp = float(mesh.size("tp"))

    def change(name: str, value: Tensor) -> Tensor:
        if name not in facts:
            return value
        sharding, mean_group, mean, partial_group = facts[name]
        if sharding.mean_over is not None:
            value = scale_gradient(copy_to_group(value, mean_group), mean)
        if sharding.partial_over is None:
            return value
        if sharding.data_axis == "fsdp_tp":
            # FSDP takes the mean over the TP ranks too, so `tp` times a part makes the sum.
            return scale_gradient(value, over_tp)
        return copy_to_group(value, partial_group)

    def run(forward: Forward, *args: object, **kwargs: object) -> object:
        with local_parameters(module, change):
            return forward(*args, **kwargs)

    around_forward(reader, run)


def _group_or_none(mesh: ParallelMesh, axis: str) -> ProcessGroup | None:
    return mesh.group(axis) if mesh.size(axis) > 1 else None


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Move buffers, and parameters that are not sharded, to where the sharded ones are."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not (isinstance(parameter, DTensor) or parameter.is_meta):
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)
