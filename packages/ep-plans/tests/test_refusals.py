"""What `parallelize` refuses, on every rank and before anything is changed; what it shows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from toy_decoder import DISPATCH, ToyConfig, ToyForCausalLM, build

from ep_dispatch import AllReduce, AllToAll, EPImplementationInterface
from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import parallel_state, parallelize, plan_parameters, resolve_plans
from ep_testing.pool import RankPool

SIZES = {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}


def refused(rank: int, make: Callable[[int], tuple[nn.Module, dict[str, Any]]]) -> str:
    """The error; the model must be as it was, and must then be taken."""
    model, sizes = make(rank)
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    forwards = {name: m.forward for name, m in model.named_modules()}
    config = DistributedConfig(**sizes)
    with pytest.raises(ValueError, match=r"\w") as error:
        parallelize(model, ParallelMesh(config.layout), config)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert all(p.is_meta or torch.equal(p, values[name]) for name, p in after.items())
    assert {name: m.forward for name, m in model.named_modules()} == forwards
    assert not any(isinstance(m, FSDPModule) for m in model.modules())
    assert parallel_state(model) is None
    assert not hasattr(model, "tp_plan")
    return str(error.value)


def check_refused(
    ranks: RankPool, make: Callable[[int], tuple[nn.Module, dict[str, Any]]], *words: str
) -> None:
    errors = ranks.run(refused, make, world=4)
    assert len(set(errors)) == 1, errors
    assert all(word in errors[0] for word in words), errors[0]


def test_ranks_with_different_values(ranks: RankPool) -> None:
    def make(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        model = build(ToyConfig())
        if rank == 2:
            model.model.layers[1].mlp.gate.weight.data[0, 0] += 1.0
        return model, SIZES

    check_refused(ranks, make, "different values of model.layers.1.mlp.gate.weight", "same seed")


def test_ranks_with_different_models(ranks: RankPool) -> None:
    def other_size(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        return build(ToyConfig(vocab_size=50 + (rank == 3))), SIZES

    def other_device(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        with torch.device("meta" if rank else "cpu"):
            return ToyForCausalLM(ToyConfig()), SIZES

    def frozen(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        model = build(ToyConfig())
        model.lm_head.weight.requires_grad_(rank != 1)
        return model, SIZES

    def other_config(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        return build(ToyConfig()), SIZES | {"fsdp_mixed_precision": rank == 1}

    for make in (other_size, other_device, frozen, other_config):
        check_refused(
            ranks,
            make,
            "different configurations or ep_options, or different",
            "same on every rank",
        )


def test_plans_that_cannot_work(ranks: RankPool) -> None:
    def unknown_key(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        return build(ToyConfig()), SIZES | {"tp_plan": {"model.layer": "colwise"}}

    def unknown_implementation(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        return build(ToyConfig()), SIZES | {"ep_implementation": "all_to_none"}

    def slices_for_a_shared_batch(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        class Shared(AllReduce):
            """One's own, which the configuration does not know yet when it is built."""

        EPImplementationInterface.register("shared", Shared)
        more = {"enable_sequence_parallel": True, "ep_implementation": "shared"}
        return build(ToyConfig()), SIZES | more

    def no_layers(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4))
        return model, {
            "tp_size": 4,
            "tp_plan": {"0": "colwise_rep"},
            "enable_sequence_parallel": True,
        }

    def odd_packs(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5)), {"tp_size": 4, "tp_plan": {"0": "packed_colwise"}}

    check_refused(ranks, unknown_key, "'model.layer' matches no module")
    check_refused(ranks, unknown_implementation, "'all_to_none' names no registered")
    check_refused(ranks, slices_for_a_shared_batch, "'shared' needs an EP group that shares")
    check_refused(ranks, no_layers, "no module list named 'layers'")
    check_refused(ranks, odd_packs, "0.weight", "5", "2")


def test_mega_moe_where_it_cannot_run(ranks: RankPool) -> None:
    def mega(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        sizes = {"tp_size": 4, "ep_size": 4, "ep_implementation": "deepgemm_megamoe"}
        return build(ToyConfig()), sizes

    check_refused(ranks, mega, "cannot run here", "SM100", "FP4 experts with the weights")


def held_whole(rank: int) -> None:
    """Experts that Mega MoE runs; a stand-in computes them, since the kernel needs its chip."""

    class Kernel(AllToAll):
        runs_megamoe_experts = True

    EPImplementationInterface.register("kernel", Kernel)
    model = build(ToyConfig())
    experts = model.model.layers[1].mlp.experts
    experts.config = SimpleNamespace(_experts_implementation="deepgemm_megamoe")
    ids = torch.tensor([[3, 5, 7, 9]])
    with torch.no_grad():
        expected = model(ids)
        config = DistributedConfig(**SIZES, ep_implementation="kernel")
        parallelize(model, ParallelMesh(config.layout), config)
        torch.testing.assert_close(model(ids), expected)
    assert not isinstance(experts, FSDPModule)
    assert isinstance(model.model.layers[1], FSDPModule)
    for weight in experts.parameters():
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.mesh_dim_names == ("ep",)
        assert weight.to_local().shape[0] * 2 == weight.shape[0]


def test_mega_moe_experts_are_not_held_by_fsdp_too(ranks: RankPool) -> None:
    ranks.run(held_whole, world=4)


def other_refusals(rank: int) -> None:
    config = DistributedConfig(**SIZES)
    mesh = ParallelMesh(config.layout)
    other = DistributedConfig(tp_size=4)
    with pytest.raises(ValueError, match="mesh is of the layout"):
        parallelize(build(ToyConfig()), mesh, other)
    model = parallelize(build(ToyConfig()), mesh, config)
    with pytest.raises(ValueError, match="parallel already"):
        parallelize(model, mesh, config)


def test_meshes_and_models_that_do_not_fit(ranks: RankPool) -> None:
    ranks.run(other_refusals, world=4)


def options_refused(rank: int) -> None:
    config = DistributedConfig(**SIZES)
    mesh = ParallelMesh(config.layout)
    model = build(ToyConfig())
    with pytest.raises(
        ValueError, match=r"'num_chunk' is no setting .*'auto'; it has .*'num_chunks'"
    ):
        parallelize(model, mesh, config, ep_options={"num_chunk": 2})
    with pytest.raises(ValueError, match=r"num_chunks must be .* got 0"):
        parallelize(model, mesh, config, ep_options={"num_chunks": 0})
    with pytest.raises(ValueError, match="different configurations"):
        parallelize(model, mesh, config, ep_options={"num_chunks": 2 + rank % 2})
    for sizes in ({"tp_size": 4}, {"tp_size": 4, "ep_size": 4, "ep_implementation": "all_reduce"}):
        other = DistributedConfig(**sizes)
        with pytest.raises(ValueError, match="num_chunks"):
            parallelize(model, ParallelMesh(other.layout), other, ep_options={"num_chunks": 2})

    built = []

    class Noted(AllToAll):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            built.append(self)

    EPImplementationInterface.register("noted", Noted)
    config = DistributedConfig(**SIZES, ep_implementation="noted")
    parallelize(model, mesh, config, ep_options={"num_chunks": 2, "max_rows": 9})
    assert [(x.num_chunks, x.max_rows) for x in built] == [(2, 9)]
    assert built[0].layer == "model.layers.1.mlp.experts"


def test_options_of_the_implementation(ranks: RankPool) -> None:
    ranks.run(options_refused, world=4)


# -- what a model shows


def shown(rank: int) -> None:
    config = DistributedConfig(**SIZES, tp_plan={"model.layers.*.self_attn.q_norm": "replicate"})
    model = build(ToyConfig())
    plans = resolve_plans(model, config)
    planned = plan_parameters(model, plans, config)
    mesh = ParallelMesh(config.layout)
    assert parallelize(model, mesh, config) is model
    assert model.tp_plan == plans.tp_rules
    assert model.tp_plan["model.layers.*.self_attn.q_norm"] == "replicate"
    assert model.ep_plan == {f"model.{key}": style for key, style in DISPATCH.items()}
    assert model.fsdp_plan == plans.fsdp_rules
    state = parallel_state(model)
    assert state is not None
    assert (state.mesh, state.config, state.plans) == (mesh, config, plans)
    assert state.shardings == planned
    experts = model.model.layers[1].mlp.experts
    assert experts.num_experts == 4
    assert model.config.num_experts == 8
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        assert tuple(local.shape) == planned[name].local_shape(parameter.shape, mesh.layout, rank)
        largest = planned[name].local_numel(parameter.shape, mesh.layout, 0) * local.itemsize
        assert local.untyped_storage().nbytes() <= largest, f"{name} keeps more than a part"
    assert isinstance(experts, FSDPModule)
    assert parallel_state(nn.Linear(1, 1)) is None


def test_the_model_shows_its_plans_and_its_shards(ranks: RankPool) -> None:
    ranks.run(shown, world=4)


def wrapped_experts(rank: int, sizes: dict[str, Any], expected: bool) -> None:
    config = DistributedConfig(ep_size=4, fsdp_over_tp=False, **sizes)
    model = parallelize(build(ToyConfig()), ParallelMesh(config.layout), config)
    wrapped = {name for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    assert ("model.layers.1.mlp.experts" in wrapped) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 2, "fsdp_size": 2}, True),
        ({"tp_size": 4, "fsdp_mixed_precision": True}, True),
        ({"tp_size": 4}, False),  # one copy of the model: nothing to reduce or to cast
    ],
)
def test_one_copy_of_the_experts_is_an_fsdp_unit_beside_others(
    ranks: RankPool, sizes: dict[str, Any], expected: bool
) -> None:
    ranks.run(wrapped_experts, sizes, expected, world=4)


def offloaded(rank: int) -> None:
    config = DistributedConfig(fsdp_size=2, ep_size=2, fsdp_cpu_offload=True)
    with pytest.warns(UserWarning, match="nothing to do: the ranks run on the CPU"):
        parallelize(build(ToyConfig()), ParallelMesh(config.layout), config)


def test_cpu_offload_on_a_cpu_is_nothing_to_do(ranks: RankPool) -> None:
    ranks.run(offloaded, world=2)
