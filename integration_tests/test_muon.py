"""Muon in any layout is Muon of one process on each expert's matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import all_float64
from numerics import LAYOUTS, backward, batches, build, errors, name, parameters, sharded, world_of
from torch import Tensor, nn

from ep_testing import RankPool
from ep_trainer import Muon, muon
from ep_trainer.muon import hidden_matrices

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": torch.float64}
HSDP = {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2, "tp_size": 1}


def by_singular_values(matrix: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ vh


def plain_steps(model: nn.Module) -> None:
    """Muon and AdamW written out, of one process, a matrix at a time."""
    matrices = set(hidden_matrices(model))
    others = [p for at, p in model.named_parameters() if at not in matrices]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.ndim > 1]},
            {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.02,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    momentum = {at: torch.zeros_like(model.get_parameter(at)) for at in matrices}
    for step in range(STEPS):
        for ids in batches(step):
            backward(model, ids, 0.5)
        adam.step()
        for at in matrices:
            p = model.get_parameter(at)
            momentum[at].mul_(0.95).add_(p.grad, alpha=0.05)
            update = 0.05 * p.grad + 0.95 * momentum[at]
            stack = update.unsqueeze(0) if p.ndim == 2 else update
            moved = torch.stack([by_singular_values(matrix) for matrix in stack]).view_as(p)
            with torch.no_grad():
                p.mul_(1 - 0.02 * 0.1).sub_(0.02 * 0.2 * max(p.shape[-2:]) ** 0.5 * moved)
        model.zero_grad()


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    with all_float64():
        model = build()
        plain_steps(model)
    return parameters(model)


def on_rank(rank: int, sizes: dict[str, Any], expected: dict[str, Tensor]) -> tuple[Any, ...]:
    """Errors after some steps, and how many matrices of the model this rank orthogonalized."""
    with all_float64():
        model = sharded(sizes)
        matrices = hidden_matrices(model)
        optimizer = Muon(model, **OPTIONS)
        count, run = 0, muon.orthogonalize

        def counted(stack: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            nonlocal count
            count += stack.shape[0] if stack.ndim == 3 else 1
            return run(stack, *args, **kwargs)

        muon.orthogonalize = counted
        try:
            for step in range(STEPS):
                backward(model, batches(step))
                optimizer.step()
                optimizer.zero_grad()
        finally:
            muon.orthogonalize = run
    for parameter, state in optimizer.state.items():
        for kind, tensor in state.items():
            if kind != "step":
                assert tensor.shape == parameter.shape
                assert tensor.dtype == parameter.dtype
                assert getattr(tensor, "placements", None) == getattr(parameter, "placements", None)
    shapes = [model.get_parameter(at).shape for at in matrices]
    return (
        errors(model, expected),
        count,
        STEPS * sum(shape[0] if len(shape) == 3 else 1 for shape in shapes),
    )


@pytest.mark.parametrize("sizes", [*LAYOUTS, HSDP], ids=name)
def test_any_layout_steps_as_one_process_and_no_work_is_repeated(
    ranks: RankPool, sizes: dict[str, Any], expected: dict[str, Tensor]
) -> None:
    found = ranks.run(on_rank, sizes, expected, world=world_of(sizes))
    for worst, _, _ in found:
        # The iteration makes small singular values, and the errors along them, 500 times larger.
        wrong = {at: error for at, error in worst.items() if not error < 1e-9}
        assert not wrong, wrong
    assert sum(count for _, count, _ in found) == found[0][2], "each matrix once"
    assert len(hidden_matrices(build())) == 12, "of two layers: q, k, v, o and the experts' two"
