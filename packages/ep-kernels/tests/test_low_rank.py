"""Low-rank terms: experts with them equal experts whose weights hold the products."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ep_kernels import LowRank, module_experts_forward, takes_low_rank, with_low_rank

sys.path.insert(0, str(Path(__file__).parent))
from kernels_reference import BOUNDS, KINDS, Experts, as_float64, as_on_a_gpu, error, reference

SCALE = 0.7


def factors_of(experts: Experts, rank: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    made = {}
    for name in (experts.up, "down_proj"):
        number, first, second = getattr(experts, name).shape
        made[name] = (
            torch.randn(number, first, rank, dtype=torch.float64).to(dtype).requires_grad_(),
            (torch.randn(number, rank, second, dtype=torch.float64) / 4).to(dtype).requires_grad_(),
        )
    return made


def check(
    experts: Experts, ids: Tensor, rank: int, *, dtype: torch.dtype, factors_dtype: torch.dtype
) -> None:
    """The output, and the gradients of factors, rows and routing weights; weights are frozen."""
    rows = torch.randn(ids.shape[0], experts.hidden, dtype=torch.float64).to(dtype)
    weights = torch.rand(ids.shape, dtype=torch.float64).to(
        torch.promote_types(dtype, torch.float32)
    )
    factors = factors_of(experts, rank, factors_dtype)
    twin = as_float64(experts)
    twins = {n: [f.detach().double().requires_grad_() for f in pair] for n, pair in factors.items()}
    experts.requires_grad_(False)
    run = module_experts_forward(experts)
    cotangent = torch.linspace(-1, 1, rows.numel(), dtype=torch.float64).view_as(rows)

    inputs = [x.detach().requires_grad_() for x in (rows, weights)]
    with with_low_rank(experts, {n: LowRank(*pair, SCALE) for n, pair in factors.items()}):
        out = run(inputs[0], ids, inputs[1])
    out.backward(cotangent.to(dtype))

    plain = [x.detach().double().requires_grad_() for x in (rows, weights)]
    for name, (left, right) in twins.items():
        whole = getattr(twin, name).detach() + SCALE * left @ right
        del twin._parameters[name]
        setattr(twin, name, whole)
    expected = reference(twin, plain[0], ids, plain[1])
    nothing = sum((f * 0).sum() for pair in twins.values() for f in pair)
    (expected + nothing + 0 * (plain[0].sum() + plain[1].sum())).backward(cotangent)

    bound = BOUNDS[dtype] * 4  # two more products in a row than without terms
    assert error(out, expected) <= bound
    found = [f for pair in factors.values() for f in pair] + inputs
    right_ones = [f for pair in twins.values() for f in pair] + plain
    for at, (tensor, twin_tensor) in enumerate(zip(found, right_ones, strict=True)):
        assert tensor.grad is not None, at
        assert error(tensor.grad, twin_tensor.grad) <= 3 * bound, at  # type: ignore[arg-type]
    assert all(p.grad is None for p in experts.parameters())


ROUTINGS = {
    "skewed": torch.tensor([[0, 4], [0, 1], [0, 4], [0, 3], [0, 1], [4, 4], [3, 0]]),
    "nothing": torch.full((3, 2), 4),
    "no rows": torch.zeros(0, 2, dtype=torch.int64),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_equals_whole_matrices(kind: str, ids: Tensor) -> None:
    torch.manual_seed(0)
    check(Experts(**KINDS[kind]), ids, 3, dtype=torch.float64, factors_dtype=torch.float64)


@pytest.mark.parametrize("rank", [3, 8], ids=["loop beside grouped_mm", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_rows_past_the_last_offset_hold_anything(
    monkeypatch: pytest.MonkeyPatch, rank: int, dtype: torch.dtype, ids: Tensor
) -> None:
    """As on a GPU: skipped slots stay in, and grouped_mm leaves their results as the memory was."""
    torch.manual_seed(0)
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with torch.random.fork_rng():
        torch.use_deterministic_algorithms(True)
        try:
            check(Experts(dtype=dtype), ids, rank, dtype=dtype, factors_dtype=torch.float32)
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_term_that_nothing_would_add_is_refused() -> None:
    experts = Experts()
    term = LowRank(torch.zeros(4, 16, 2), torch.zeros(4, 2, 24), 1.0)
    with (
        pytest.raises(ValueError, match="adds no low-rank term to down_proj"),
        with_low_rank(experts, {"down_proj": term}),
    ):
        pass
    module_experts_forward(experts)
    assert takes_low_rank(experts, "down_proj")
    assert not takes_low_rank(experts, "router")
    with pytest.raises(ValueError, match="router"), with_low_rank(experts, {"router": term}):
        pass
    assert not takes_low_rank(nn.Linear(2, 2), "weight")
