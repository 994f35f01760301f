"""RMS normalization as one operator, beside the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ep_kernels import norm, rms_norm

EPS = 1e-5
# Roundings of the result and of what it is multiplied with; the weight's gradient is rounded once.
BOUNDS = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}


def formula(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def results(function: Any, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = function(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]


@pytest.fixture(autouse=True)
def new_memory_holds_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = Tensor.new_empty

    def filled(self: Tensor, *size: Any, **options: Any) -> Tensor:
        return new_empty(self, *size, **options).fill_(torch.nan)

    monkeypatch.setattr(Tensor, "new_empty", filled)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (0, 8), (2, 3, 4, 6), (1, 1), (9,)], ids=str)
def test_formula(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: Any) -> None:
    """In one block and in several."""
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 1, max(1, shape[0])).view(-1, *[1] * (len(shape) - 1))
    x = (torch.randn(shape) * (sizes if len(shape) > 1 else 1.0)).to(dtype)
    weight, grad = torch.randn(shape[-1]).to(dtype), torch.randn(shape).to(dtype)
    expected = results(formula, x.double(), weight.double(), grad.double())
    for block in (norm._BLOCK, 2 * shape[-1]):
        monkeypatch.setattr(norm, "_BLOCK", block)
        found = results(lambda x, weight: rms_norm(x, weight, EPS), x, weight, grad)
        for mine, exact in zip(found, expected, strict=True):
            assert mine.dtype == dtype
            assert mine.shape == exact.shape
            assert (mine.double() - exact).norm() <= BOUNDS[dtype] * exact.norm()


def test_transposed_input_and_gradient() -> None:
    x, weight = torch.randn(4, 3, 8, dtype=torch.float64).transpose(0, 1), torch.randn(8).double()
    grad = torch.randn(8, 4, 3, dtype=torch.float64).permute(2, 1, 0)
    found = results(lambda x, weight: rms_norm(x, weight, EPS), x, weight, grad)
    torch.testing.assert_close(found, results(formula, x, weight, grad))


def test_frozen_weight_and_frozen_input() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    (rms_norm(x, weight, EPS).sum()).backward()
    assert x.grad is not None
    assert weight.grad is None
    x, weight = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    (rms_norm(x, weight, EPS).sum()).backward()
    assert x.grad is None
    assert weight.grad is not None


def test_saves_the_input_alone() -> None:
    """And one number a row: nothing else of the size of the input."""
    x, weight = torch.randn(16, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rms_norm(x, weight, EPS)
    assert (
        sum(t.numel() for t in saved if t.data_ptr() not in (x.data_ptr(), weight.data_ptr())) == 16
    )


def test_autocast_changes_nothing() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        found = rms_norm(x, weight, EPS)
    assert torch.equal(found, rms_norm(x, weight, EPS))


@pytest.mark.parametrize("weight", [torch.ones(7), torch.ones(8).double(), torch.ones(2, 8)])
def test_wrong_weight(weight: Tensor) -> None:
    with pytest.raises(ValueError, match=r"a vector of 8 torch.float32 on cpu.*got"):
        rms_norm(torch.ones(3, 8), weight, EPS)
