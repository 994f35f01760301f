"""Laws of the backend `deep_gemm`, against a stand-in that insists on what the library insists on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ep_kernels import choose_backend, module_experts_forward
from ep_kernels.deep_gemm import PaddedLayout
from ep_kernels.fp8 import quantize

sys.path.insert(0, str(Path(__file__).parent))
from deep_gemm_stand_in import install
from kernels_reference import (
    BOUNDS,
    KINDS,
    Experts,
    as_float64,
    as_on_a_gpu,
    error,
    gradients,
    grouped_reference,
    plain_gradients,
    reference,
)

EXPERTS, HIDDEN, INNER = 4, 64, 128
LEAN = [kind for kind in KINDS if kind != "post norm"]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def new_memory_is_nan() -> Any:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)


def made(kind: str = "gated", dtype: torch.dtype = BF16, **changes: Any) -> Experts:
    return Experts(EXPERTS, HIDDEN, INNER, dtype=dtype, **KINDS[kind], **changes)


def slots_of(*counts: int, rows: int = 150, hidden: int = HIDDEN) -> tuple[Tensor, ...]:
    """Rows and slots grouped by expert, so many for each. The last row has none."""
    row_of_slot = torch.cat([torch.randperm(rows - 1)[:count] for count in counts])
    weights = torch.rand(len(row_of_slot))
    return torch.randn(rows, hidden).to(BF16), row_of_slot, weights, torch.tensor(counts).cumsum(0)


def assert_equal(computed: Any, expected: Any, bound: float = BOUNDS[BF16]) -> None:
    (out, grads), (expected_out, expected_grads) = computed, expected
    assert error(out, expected_out) <= bound
    for name, grad in grads.items():
        assert error(grad, expected_grads[name]) <= 3 * bound, name


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(0, 3), st.integers(1, 130)
)
def test_the_padded_layout(counts: list[int], past: int, alignment: int) -> None:
    """Every slot has a row of its own, among rows of its expert that begin at a multiple."""
    ends = torch.tensor(counts).cumsum(0)
    num_slots = sum(counts) + past
    layout = PaddedLayout.build(ends, num_slots, alignment)
    expert = [e for e, count in enumerate(counts) for _ in range(count)] + [-1] * past
    assert layout.row_of_slot.unique().numel() == num_slots
    assert layout.expert_of_row[layout.row_of_slot].tolist() == expert
    assert layout.slot_of_row[layout.row_of_slot].tolist() == list(range(num_slots))
    assert int((layout.expert_of_row >= 0).sum()) == sum(counts)
    begin = 0
    for e, count in enumerate(counts):
        rows = layout.expert_of_row[begin : begin + count]
        assert (rows == e).all()
        assert begin % alignment == 0
        begin += int(layout.sizes[e])
    assert begin <= len(layout.expert_of_row) <= begin + (len(counts) + past) * alignment + past


def test_the_layout_does_not_wait_for_the_offsets() -> None:
    with FakeTensorMode():  # which has no values to wait for
        layout = PaddedLayout.build(torch.zeros(4, dtype=torch.int32), 9, 128)
    assert layout.expert_of_row.shape == (640,)


@pytest.mark.parametrize("recompute", ["none", "gate_up"])
@pytest.mark.parametrize("kind", LEAN)
def test_equals_reference(kind: str, recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and all gradients, with an expert without slots and one that fills blocks exactly."""
    library = install(monkeypatch)
    experts = made(kind)
    slots = slots_of(128, 0, 131, 1)
    forward = module_experts_forward(experts, recompute=recompute, backend="deep_gemm").grouped
    computed = gradients(forward, experts, *slots)
    assert {"m_grouped_bf16", "k_grouped_bf16"} == set(library.calls)
    assert_equal(computed, plain_gradients(grouped_reference, as_float64(experts), *slots))
    assert computed[1]["down_proj"][1].abs().sum() == 0


@pytest.mark.parametrize("compacts", [True, False])
@pytest.mark.parametrize("kind", ["gated", "biased", "post norm"])
def test_call_form_equals_reference(
    kind: str, compacts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipped slots are left out, or, where the host doesn't know how many there are, in."""
    install(monkeypatch)
    if not compacts:
        as_on_a_gpu(monkeypatch)
    experts = made(kind)
    rows, weights = torch.randn(13, HIDDEN).to(BF16), torch.rand(13, 3)
    ids = torch.randint(0, EXPERTS + 1, (13, 3))
    ids[4] = EXPERTS
    forward = module_experts_forward(experts, backend="deep_gemm")
    computed = gradients(forward, experts, rows, ids, weights)
    assert computed[0][4].abs().sum() == 0
    assert_equal(computed, plain_gradients(reference, as_float64(experts), rows, ids, weights))


@pytest.mark.parametrize("compacts", [True, False])
def test_every_slot_skipped(compacts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    if not compacts:
        as_on_a_gpu(monkeypatch)
    experts, ids = made("biased"), torch.full((5, 2), EXPERTS)
    forward = module_experts_forward(experts, backend="deep_gemm")
    out, grads = gradients(forward, experts, torch.randn(5, HIDDEN).to(BF16), ids, torch.rand(5, 2))
    assert out.abs().sum() == 0
    assert all(grad.abs().sum() == 0 for grad in grads.values())


@pytest.mark.parametrize("alignment", [64, 192])
def test_the_library_tells_its_alignment(alignment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, alignment=alignment)
    experts, slots = made(), slots_of(64, 1, 0, 65)
    forward = module_experts_forward(experts, backend="deep_gemm").grouped
    computed = gradients(forward, experts, *slots)
    assert_equal(computed, plain_gradients(grouped_reference, as_float64(experts), *slots))


def test_without_a_k_grouped_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients come from torch's grouped_mm, and the host waits for nothing."""
    library = install(monkeypatch, without=("k_grouped_bf16_gemm_tn_contiguous",))
    experts, slots = made(), slots_of(3, 0, 7, 1)
    forward = module_experts_forward(experts, backend="deep_gemm").grouped
    computed = gradients(forward, experts, *slots)
    assert set(library.calls) == {"m_grouped_bf16"}
    assert_equal(computed, plain_gradients(grouped_reference, as_float64(experts), *slots))


def test_autocast_and_weights_that_are_not_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 experts under autocast; experts that are every other one of a larger set."""
    install(monkeypatch)
    slots = slots_of(5, 0, 2, 9)
    wide = made(dtype=torch.float32)
    with torch.autocast("cpu", BF16):
        forward = module_experts_forward(wide, backend="deep_gemm").grouped
        computed = gradients(forward, wide, *slots)
    assert computed[1]["down_proj"].dtype is torch.float32
    expected = plain_gradients(grouped_reference, as_float64(wide), *slots)
    assert_equal(computed, expected)
    experts = made()
    for name in ("gate_up_proj", "down_proj"):
        every = torch.stack([getattr(experts, name).data] * 2, dim=2)
        setattr(experts, name, nn.Parameter(every[:, :, 0]))
    assert not experts.down_proj.is_contiguous()
    forward = module_experts_forward(experts, backend="deep_gemm").grouped
    computed = gradients(forward, experts, *slots)
    assert_equal(computed, plain_gradients(grouped_reference, as_float64(experts), *slots))


def test_auto_does_not_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch)
    module_experts_forward(made()).grouped(*slots_of(3, 4, 5, 6))
    assert library.calls == []
    assert choose_backend(torch.device("cpu"), BF16, 64, backend="deep_gemm").backend == "deep_gemm"


@pytest.mark.parametrize(
    ("changes", "setting", "message"),
    [
        ({"dtype": torch.float16}, {}, "multiplies bfloat16, not torch.float16"),
        ({"hidden": 72}, {}, r"multiples of 64: \[72, 72\]"),
        ({}, {"capability": (8, 9)}, r"9.x or 10.x .*, this one has \(8, 9\)"),
        ({}, {"capability": None}, "got cpu"),
        ({}, {"without": ("m_grouped_bf16_gemm_nt_contiguous",)}, "lacks m_grouped_bf16_gemm_nt"),
    ],
    ids=str,
)
def test_what_it_cannot_compute_is_refused(
    changes: Any, setting: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **setting)
    hidden = changes.get("hidden", HIDDEN)
    experts = Experts(EXPERTS, hidden, INNER, dtype=changes.get("dtype", BF16))
    with pytest.raises(ValueError, match=f'backend "deep_gemm" cannot .*{message}.*"auto"'):
        module_experts_forward(experts, backend="deep_gemm").grouped(*slots_of(1, 1, 0, 3, hidden=hidden))  # fmt: skip


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Refused when built, also on the meta device, where the GPU is not known yet."""
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    for experts in (made(), made().to("meta")):
        with pytest.raises(ValueError, match=r"cannot be imported .*install sgl-deep-gemm"):
            module_experts_forward(experts, backend="deep_gemm")
    install(monkeypatch, capability=None)
    module_experts_forward(made().to("meta"), backend="deep_gemm")
    (tmp_path / "deep_gemm.py").write_text("assert None is not None, 'no CUDA toolkit'")
    monkeypatch.delitem(sys.modules, "deep_gemm")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="AssertionError: no CUDA toolkit"):
        module_experts_forward(made(), backend="deep_gemm")


def test_backends_and_experts_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(ValueError, match="backend='deepgemm' is unknown; known are auto, "):
        module_experts_forward(made(), backend="deepgemm")  # type: ignore[arg-type]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match=r"torch\.compile cannot trace deep_gemm"):
        choose_backend(torch.device("cpu"), BF16, 64, backend="deep_gemm")
    with pytest.raises(ValueError, match="Linear does not declare its layout"):
        module_experts_forward(nn.Linear(4, 4), backend="deep_gemm")


class FP8Experts(nn.Module):
    """Experts as a fine-grained FP8 checkpoint has them; its own forward is never used."""

    def __init__(
        self, hidden: int = 256, inner: int = 128, *, gate: bool = True, scale: torch.dtype
    ) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.activation_scheme = gate, False, "dynamic"
        self.num_experts, self.act_fn, self.block_size = EXPERTS, nn.functional.silu, (128, 128)
        self.up = "gate_up_proj" if gate else "up_proj"
        for name, shape in (
            (self.up, (inner * (1 + gate), hidden)),
            ("down_proj", (hidden, inner)),
        ):
            weight = torch.randn(EXPERTS, *shape).to(torch.float8_e4m3fn)
            blocks = torch.rand(EXPERTS, shape[0] // 128, shape[1] // 128).exp2() / shape[1] ** 0.5
            if scale is torch.float8_e8m0fnu:
                blocks = blocks.log2().round().exp2()
            self._add(name, weight)
            self._add(f"{name}_scale_inv", blocks.to(scale))

    def _add(self, name: str, tensor: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def dequantized(self, name: str) -> Tensor:
        scale = getattr(self, f"{name}_scale_inv").double()
        scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        return getattr(self, name).double() * scale


def fp8_reference(
    experts: FP8Experts, rows: Tensor, index: Tensor, weights: Tensor, ends: Tensor, cast: Any
) -> Tensor:
    """In float64, the first projection rounded to bfloat16, with activations `cast`."""
    out, start = torch.zeros_like(rows, dtype=torch.float64), 0
    up, down = (experts.dequantized(name) for name in (experts.up, "down_proj"))
    for e, end in enumerate(ends.tolist()):
        slots = index[start:end]
        pre = (cast(rows[slots]) @ up[e].T).to(BF16)
        hidden = experts._apply_gate(pre) if experts.has_gate else experts.act_fn(pre)
        product = cast(hidden) @ down[e].T * weights[start:end, None].double()
        out.index_add_(0, slots, product)
        start = end
    return out


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(
    ("capability", "scale"),
    [
        ((9, 0), torch.float32),
        ((9, 0), torch.float8_e8m0fnu),
        ((10, 0), torch.float8_e8m0fnu),
    ],
    ids=str,
)
def test_fp8_equals_reference(
    capability: Any, scale: torch.dtype, gate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a bfloat16 rounding where activations are cast alike; to FP8's where they are not cast."""
    library = install(monkeypatch, capability=capability)
    experts = FP8Experts(gate=gate, scale=scale)
    rows, index, weights, ends = slots_of(128, 0, 131, 1, hidden=256)

    def as_fp8(x: Tensor) -> Tensor:
        values, scales = quantize(x.to(BF16), powers_of_two=capability[0] == 10)
        return values.double() * scales.double().repeat_interleave(128, 1)

    forward = module_experts_forward(experts, backend="deep_gemm")
    out = forward.grouped(rows, index, weights, ends)
    assert library.calls == ["m_grouped_fp8"] * 2
    assert out.dtype is BF16
    assert out[-1].abs().sum() == 0
    slots = rows, index, weights, ends
    # A product's rounding to bfloat16 may move an activation by a step of FP8.
    assert error(out, fp8_reference(experts, *slots, as_fp8)) < 1e-2
    assert error(out, fp8_reference(experts, *slots, torch.Tensor.double)) < 5e-2

    ids = torch.randint(0, EXPERTS + 1, (9, 3))
    ids[4] = EXPERTS
    routing = rows[:9], ids, torch.rand(9, 3)
    compact = forward(*routing)
    as_on_a_gpu(monkeypatch)
    torch.testing.assert_close(forward(*routing), compact, rtol=0, atol=0)
    assert compact[4].abs().sum() == 0
    assert forward(*(x[:0] for x in routing)).shape == (0, 256)


def test_quantized_rows_fill_the_range() -> None:
    x = torch.randn(5, 384) * torch.logspace(-30, 30, 5)[:, None]
    x[2] = 0
    for powers_of_two in (False, True):
        values, scales = quantize(x, powers_of_two=powers_of_two)
        restored = values.double() * scales.double().repeat_interleave(128, 1)
        # Half a step of three mantissa bits for normal values, of the smallest step for others.
        step = scales.double().repeat_interleave(128, 1) * 2**-10
        assert ((restored - x.double()).abs() <= x.double().abs() / 16 + step).all()
        assert (values.float().abs() <= 448).all()
        assert (values[2].float() == 0).all()
        if powers_of_two:
            assert (torch.frexp(scales).mantissa == 0.5).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: setattr(e, "activation_scheme", "static"), "fixed scales"),
        (lambda e: setattr(e, "has_bias", True), "has biases"),
        (lambda e: setattr(e, "down_proj_scale_inv", None), "no parameter down_proj_scale_inv"),
        (lambda e: e._add("down_proj_scale_inv", torch.ones(EXPERTS, 1, 1)), r"\(4, 2, 1\), got"),
        (lambda e: e._add("down_proj_scale_inv", torch.ones(EXPERTS, 2, 1)), "powers of two"),
    ],
    ids=["static", "bias", "no scale", "shape", "scale on SM100"],
)  # fmt: skip
def test_fp8_that_it_cannot_compute(
    change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, capability=(10, 0))
    experts = FP8Experts(scale=torch.float8_e8m0fnu)
    change(experts)
    with pytest.raises(ValueError, match=message):
        module_experts_forward(experts, backend="deep_gemm")


def test_fp8_has_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    experts = FP8Experts(scale=torch.float32)
    rows, *slots = slots_of(3, 0, 7, 1, hidden=256)
    forward = module_experts_forward(experts, backend="deep_gemm").grouped
    with pytest.raises(RuntimeError, match=r"no backward.*torch.no_grad"):
        forward(rows.requires_grad_(), *slots)
    with torch.no_grad():
        assert forward(rows, *slots).isfinite().all()
