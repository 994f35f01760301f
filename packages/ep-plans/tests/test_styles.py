"""Every style against one process, in float64: outputs, gradients of inputs and of parameters.

Sizes are such that parts are uneven and that some ranks have none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from toy_equality import relative_error

from ep_dispatch.collectives import copy_to_group, gather_over_group
from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import Context, Style, full_tensor, parallel_state, parallelize, register_style
from ep_plans.styles import STYLES
from ep_plans.styles.base import around_forward, change_input, local_parameters
from ep_testing.pool import RankPool

TP = 4
H = 6


class Chain(nn.Module):
    """Modules one after the other, by name."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


class PackedMLP(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(H, 2 * inner)
        self.down_proj = nn.Linear(inner, H)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Joined(nn.Module):
    """Two projections whose outputs feed one packed weight."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H, inner), nn.Linear(H, inner)
        self.join = nn.Linear(2 * inner, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.cat([self.a(x), self.b(x)], dim=-1))


class HeadNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, 3))
        return (self.weight * functional.normalize(heads, dim=-1)).flatten(-2)


class Latent(nn.Module):
    """The key-value path of multi-head latent attention: a latent part, and a rotary part for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_rope_head_dim = 2
        self.kv_a = nn.Linear(H, 5 + 2)
        self.kv_b = nn.Linear(5, 4 * 3)
        self.out = nn.Linear(4 * 5, H)

    def forward(self, x: Tensor) -> Tensor:
        latent, rotary = self.kv_a(x).split([5, 2], dim=-1)
        keys = self.kv_b(latent).unflatten(-1, (-1, 3))
        rotary = rotary.unsqueeze(-2).expand(*keys.shape[:-1], 2)
        return self.out(torch.cat([keys, rotary.sin()], dim=-1).flatten(-2))


class Bare(nn.Module):
    """A bare parameter applied to features that are cut."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, inner), nn.Linear(inner, H)
        self.gain = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gain)


class BareMLP(nn.Module):
    """An MLP of bare parameters: cut, its output is a partial sum."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(inner, H))
        self.down = nn.Parameter(torch.ones(H, inner))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.silu(functional.linear(x, self.up)), self.down)


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class TransposedExperts(nn.Module):
    """Stacked experts [E, H, 2I] and [E, I, H], with one that gives back its input."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.num_experts = 3
        self.gate_up_proj = nn.Parameter(torch.ones(3, H, 2 * inner))
        self.down_proj = nn.Parameter(torch.ones(3, inner, H))
        self.identity_expert = Identity()

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = self.identity_expert(x) * weights[:, :1]
        for expert in range(3):
            gate, up = (x @ self.gate_up_proj[expert]).chunk(2, dim=-1)
            weight = torch.where(index == expert, weights, 0.0).sum(-1, keepdim=True)
            out = out + (functional.silu(gate) * up) @ self.down_proj[expert] * weight
        return out


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(H, 3)
        self.experts = TransposedExperts(inner)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, index = self.gate(rows).softmax(-1).topk(2, dim=-1)
        return self.experts(rows, index, weights).view_as(x)


@dataclass(frozen=True)
class Case:
    """A module, the rules for it, and whether it takes ids."""

    make: Callable[[], nn.Module]
    plan: dict[str, str]
    vocabulary: int | None = None


def pair(inner: int, **more: nn.Module) -> Callable[[], nn.Module]:
    return lambda: Chain(up=nn.Linear(H, inner), **more, down=nn.Linear(inner, H))


PAIR = {"up": "colwise", "down": "rowwise"}
CASES = {
    "colwise, rowwise": Case(pair(10), PAIR),
    "colwise, rowwise, some ranks empty": Case(pair(5), PAIR),
    "no biases": Case(
        lambda: Chain(up=nn.Linear(H, 9, bias=False), down=nn.Linear(9, H, bias=False)), PAIR
    ),
    "colwise_rep": Case(lambda: Chain(a=nn.Linear(H, 10)), {"a": "colwise_rep"}),
    "colwise_gather_output": Case(lambda: Chain(a=nn.Linear(H, 5)), {"a": "colwise_gather_output"}),
    "rowwise_split_input": Case(lambda: Chain(a=nn.Linear(H, 5)), {"a": "rowwise_split_input"}),
    "rowwise_rep": Case(lambda: Chain(a=nn.Linear(H, 5)), {"a": "rowwise_rep"}),
    "gathered between": Case(
        pair(10, norm=nn.LayerNorm(10)), {"up": "colwise_rep", "down": "rowwise_split_input"}
    ),
    "packed": Case(
        lambda: PackedMLP(10), {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
    ),
    "packed, some ranks empty": Case(
        lambda: PackedMLP(3), {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
    ),
    "packed_rowwise": Case(
        lambda: Joined(10), {"a": "colwise", "b": "colwise", "join": "packed_rowwise"}
    ),
    "embedding_rowwise": Case(
        lambda: Chain(e=nn.Embedding(11, H, padding_idx=4)), {"e": "embedding_rowwise"}, 11
    ),
    "embedding_rowwise, some ranks empty": Case(
        lambda: Chain(e=nn.Embedding(5, H, padding_idx=1)), {"e": "embedding_rowwise"}, 5
    ),
    "embedding_colwise": Case(
        lambda: Chain(e=nn.Embedding(11, H, padding_idx=4)), {"e": "embedding_colwise"}, 11
    ),
    "replicated_with_grad_allreduce": Case(
        pair(12, norm=HeadNorm()), PAIR | {"norm": "replicated_with_grad_allreduce"}
    ),
    "mla_kv_a_proj": Case(Latent, {"kv_a": "mla_kv_a_proj", "kv_b": "colwise", "out": "rowwise"}),
    "local_params": Case(
        lambda: Chain(bare=Bare(10)),
        {
            "bare": "local_params",
            "bare.gain": "colwise",
            "bare.up": "colwise",
            "bare.down": "rowwise",
        },
    ),
    "all_reduce": Case(
        lambda: Chain(bare=BareMLP(10)),
        {"bare": "all_reduce", "bare.up": "colwise", "bare.down": "rowwise"},
    ),
    "replicate": Case(
        lambda: Chain(a=nn.Linear(H, H), b=nn.Linear(H, H)), {"a": "replicate", "b": "colwise_rep"}
    ),
    "sequence_parallel": Case(
        lambda: Chain(a=nn.Linear(H, H), norm=nn.LayerNorm(H), b=nn.Linear(H, H)),
        {"norm": "sequence_parallel"},
    ),
    "moe_tp_experts": Case(
        lambda: Block(10),
        {
            "experts": "moe_tp_experts",
            "experts.gate_up_proj": "packed_rowwise",
            # The inner dimension of [E, I, H] is the last but one.
            "experts.down_proj": "colwise",
            "experts.identity_expert": "moe_identity_expert",
        },
    ),
}


def build(case: Case) -> nn.Module:
    torch.manual_seed(5)
    module = case.make().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def inputs(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    if case.vocabulary is not None:
        return torch.randint(0, case.vocabulary, (2, 7), generator=generator)
    return torch.randn(2, 7, H, generator=generator, dtype=torch.float64)


def check(rank: int, names: list[str]) -> None:
    for name in names:
        case = CASES[name]
        reference, x = build(case), inputs(case)
        sharded = parallelize(
            build(case), *place(tp_size=TP, tp_plan=case.plan, fsdp_over_tp=False)
        )
        results = []
        for module in (reference, sharded):
            leaf = x.clone().requires_grad_(x.is_floating_point())
            out = module(leaf)
            out.backward(torch.randn(out.shape, generator=seeded(7), dtype=out.dtype))
            with torch.no_grad():
                assert relative_error(module(leaf), out.detach()) < 1e-13, name
            with torch.inference_mode():
                assert relative_error(module(leaf), out.detach()) < 1e-13, name
            results.append((out, leaf.grad))
        (expected, expected_grad), (out, grad) = results
        assert relative_error(out.detach(), expected.detach()) < 1e-13, name
        if expected_grad is not None:
            assert relative_error(grad, expected_grad) < 1e-13, f"{name}: gradient of the input"
        scale = max(p.grad.norm().item() for p in reference.parameters())
        for key, parameter in reference.named_parameters():
            held = sharded.get_parameter(key)
            assert torch.equal(full_tensor(held), parameter), f"{name}: {key}"
            assert held.grad is not None, f"{name}: {key}"
            error = relative_error(full_tensor(held.grad), parameter.grad, 1e-4 * scale)
            assert error < 1e-13, f"{name}: gradient of {key}"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def place(**sizes: Any) -> tuple[ParallelMesh, DistributedConfig]:
    config = DistributedConfig(**sizes)
    return ParallelMesh(config.layout), config


@pytest.mark.parametrize("half", [0, 1])
def test_styles_equal_one_process(ranks: RankPool, half: int) -> None:
    ranks.run(check, list(CASES)[half::2], world=TP)


def test_every_tp_style_has_a_case() -> None:
    used = {style for case in CASES.values() for style in case.plan.values()}
    elsewhere = {"ep_router", "ep_dispatch_experts", "ep_dispatch_llama4", "grouped_gemm"}
    assert used | elsewhere == STYLES.keys()


# -- what a rank holds


def held(rank: int) -> dict[str, tuple[int, ...]]:
    case = CASES["packed"]
    sharded = parallelize(build(case), *place(tp_size=TP, tp_plan=case.plan, fsdp_over_tp=False))
    state = parallel_state(sharded)
    assert state is not None
    for name, parameter in sharded.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        sharding = state.shardings[name]
        assert tuple(local.shape) == sharding.local_shape(parameter.shape, state.mesh.layout, rank)
        assert local.untyped_storage().nbytes() == local.nbytes, name
    weight = sharded.gate_up_proj.weight.to_local()
    start, end = min(3 * rank, 10), min(3 * rank + 3, 10)
    whole = build(case).gate_up_proj.weight
    assert torch.equal(weight, torch.cat([whole[start:end], whole[10 + start : 10 + end]]))
    return {name: tuple(p.shape) for name, p in sharded.named_parameters()}


def test_a_rank_holds_matching_halves_of_a_packed_weight(ranks: RankPool) -> None:
    shapes = ranks.run(held, world=TP)
    whole = {name: tuple(p.shape) for name, p in build(CASES["packed"]).named_parameters()}
    assert shapes == [whole] * TP, "a DTensor shows its whole shape"


# -- a module called with keywords, a rank's own output


def call_by_keyword(rank: int) -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(H, 10), nn.Linear(10, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(input=self.up(input=x))

    torch.manual_seed(0)
    reference = Keyword().double()
    torch.manual_seed(0)
    sharded = parallelize(Keyword().double(), *place(tp_size=TP, tp_plan=PAIR))
    x = inputs(CASES["colwise, rowwise"])
    for module in (reference, sharded):
        module(x=x).square().sum().backward()
    for name, parameter in reference.named_parameters():
        assert relative_error(full_tensor(sharded.get_parameter(name).grad), parameter.grad) < 1e-13


def test_modules_called_with_keywords(ranks: RankPool) -> None:
    ranks.run(call_by_keyword, world=TP)


# -- one's own style


class Reversed(Style):
    """Column-wise with the parts gathered in reverse, to see that it is what runs."""

    def cut(self, module: nn.Module, parameter_name: str, ndim: int) -> tuple[int, int] | None:
        return 0, 1

    def check(self, model: nn.Module, name: str) -> None:
        if not isinstance(model.get_submodule(name), nn.Linear):
            raise ValueError(f"{name}: 'reversed' needs a linear layer")

    def install(self, context: Context) -> None:
        module, group = context.module, context.group
        size = module.out_features

        def run(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            args, kwargs = change_input(lambda x: copy_to_group(x, group), args, kwargs)
            with local_parameters(module):
                out = forward(*args, **kwargs)
            return gather_over_group(out, group, -1, size=size).flip(-1)

        around_forward(module, run)


def use_own_style(rank: int) -> None:
    register_style("reversed", Reversed())
    torch.manual_seed(0)
    model = Chain(a=nn.Linear(H, 8)).double()
    x = torch.randn(3, H, dtype=torch.float64)
    expected = model(x).flip(-1)
    sharded = parallelize(model, *place(tp_size=2, tp_plan={"a": "reversed"}))
    assert sharded.a.weight.to_local().shape == (4, H)
    assert relative_error(sharded(x).detach(), expected.detach()) < 1e-13
    with pytest.raises(ValueError, match="'reversed' needs a linear layer"):
        parallelize(Chain(a=nn.LayerNorm(H)), *place(tp_size=2, tp_plan={"a": "reversed"}))
    with pytest.raises(ValueError, match="'reversed' exists already"):
        register_style("reversed", Reversed())


def test_a_registered_style(ranks: RankPool) -> None:
    ranks.run(use_own_style, world=2)


def test_what_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="'colwise' exists already"):
        register_style("colwise", Style())
    with pytest.raises(TypeError, match="expects a Style object"):
        register_style("mine", SimpleNamespace())  # type: ignore[arg-type]
    assert "mine" not in STYLES
