"""Rotary embeddings as one operator, beside the formula in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ep_kernels import apply_rotary

sys.path.insert(0, str(Path(__file__).parent))
from kernels_reference import rotary_formula

# Each of two products and their sum is rounded; in 16 bit a sum may be smaller than its terms.
BOUNDS = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("shape", "rotated", "batches"),
    [((2, 3, 5, 8), 8, 2), ((3, 2, 4, 10), 6, 1), ((1, 1, 1, 2), 2, 1), ((2, 0, 3, 4), 4, 2)],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True])
def test_formula(
    shape: tuple[int, ...], rotated: int, batches: int, transposed: bool, dtype: torch.dtype
) -> None:
    """The halves of cos and sin differ, so that each must be taken where it belongs."""
    torch.manual_seed(0)
    batch, heads, length, width = shape
    draw = (
        torch.randn(batch, length, heads, width).transpose(1, 2)
        if transposed
        else torch.randn(shape)
    )
    x, grad = draw.to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    cos, sin = (torch.randn(batches, length, rotated).to(dtype) for _ in range(2))
    exact = x.detach().double().requires_grad_()
    expected = rotary_formula(exact, cos.double(), sin.double())
    found = apply_rotary(x, cos, sin)
    assert found.dtype is dtype
    assert found.stride() == x.stride()
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    (found_grad,) = torch.autograd.grad(found, x, grad)
    for mine, theirs in ((found, expected), (found_grad, expected_grad)):
        assert (mine.double() - theirs).norm() <= BOUNDS[dtype] * theirs.norm()


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.ones(2, 3, 8)},
        {"cos": torch.ones(2, 4, 8)},
        {"cos": torch.ones(3, 5, 8), "sin": torch.ones(3, 5, 8)},
        {"cos": torch.ones(2, 5, 7), "sin": torch.ones(2, 5, 7)},
        {"cos": torch.ones(2, 5, 10), "sin": torch.ones(2, 5, 10)},
        {"sin": torch.ones(2, 5, 6)},
        {"sin": torch.ones(2, 5, 8).double()},
    ],
)
def test_wrong_input(change: dict[str, torch.Tensor]) -> None:
    given = {"x": torch.ones(2, 3, 5, 8), "cos": torch.ones(2, 5, 8), "sin": torch.ones(2, 5, 8)}
    with pytest.raises(ValueError, match=r"cos and sin.*got"):
        apply_rotary(**given | change)
