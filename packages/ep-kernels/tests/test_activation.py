"""Laws of activations that can't simply be computed again in backward: they draw, or they write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ep_kernels
from ep_kernels import ExpertsSpec, module_experts_forward
from ep_kernels.activation import try_activation
from ep_kernels.mlp import Recompute

sys.path.insert(0, str(Path(__file__).parent))
from kernels_reference import Experts, as_on_a_gpu, error, gradients

RECOMPUTE = get_args(Recompute)
Function = Callable[[Tensor], Tensor]


def some_rows() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(13, 16, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 5, (13, 3), generator=generator)
    return rows, ids, torch.rand(13, 3, generator=generator, dtype=torch.float64)


def experts_with(*, gate: Function | None = None, act_fn: Function | None = None) -> Experts:
    """Experts with a gate or, without one, an activation of their own."""
    torch.manual_seed(1)
    experts = Experts(has_gate=gate is not None)
    if gate is not None:
        experts._apply_gate = gate
    else:
        experts.act_fn = act_fn
    return experts


def dropout_gate(x: Tensor) -> Tensor:
    return functional.dropout(x[..., : x.shape[-1] // 2], 0.5)


def noise(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("checkpoint", [None, True, False], ids=["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("how", ["dropout gate", "nn.Dropout", "nn.Dropout in place", "noise"])
def test_backward_sees_what_forward_drew(
    how: str, checkpoint: bool | None, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a fixed mask the output is linear in each factor x, so <x, dy/dx> = y."""
    monkeypatch.setattr(ep_kernels.activation, "_CPU_BLOCK", 200)
    experts = {
        "dropout gate": lambda: experts_with(gate=dropout_gate),
        "nn.Dropout": lambda: experts_with(act_fn=nn.Dropout(0.5)),
        "nn.Dropout in place": lambda: experts_with(act_fn=nn.Dropout(0.5, inplace=True)),
        "noise": lambda: experts_with(act_fn=noise),
    }[how]()
    forward = module_experts_forward(experts, recompute=recompute)
    rows, ids, weights = some_rows()
    factors = [rows.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    if checkpoint is None:
        y = forward(rows, ids, weights).sum()
    else:
        y = torch.utils.checkpoint.checkpoint(
            forward, rows, ids, weights, use_reentrant=checkpoint
        ).sum()
    y.backward()
    for factor in factors:
        assert factor.grad is not None
        torch.testing.assert_close((factor * factor.grad).sum(), y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "draw",
    [
        dropout_gate,
        noise,
        nn.Dropout(0.5),
        nn.RReLU(),
        nn.AlphaDropout(),
        lambda x: x + torch.randn(x.shape, generator=torch.Generator()),
        torch.compile(dropout_gate, backend="eager"),
    ],
)
def test_the_trial_finds_what_draws_and_draws_nothing(draw: Function) -> None:
    spec = ExpertsSpec(gate=draw)
    before = torch.get_rng_state()
    assert try_activation(spec, torch.zeros(1), 8).draws
    assert torch.equal(torch.get_rng_state(), before)


def test_the_trial_follows_the_training_mode() -> None:
    dropout = nn.Dropout(0.5)
    spec = ExpertsSpec(gated=False, activation=dropout)
    for mode in (False, True, False):
        dropout.train(mode)
        assert try_activation(spec, torch.zeros(1), 8).draws == mode


def test_a_compiled_activation_stays_compiled() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Function:
        compiled.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    gelu = torch.compile(lambda x: 2 * functional.gelu(x), backend=backend)
    rows, ids, weights = some_rows()
    module_experts_forward(experts_with(act_fn=gelu))(rows, ids, weights)
    assert compiled


def gate_out_of_place(x: Tensor) -> Tensor:
    gate, up = x[..., ::2], x[..., 1::2]
    return gate.clamp(max=0.5).sigmoid() * (up + 1)


def gate_in_place(x: Tensor) -> Tensor:
    gate, up = x[..., ::2], x[..., 1::2]
    gate.clamp_(max=0.5)
    up.add_(1)
    return gate.sigmoid() * up


TWINS: dict[str, tuple[Function, Function]] = {
    "relu": (nn.ReLU(inplace=True), nn.ReLU()),
    "silu": (nn.SiLU(inplace=True), nn.SiLU()),
    "own": (lambda x: x.mul_(2).tanh_(), lambda x: (2 * x).tanh()),
}


def twins(name: str, kind: str) -> list[Experts]:
    """Experts that work in place, and the same that do not."""
    made = []
    for function in TWINS[name]:
        torch.manual_seed(1)
        made.append(Experts(has_gate=kind == "gated", has_bias=True))
        made[-1].act_fn = function
    return made


def own_gates() -> list[Experts]:
    """As `twins`, with a gate of their own."""
    return [experts_with(gate=gate) for gate in (gate_in_place, gate_out_of_place)]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("way", ["fused", "plain"])
@pytest.mark.parametrize("case", [*((n, k) for n in TWINS for k in ("gated", "ungated")), None])
def test_in_place_equals_out_of_place(
    case: tuple[str, str] | None, way: str, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "plain":
        as_on_a_gpu(monkeypatch)
    results = []
    for experts in own_gates() if case is None else twins(*case):
        forward = module_experts_forward(experts, recompute=recompute)
        results.append(gradients(forward, experts, *some_rows()))
    (out, grads), (expected, expected_grads) = results
    assert error(out, expected) <= 1e-14
    for name, grad in grads.items():
        assert error(grad, expected_grads[name]) <= 1e-14, name


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("case", [*((n, k) for n in TWINS for k in ("gated", "ungated")), None])
def test_backward_twice_in_place(case: tuple[str, str] | None, recompute: Recompute) -> None:
    """What is saved is not written to: the second backward finds what the first one did."""
    experts = (own_gates() if case is None else twins(*case))[0]
    rows, ids, weights = some_rows()
    leaves = [rows.requires_grad_(), *experts.parameters()]
    out = module_experts_forward(experts, recompute=recompute)(rows, ids, weights).sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(out, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_in_place_under_compile(name: str) -> None:
    torch.compiler.reset()
    experts, twin = twins(name, "gated")
    compiled = torch.compile(module_experts_forward(experts), backend="aot_eager")
    out, grads = gradients(compiled, experts, *some_rows())
    expected, expected_grads = gradients(module_experts_forward(twin), twin, *some_rows())
    assert error(out, expected) <= 1e-13
    for key, grad in grads.items():
        assert error(grad, expected_grads[key]) <= 3e-13, key
