"""Private parts of PyTorch and transformers that this package needs, in one place.

| what | why | seen in |
| --- | --- | --- |
| `placement_types._StridedShard` | a gate and an up projection packed in one weight | 2.11 to 2.13 |
| `_fully_shard._fsdp_common` mesh infos | one FSDP group whose parameters lie on two meshes | 2.13 |
| `DTensor._op_dispatcher._custom_op_handlers`, `_NormPartial` | torch's own `clip_grad_norm_` over \
several meshes | 2.13 |
| `_foreach_norm`, `_foreach_mul_` | norms and products of many tensors in few kernels, as torch's own clipping has them | 2.13 |
| `FSDPModule._get_fsdp_state`, `FSDPState._lazy_init`, `._root_post_backward_final_callback`, `FSDPParamGroup.post_backward` \
| gradients of several backwards reduced at once, without a backward, as torch's pipeline stages do | 2.13 |
| `PreTrainedModel._tp_plan`, `._ep_plan`, `._fsdp_plan` | the plans that a class brings; what `model.tp_plan` reads | transformers 5.17, 5.24 |
| `PreTrainedModel._keep_in_fp32_modules`, `._keep_in_fp32_modules_strict` | what a model wants in float32 | transformers 5.17, 5.24 |
| `_is_expert_parallel` on experts | released experts code masks skipped ids only where it is set | transformers 5.17, 5.24 |

transformers is not imported: a model of another library just has none of its attributes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "StridedShard",
    "class_plan",
    "deferred_gradients",
    "has_per_parameter_mesh",
    "join_norms_over_meshes",
    "kept_in_float32",
    "mark_expert_parallel",
    "norms_of_all",
    "per_parameter_mesh",
    "scale_all_",
    "show_plan",
]


def norms_of_all(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each tensor, computed in `dtype`; all are of one device and dtype, none is empty."""
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=dtype))


def scale_all_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors, of one device and dtype, by a scalar tensor of both."""
    torch._foreach_mul_(list(tensors), factor)


def class_plan(module: nn.Module, plan: str) -> dict[str, str]:
    """The `plan` ("tp_plan", "ep_plan" or "fsdp_plan") that the class of `module` brings."""
    return dict(getattr(type(module), f"_{plan}", None) or {})


def show_plan(model: nn.Module, plan: str, rules: Mapping[str, str]) -> None:
    """Let `model.tp_plan` and so on be `rules`; a transformers model has properties over `_tp_plan`."""
    shown = f"_{plan}" if isinstance(getattr(type(model), plan, None), property) else plan
    setattr(model, shown, dict(rules))


def kept_in_float32(model: nn.Module, *, strict_only: bool) -> set[str]:
    """Patterns of the modules that `model` wants in float32: always, or beside float16 too."""
    names = ["_keep_in_fp32_modules_strict"] + ([] if strict_only else ["_keep_in_fp32_modules"])
    return {pattern for name in names for pattern in getattr(model, name, None) or ()}


def mark_expert_parallel(experts: nn.Module) -> None:
    """Tell the experts' own code that it may meet ids of experts that are elsewhere."""
    experts._is_expert_parallel = True  # type: ignore[assignment]


def has_per_parameter_mesh() -> bool:
    """Whether this torch's FSDP2 takes a mesh per parameter."""
    return importlib.util.find_spec("torch.distributed.fsdp._fully_shard") is not None and hasattr(
        importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common"),
        "ShardPlacementResult",
    )


def per_parameter_mesh(
    meshes: dict[nn.Parameter, DeviceMesh], default: DeviceMesh
) -> Callable[[nn.Parameter], Any]:
    """A `shard_placement_fn` for `fully_shard` that puts each parameter on a mesh of its own.

    Args:
        meshes: the mesh of each parameter that does not lie on `default`.
        default: the mesh given to `fully_shard`.

    Needs `has_per_parameter_mesh()`.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    infos: dict[DeviceMesh, Any] = {}
    for mesh in meshes.values():
        if mesh is not default and mesh not in infos:
            infos[mesh] = (
                FSDPMeshInfo(mesh, shard_mesh_dim=0)
                if mesh.ndim == 1
                else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
            )

    def place(parameter: nn.Parameter) -> Any:
        mesh = meshes.get(parameter, default)
        return ShardPlacementResult(None, infos[mesh]) if mesh in infos else None

    return place


def join_norms_over_meshes() -> None:
    """Let `torch.nn.utils.clip_grad_norm_` work on parameters that lie on several meshes.

    It stacks their norms and multiplies them in one list, which DTensor refuses for several meshes.
    Only what is refused is changed, for the whole process. Without the parts of torch that this
    needs nothing is done, and torch raises as ever: `ep_plans.clip_grad_norm_` always works.

    Cost of clipping so: one all-reduce of a number per parameter.
    """
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if not isinstance(handlers, MutableMapping):
        return
    aten = torch.ops.aten
    for op, over_meshes in (
        (aten.stack.default, _stack_norms),
        (aten._foreach_norm.Scalar, _norm_each),
        (aten._foreach_mul_.Tensor, _multiply_each),
    ):
        if op not in handlers:
            handlers[op] = _Handler(handlers, over_meshes)


class _Handler:
    """Runs an operator over tensors on several meshes by `over_meshes`, else as torch does."""

    def __init__(self, handlers: MutableMapping[Any, Any], over_meshes: Callable[..., Any]) -> None:
        self.handlers, self.over_meshes = handlers, over_meshes

    def __call__(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        meshes = {t.device_mesh if isinstance(t, DTensor) else None for t in args[0]}
        if len(meshes) > 1:
            return self.over_meshes(*args, **kwargs)
        with self._away(op):
            return op(*args, **kwargs)

    @contextlib.contextmanager
    def _away(self, op: Any) -> Iterator[None]:
        del self.handlers[op]
        try:
            yield
        finally:
            self.handlers[op] = self


def _stack_norms(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Norms, each whole or a part per rank, as one plain tensor."""
    order = next((o for t in tensors if (o := _norm_order(t)) is not None), None)
    if any(t.ndim for t in tensors) or order is None:
        meshes = {t.device_mesh for t in tensors if isinstance(t, DTensor)}
        raise RuntimeError(f"Tensors on several meshes cannot be stacked: {meshes}.")
    local = torch.stack([_local(t).double() for t in tensors], dim)
    if math.isinf(order):
        dist.all_reduce(local, op=dist.ReduceOp.MAX)
    else:
        copies = torch.tensor([_copies(t) for t in tensors], dtype=local.dtype, device=local.device)
        local = local.pow(order) / copies
        dist.all_reduce(local)
        local = local.pow(1.0 / order)
    return local.to(_local(tensors[0]).dtype)


def _norm_order(tensor: Tensor) -> float | None:
    """The p of a p-norm of which each rank has a part."""
    for placement in tensor.placements if isinstance(tensor, DTensor) else ():
        if (order := getattr(placement, "norm_type", None)) is not None:
            return float(order)
        if getattr(placement, "reduce_op", None) == "max":
            return math.inf
    return None


def _copies(tensor: Tensor) -> float:
    """How many ranks have the same part."""
    copies = dist.get_world_size()
    if isinstance(tensor, DTensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            copies //= 1 if isinstance(placement, Replicate) else size
    return float(copies)


def _norm_each(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    return [torch.linalg.vector_norm(t, *args, **kwargs) for t in tensors]


def _multiply_each(tensors: Sequence[Tensor], other: Tensor) -> None:
    factor = other.full_tensor() if isinstance(other, DTensor) else other
    for tensor in tensors:
        _local(tensor).mul_(factor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def deferred_gradients(
    model: nn.Module, *, reduce: bool, each: bool, keep_gathered: bool
) -> Iterator[None]:
    """Hold back the gradient reduction of all FSDP2 modules of `model` inside, and do it at the end.

    Args:
        model: any, with FSDP2 modules or without.
        reduce: at the end; False leaves the gradients on the rank, whole.
        each: reduce at every backward instead.
        keep_gathered: keep parameters gathered from their first forward to the end.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        # From the outside in, while all modules are in their places: a stage's forward sees its own.
        module._get_fsdp_state()._lazy_init()
    before = [_resharding(module) for module in modules] if keep_gathered else []
    for module in modules:
        module.set_requires_gradient_sync(each and reduce, recurse=False)
        module.set_is_last_backward(each)
        if keep_gathered:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_is_last_backward(True)
            module.set_reshard_after_backward(True, recurse=False)
        for module, after_forward in zip(modules, before, strict=False):
            _set_resharding(module, after_forward)
    if each:
        return
    states: list[Any] = list(dict.fromkeys(module._get_fsdp_state() for module in modules))
    if not reduce:
        for module in modules:
            module.reshard()
        return
    for state in states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    for state in states:
        if state._is_root:
            state._root_post_backward_final_callback()


def _resharding(module: FSDPModule) -> tuple[bool | None, list[Any]]:
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups
    return state._auto_reshard_after_forward, [group.post_forward_mesh_info for group in groups]


def _set_resharding(module: FSDPModule, before: tuple[bool | None, list[Any]]) -> None:
    state: Any = module._get_fsdp_state()
    state._auto_reshard_after_forward, infos = before
    for group, info in zip(state._fsdp_param_groups, infos, strict=True):
        # A root that chose by itself gathers once for forward and backward.
        automatic = state._is_root and state._auto_reshard_after_forward
        group.post_forward_mesh_info = None if automatic else info
