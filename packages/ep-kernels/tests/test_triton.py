"""Laws of the Triton kernels' neighbourhood, and the kernels themselves in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ep_kernels
from ep_kernels import choose_backend, module_experts_forward, operators

sys.path.insert(0, str(Path(__file__).parent))
from kernels_reference import Experts

KERNELS = Path(__file__).parent / "triton_kernels"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (ep-kernels[triton], about 700 MB): `nox -s triton` runs it",
)


@needs_triton
@pytest.mark.time_limit(600)
@pytest.mark.parametrize(("name", "interpret"), [("interpreted", "1"), ("compiled", "0")])
def test_kernels(name: str, interpret: str) -> None:
    """In a process of their own: triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(KERNELS / f"{name}.py")],
        env=os.environ | {"TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("order", ["ep_kernels, ep_dispatch", "ep_dispatch, ep_kernels"])
def test_operators_in_any_order_without_triton(order: str) -> None:
    if importlib.util.find_spec("ep_dispatch") is None:
        pytest.skip("ep_dispatch, whose operators these are, is not installed")
    program = f"""
import sys, torch
import {order}
for name in ("gather_rows", "sum_rows"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ep::{{name}}", "CUDA"), name
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ep::{{name}}", "Autograd"), name
assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_operators_are_theirs() -> None:
    """What is registered for CUDA gives what the operators give, whatever the shape of a row."""
    rows_of = pytest.importorskip("ep_dispatch.rows")
    index = torch.tensor([2, 0, 2, 3])
    order, ends = torch.tensor([1, 0, 2, 3]), torch.tensor([0, 1, 1, 3, 4])
    for shape in [(), (5,), (2, 3), (0,)]:
        x = torch.randn(4, *shape)
        given = x, index, order, ends
        assert torch.equal(operators.gather_rows(*given), rows_of.gather_rows(*given))
        if len(shape) == 1:
            assert torch.equal(operators.sum_rows(*given), rows_of.sum_rows(*given))
    none = torch.empty(0, dtype=torch.long)
    assert not operators.gather_rows(torch.empty(0, 3), none, none, torch.zeros(1)).numel()
    assert not operators.sum_rows(torch.empty(0, 3), none, none, torch.zeros(1)).numel()


@pytest.mark.parametrize("size", [8, 9])
def test_what_is_wanted_in_vain_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r'backend "triton" cannot compute .* not for cpu'):
        choose_backend(torch.device("cpu"), torch.float32, size, backend="triton")
    with pytest.raises(ValueError, match=r"do not take torch\.float64"):
        choose_backend(torch.device("cuda", 0), torch.float64, size, backend="triton")


def test_a_backend_is_checked_when_it_is_given() -> None:
    with pytest.raises(ValueError, match="'cutlass' is unknown"):
        module_experts_forward(Experts(), backend="cutlass")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear does not declare its layout"):
        module_experts_forward(torch.nn.Linear(2, 2), backend="triton")
    forward = module_experts_forward(Experts(dtype=torch.float32), backend="triton")
    with pytest.raises(ValueError, match="not for cpu"):
        forward(torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))


@pytest.mark.parametrize(
    ("sizes", "triton", "backend"),
    [((8, 16), True, "grouped_mm"), ((8, 15), True, "triton"), ((8, 15), False, "loop")],
)
def test_choice_on_a_gpu(
    sizes: tuple[int, ...], triton: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    refusal = None if triton else "triton is not installed"
    monkeypatch.setattr(ep_kernels.triton_kernels, "refusal", lambda _: refusal)
    device = torch.device("cuda", 0)
    assert choose_backend(device, torch.bfloat16, *sizes).backend == backend
    if triton:
        assert choose_backend(device, torch.float32, *sizes, backend="triton").backend == "triton"
