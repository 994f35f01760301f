"""FSDP2 over the two meshes: dense modules over `fsdp`, experts over `efsdp`, one unit per rule.

The divisor of the gradients is told in `parameters.py`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans._compat import per_parameter_mesh
from ep_plans.patterns import is_below
from ep_plans.prefetch import order_gathers
from ep_plans.resolve import Plans
from ep_plans.sharding import ParameterSharding
from ep_plans.styles import FSDP_STYLES
from ep_plans.styles.base import EMPTY_DTYPE


def apply_fsdp(
    model: nn.Module,
    mesh: ParallelMesh,
    config: DistributedConfig,
    plans: Plans,
    shardings: Mapping[str, ParameterSharding],
) -> None:
    """Wrap experts, then the modules of the FSDP plan from the inside out, then the model.

    Costs no communication. Nothing is wrapped where no parameter has a data axis.
    """
    units = _Units(model, mesh, config, shardings)
    for name in plans.experts:
        inside = [sharding for at, sharding in shardings.items() if is_below(at, [name])]
        if any(sharding.data_axis is not None for sharding in inside):
            units.shard_experts(name, reshard=FSDP_STYLES[plans.fsdp.get(name, "free_full_weight")])
    if all(sharding.data_axis in (None, "efsdp") for sharding in shardings.values()):
        order_gathers(model)
        return
    done = units.shard_float32(plans.fsdp)
    fsdp = {
        name: style for name, style in plans.fsdp.items() if name not in (*done, *plans.experts)
    }
    kept = [name for name, style in fsdp.items() if not FSDP_STYLES[style]]
    for name, style in fsdp.items():
        if FSDP_STYLES[style]:
            units.shard([name], reshard=True)
    if len(kept) == 2 and _is_tail(model, kept):
        # The final norm and the head run one after the other: one gather, kept for backward.
        units.shard(kept, reshard=False)
    else:
        for name in kept:
            units.shard([name], reshard=False)
    units.shard([""], reshard=None)
    order_gathers(model)


class _Units:
    """Calls `fully_shard` with the mesh of each parameter."""

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        config: DistributedConfig,
        shardings: Mapping[str, ParameterSharding],
    ) -> None:
        self.model, self.mesh, self.config = model, mesh, config
        self.shardings = shardings
        self.dense_mesh = self._data_mesh("fsdp")
        named = model.named_parameters(remove_duplicate=False)
        self.owners = {
            name: set(module.parameters(recurse=False)) for name, module in model.named_modules()
        }
        over_tp = [p for name, p in named if shardings[name].data_axis == "fsdp_tp"]
        # Keyed by the parameters as they are now: `fully_shard` asks before it replaces them.
        self.meshes = dict.fromkeys(over_tp, self._data_mesh("fsdp_tp")) if over_tp else {}
        self.left_out = self._left_out() | self._empty() or None

    def shard(self, names: list[str], *, reshard: bool | None, float32: bool = False) -> None:
        """Make one unit of modules, over the dense mesh."""
        modules = [self.model.get_submodule(name) for name in self._with_sharers(names)]
        place = per_parameter_mesh(self.meshes, self.dense_mesh) if self.meshes else None
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=self.dense_mesh,
            reshard_after_forward=reshard,
            shard_placement_fn=place,
            ignored_params=self.left_out,
            **self._policies(float32=float32),
        )

    def shard_experts(self, name: str, *, reshard: bool) -> None:
        """Make a unit of an experts module, over the expert mesh, with the right divisor."""
        module = self.model.get_submodule(name)
        fully_shard(
            module,
            mesh=self._data_mesh("efsdp"),
            reshard_after_forward=reshard,
            **self._policies(experts=True),
        )
        assert isinstance(module, FSDPModule)
        divisor = float(self.config.dp_size)
        if self.config.efsdp_size > 1:
            # Another divisor than the group's size is a pre-multiplied sum, which gloo lacks and
            # NCCL gets wrong in bfloat16 before torch 2.14: sum there, divide here.
            module.set_gradient_divide_factor(divisor)
            module.set_force_sum_reduction_for_comms(True)
        elif divisor > 1:
            # With one rank FSDP2 reduces nothing, and divides by a given factor once in float32 and
            # bfloat16 but twice in other dtypes: divide after its reduction.
            module.set_gradient_divide_factor(1.0)
            module.set_all_reduce_hook(functools.partial(_divide, divisor=divisor))

    def shard_float32(self, fsdp: Mapping[str, str]) -> set[str]:
        """Give parameters kept in float32 units of their own: a unit gathers one dtype.

        Args:
            fsdp: the rules, for those of them that are such a unit.

        Returns:
            The names of the modules that are units now.
        """
        owners = {
            name.rpartition(".")[0]
            for name, sharding in self.shardings.items()
            if sharding.float32 and sharding.data_axis in ("fsdp", "fsdp_tp")
        }
        for name in sorted(owners, key=lambda name: name.count("."), reverse=True):
            if name:
                reshard = name not in fsdp or FSDP_STYLES[fsdp[name]]
                self.shard([name], reshard=reshard, float32=True)
        return owners

    def _left_out(self) -> set[nn.Parameter]:
        """The parameters that the plan gives no data axis."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {p for name, p in named if self.shardings[name].data_axis is None}

    def _empty(self) -> set[nn.Parameter]:
        """The parameters of which this rank has nothing after the cut over TP (few features).

        FSDP2 can't reduce empty gradients. The ranks of an FSDP group share their place on the TP
        axis, so they all leave the parameter out, and nothing is to be reduced.
        """
        empty = set()
        for module in self.model.modules():
            own = [p for p in module.parameters(recurse=False) if _local_numel(p) == 0]
            if own and self.config.fsdp_mixed_precision:
                module.__dict__[EMPTY_DTYPE] = torch.bfloat16
            empty |= set(own)
        return empty

    def _with_sharers(self, names: list[str]) -> list[str]:
        """The modules, and those elsewhere that share a parameter with them (a tied head).

        A parameter belongs to one unit, and FSDP2 finds it only in the modules of that unit.
        """
        if "" in names:
            return names
        inside = [name for name in self.owners if is_below(name, names)]
        shared = {parameter for name in inside for parameter in self.owners[name]}
        outside = [
            name
            for name, parameters in self.owners.items()
            if name not in inside and not shared.isdisjoint(parameters)
        ]
        return [*names, *outside]

    def _data_mesh(self, axis: str) -> DeviceMesh:
        if self.config.dp_replicate_size > 1:
            return self.mesh.mesh("dp_replicate", axis)
        return self.mesh.mesh(axis)

    def _policies(self, *, experts: bool = False, float32: bool = False) -> dict[str, Any]:
        policies: dict[str, Any] = {}
        if self.config.fsdp_mixed_precision and not float32:
            policies["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                # Routing weights reach the experts as the router computed them.
                cast_forward_inputs=not experts,
            )
        if self.config.fsdp_cpu_offload:
            if self.mesh.device_type == "cpu":
                warnings.warn(
                    "fsdp_cpu_offload=True has nothing to do: the ranks run on the CPU.",
                    stacklevel=2,
                )
            else:
                policies["offload_policy"] = CPUOffloadPolicy()
        return policies


def _local_numel(parameter: nn.Parameter) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _divide(grad: Tensor, *, divisor: float) -> None:
    grad.div_(divisor)


def _is_tail(model: nn.Module, names: list[str]) -> bool:
    heads = [
        get()
        for get in (
            getattr(model, "get_output_embeddings", None),
            getattr(model, "get_input_embeddings", None),
        )
        if get is not None
    ]
    has_norm = any(name.rpartition(".")[2] == "norm" for name in names)
    return has_norm and any(model.get_submodule(name) in heads for name in names)
