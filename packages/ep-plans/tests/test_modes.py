"""What a layout is combined with: sliced sequences, checkpointing, frozen parts, dtypes, meta devices."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from toy_decoder import DISPATCH, MASKING, SINKS, TP_PLAN, ToyConfig, build, loss_of
from toy_equality import check_equal, compare_gradients, relative_error, token_ids

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import full_tensor, parallel_state, parallelize
from ep_testing.pool import RankPool

# A few layers of bfloat16 activations; a wrong factor or a lost part is 0.5 or more.
BFLOAT16 = 0.3
LAYOUT = {"tp_size": 2, "fsdp_size": 4, "ep_size": 4}


def run(rank: int, toy: dict[str, Any], sizes: dict[str, Any], check: dict[str, Any]) -> None:
    check_equal(ToyConfig(**toy), DistributedConfig(**sizes), **check)


# -- sequences in slices


@pytest.mark.parametrize(
    ("toy", "sizes", "check"),
    [
        ({}, LAYOUT, {}),
        ({}, LAYOUT | {"fsdp_over_tp": False, "tp_plan": {}}, {}),
        ({}, {"tp_size": 8, "ep_size": 8}, {"length": 3}),  # shorter than the group
        ({}, {"tp_size": 4, "fsdp_size": 2, "ep_size": 8}, {"size": 1, "length": 1}),
        ({"num_key_value_heads": 2, "bias": True}, {"tp_size": 4, "fsdp_size": 2}, {}),
        (
            {"base_model_ep_plan": MASKING},
            {"tp_size": 4, "dp_replicate_size": 2, "ep_size": 4},
            {"micro": 2},
        ),
    ],
)
def test_sequence_parallelism_equals_one_process(
    ranks: RankPool, toy: dict[str, Any], sizes: dict[str, Any], check: dict[str, Any]
) -> None:
    ranks.run(run, toy, sizes | {"enable_sequence_parallel": True}, check)


def shapes_between_regions(rank: int, ep_plan: dict[str, str] | None) -> dict[str, list[int]]:
    toy = ToyConfig() if ep_plan is None else ToyConfig(base_model_ep_plan=ep_plan)
    config = DistributedConfig(tp_size=4, ep_size=4, enable_sequence_parallel=True)
    model = parallelize(build(toy), ParallelMesh(config.layout), config)
    seen: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda m, args, name=name: seen.__setitem__(name, list(args[0].shape)) if args else None
        )
    out = model(torch.arange(14).view(2, 7))
    seen["out"] = list(out.shape)
    return seen


def test_between_regions_each_rank_has_its_slice(ranks: RankPool) -> None:
    for ep_plan in (None, MASKING):
        found = ranks.run(shapes_between_regions, ep_plan, world=4)
        for rank, length in enumerate((2, 2, 2, 1)):  # 7 = 2 + 2 + 2 + 1
            seen = found[rank]
            for name in (
                "layers.1",
                "layers.0.post_attention_layernorm",
                "layers.1.input_layernorm",
            ):
                assert seen[f"model.{name}"] == [2, length, 16], name
            # A region's own modules see the whole.
            assert seen["model.layers.0.self_attn.q_proj"] == [2, 7, 16]
            assert seen["model.layers.0.mlp.gate_proj"] == [2, 7, 16]
            assert seen["model.layers.1.mlp.shared_expert.gate_proj"] == [14, 16]
            tokens = 2 * length if ep_plan is None else 14
            assert seen["model.layers.1.mlp.gate"] == [tokens, 16]
            assert seen["model.layers.1.mlp.experts"] == [tokens, 16]
            assert seen["model.norm"] == [2, 7, 16]
            assert seen["out"] == [2, 7, 50]


def two_lengths(rank: int, variant: str, sizes: dict[str, Any]) -> None:
    """Two batches of different lengths forward, then one backward: layers are run again for both."""
    config = DistributedConfig(**sizes)
    ids = token_ids(config, 50, 2, 8, 1)[0]

    def loss(model: nn.Module, shard: int) -> Tensor:
        return loss_of(model, ids[shard]) + 2 * loss_of(model, ids[shard][:, :5])

    expected = build(ToyConfig(num_hidden_layers=3))
    torch.stack([loss(expected, shard) for shard in range(config.dp_size)]).mean().backward()
    grads = {name: p.grad for name, p in expected.named_parameters()}
    mesh = ParallelMesh(config.layout)
    model = build(ToyConfig(num_hidden_layers=3))
    model.model.checkpoint = variant
    parallelize(model, mesh, config)
    loss(model, mesh.layout.batch_of(rank)).backward()
    compare_gradients(model, grads, 1e-12)


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("non-reentrant", LAYOUT),
        # FSDP2 itself gets the gradients of this wrong with the reentrant variant.
        ("reentrant", {"tp_size": 4, "fsdp_over_tp": False}),
    ],
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_run_again_for_batches_of_different_lengths(
    ranks: RankPool, variant: str, sizes: dict[str, Any], sequence_parallel: bool
) -> None:
    sizes = sizes | {"enable_sequence_parallel": sequence_parallel}
    world = DistributedConfig(**sizes).world_size
    ranks.run(two_lengths, variant, sizes, world=world)


# -- activation checkpointing


def set_checkpoint(model: Any, variant: str) -> None:
    model.model.checkpoint = variant


@pytest.mark.parametrize("variant", ["reentrant", "non-reentrant"])
def test_checkpointing_changes_no_gradient(ranks: RankPool, variant: str) -> None:
    prepare = functools.partial(set_checkpoint, variant=variant)
    for sizes in (LAYOUT, {"tp_size": 4, "fsdp_size": 2, "ep_size": 4, "fsdp_over_tp": False}):
        ranks.run(run, {}, sizes, {"prepare": prepare, "micro": 2})
    masking = {"base_model_ep_plan": MASKING}
    ranks.run(run, masking, {"tp_size": 4, "fsdp_size": 2, "ep_size": 4}, {"prepare": prepare})


def recompute_other_routes(rank: int, plan: dict[str, str], sizes: dict[str, Any]) -> None:
    """The router gives each token another one's experts when it is run again."""
    made: list[Any] = []
    calls: list[int] = []

    def prepare(model: Any) -> None:
        made.append(model)
        if len(made) == 1:
            return  # of one process
        model.model.checkpoint = "non-reentrant"
        gate = model.model.layers[1].mlp.gate
        route = gate.forward

        def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, index = route(x)
            calls.append(1)
            return logits, weights, index if len(calls) == 1 else index.roll(1, dims=0)

        gate.forward = forward

    run(rank, {"base_model_ep_plan": plan}, sizes, {"prepare": prepare})
    assert len(calls) == 2


def test_a_near_tie_in_the_recomputed_router_changes_nothing(ranks: RankPool) -> None:
    shared = {"tp_size": 4, "ep_size": 4}
    ranks.run(recompute_other_routes, MASKING, shared, world=4)
    for name in ("all_reduce", "all_to_all"):
        ranks.run(recompute_other_routes, DISPATCH, shared | {"ep_implementation": name}, world=4)


# -- frozen parameters


def freeze(model: nn.Module, part: str) -> None:
    for name, parameter in model.named_parameters():
        frozen = part in name if part[0] != "!" else part[1:] not in name
        parameter.requires_grad_(not frozen)


@pytest.mark.parametrize(
    "part", ["experts", "gate.weight", "self_attn", "embed_tokens", "!lm_head", "!experts.down"]
)
def test_frozen_parameters_get_no_gradient_and_do_not_move(ranks: RankPool, part: str) -> None:
    prepare = functools.partial(freeze, part=part)
    ranks.run(run, {}, LAYOUT, {"prepare": prepare})


def test_frozen_parameters_in_other_layouts(ranks: RankPool) -> None:
    for part in ("experts", "self_attn", "norm"):
        prepare = functools.partial(freeze, part=part)
        sizes = {"tp_size": 8, "ep_size": 8, "enable_sequence_parallel": True}
        ranks.run(run, {}, sizes, {"prepare": prepare})


# -- modes without gradients


def without_gradients(rank: int, sizes: dict[str, Any], length: int) -> None:
    config = DistributedConfig(**sizes)
    ids = token_ids(config, 50, 2, length, 1)[0]
    expected = build(ToyConfig())
    mesh = ParallelMesh(config.layout)
    model = parallelize(build(ToyConfig()), mesh, config)
    mine = ids[mesh.layout.batch_of(rank)]
    with torch.no_grad():
        right = expected(mine)
        assert relative_error(model(mine), right) < 1e-13
    with torch.inference_mode():
        assert relative_error(model(mine), right) < 1e-13
    assert relative_error(model(mine).detach(), right) < 1e-13
    loss_of(model, mine).backward()  # training goes on afterwards
    torch.stack([loss_of(expected, part) for part in ids]).mean().backward()
    compare_gradients(model, {n: p.grad for n, p in expected.named_parameters()}, 1e-12)


@pytest.mark.parametrize("length", [1, 6])
def test_forward_without_gradients(ranks: RankPool, length: int) -> None:
    for sizes in (
        LAYOUT,
        {"tp_size": 4, "fsdp_size": 2, "ep_size": 4},
        {"tp_size": 8, "ep_size": 8, "enable_sequence_parallel": True},
    ):
        ranks.run(without_gradients, sizes, length)


# -- dtypes


def build_float32_parts(config: ToyConfig, parts: tuple[str, ...]) -> nn.Module:
    """A bfloat16 model with parts in float32, of values that both hold."""
    model = build(config, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if any(part in name for part in parts):
            parameter.data = parameter.data.float()
    return model


def float32_parts(rank: int, sizes: dict[str, Any], parts: tuple[str, ...]) -> None:
    toy = ToyConfig(sinks=True, base_model_tp_plan=TP_PLAN | SINKS)
    config = DistributedConfig(**sizes)
    ids = token_ids(config, 50, 2, 6, 1)[0]
    expected = build_float32_parts(toy, parts).double()
    torch.stack([loss_of(expected, part) for part in ids]).mean().backward()
    mesh = ParallelMesh(config.layout)
    model = parallelize(build_float32_parts(toy, parts), mesh, config)
    for _ in range(2):  # the second time every unit is in its steady state
        model.zero_grad()
        loss_of(model, ids[mesh.layout.batch_of(rank)]).backward()
    scale = 0.1 * max(p.grad.norm().item() for p in expected.parameters())
    state = parallel_state(model)
    assert state is not None
    for name, parameter in model.named_parameters():
        right = torch.float32 if any(part in name for part in parts) else torch.bfloat16
        assert parameter.dtype is parameter.grad.dtype is right, name
        assert state.shardings[name].float32 is (right is torch.float32)
        whole = full_tensor(parameter)
        assert torch.equal(whole.double(), expected.get_parameter(name)), name
        error = relative_error(
            full_tensor(parameter.grad), expected.get_parameter(name).grad, scale
        )
        assert error < BFLOAT16, (name, error)


@pytest.mark.parametrize(
    "sizes",
    [
        LAYOUT,
        {"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 4},
        {"tp_size": 4, "fsdp_size": 2, "fsdp_over_tp": False, "enable_sequence_parallel": True},
    ],
)
def test_parameters_kept_in_float32(ranks: RankPool, sizes: dict[str, Any]) -> None:
    """Alone in their module (router, norms) and beside others (sinks)."""
    ranks.run(float32_parts, sizes, ("mlp.gate.weight", "sinks", "q_norm", "model.norm"))


def mixed_precision(rank: int, toy: dict[str, Any], sizes: dict[str, Any]) -> None:
    config = DistributedConfig(**sizes, fsdp_mixed_precision=True)
    ids = token_ids(config, 50, 2, 6, 1)[0]
    expected = build(ToyConfig(**toy), torch.float32)
    torch.stack([loss_of(expected, part) for part in ids]).mean().backward()
    mesh = ParallelMesh(config.layout)
    model = build(ToyConfig(**toy), torch.float32)
    dtypes: dict[str, set[torch.dtype]] = {}
    for name, module in model.named_modules():
        if name.endswith(("experts", "q_proj", "lm_head")):

            def note(m: nn.Module, args: Any, out: Any, name: str = name) -> None:
                tensors = (*args, out, *m.parameters(recurse=False))
                floats = [t.dtype for t in tensors if t.is_floating_point()]
                dtypes.setdefault(name, set()).update(floats)

            module.register_forward_hook(note)
    parallelize(model, mesh, config)
    loss_of(model, ids[mesh.layout.batch_of(rank)]).backward()
    scale = 0.1 * max(p.grad.norm().item() for p in expected.parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype is parameter.grad.dtype is torch.float32, name
        error = relative_error(
            full_tensor(parameter.grad), expected.get_parameter(name).grad, scale
        )
        assert error < BFLOAT16, (name, error)
    assert all(torch.bfloat16 in seen for seen in dtypes.values()), dtypes
    assert dtypes["lm_head"] == {torch.bfloat16}


@pytest.mark.parametrize(
    ("toy", "sizes"),
    [
        ({}, LAYOUT),
        ({}, {"fsdp_size": 8, "ep_size": 8}),
        ({"moe_intermediate_size": 3, "vocab_size": 50, "intermediate_size": 5}, {"tp_size": 8}),
        ({"sinks": True, "base_model_tp_plan": TP_PLAN | SINKS}, {"tp_size": 4, "fsdp_size": 2}),
    ],
)
def test_fsdp_mixed_precision(ranks: RankPool, toy: dict[str, Any], sizes: dict[str, Any]) -> None:
    ranks.run(mixed_precision, toy, sizes)


def scalar_parameter(config: ToyConfig) -> nn.Module:
    """A model with a parameter of no dimension."""
    model = build(config)
    model.model.norm = ScaledNorm(model.model.norm.weight)
    return model


class ScaledNorm(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * self.scale / x.norm(dim=-1, keepdim=True)


def test_a_scalar_parameter_has_the_mean_of_its_gradients(ranks: RankPool) -> None:
    for sizes in (LAYOUT, {"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2}, {"tp_size": 8}):
        check = {"make": scalar_parameter, "micro": 2, "deferred": True}
        ranks.run(run, {}, sizes, check)


# -- the meta device


def from_meta(rank: int, sizes: dict[str, Any], toy: dict[str, Any]) -> None:
    """Sharded on the meta device, then filled: the same model."""
    config = DistributedConfig(**sizes)
    values = build(ToyConfig(**toy))
    with torch.device("meta"):
        model = type(values)(ToyConfig(**toy)).double()
    mesh = ParallelMesh(config.layout)
    parallelize(model, mesh, config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    expected = parallelize(build(ToyConfig(**toy)), mesh, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = expected.get_parameter(name)
            assert type(parameter.data) is type(source.data), name
            if isinstance(parameter, DTensor):
                assert parameter.placements == source.placements, name
                assert parameter.device_mesh == source.device_mesh, name
                parameter.to_local().copy_(source.to_local())
            else:
                parameter.copy_(source)
    ids = token_ids(config, 50, 2, 6, 1)[0][mesh.layout.batch_of(rank)]
    losses = [loss_of(m, ids) for m in (model, expected)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(
            full_tensor(parameter.grad), full_tensor(expected.get_parameter(name).grad)
        ), name
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied is toy.get("tied", False)


@pytest.mark.parametrize(
    ("sizes", "toy"),
    [
        (LAYOUT, {}),
        ({"tp_size": 8, "ep_size": 8}, {"num_key_value_heads": 2}),
        ({"tp_size": 4, "fsdp_size": 2, "fsdp_over_tp": False}, {"tied": True}),
        ({"tp_size": 8, "fsdp_over_tp": False}, {"tied": True}),
        ({"fsdp_size": 8, "ep_size": 2}, {"tied": True}),
    ],
)
def test_a_model_on_the_meta_device(
    ranks: RankPool, sizes: dict[str, Any], toy: dict[str, Any]
) -> None:
    ranks.run(from_meta, sizes, toy)
