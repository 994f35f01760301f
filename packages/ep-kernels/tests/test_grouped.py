"""Laws of the experts' MLP over slots grouped by expert: what it computes, and what it keeps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ep_kernels import compacted_forward, module_experts_forward
from ep_kernels.rows import kept_slots_by_row

sys.path.insert(0, str(Path(__file__).parent))
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
)

ROWS, EXPERTS, HIDDEN = 13, 4, 16
LEAN = [kind for kind in KINDS if kind != "post norm"]
Slots = tuple[Tensor, Tensor, Tensor, Tensor]


def grouped_slots(
    dtype: torch.dtype, seed: int = 0, *, unused: int | None = None, num_rows: int = ROWS
) -> Slots:
    """Rows and slots: row 0 goes to every expert, row 1 to none; expert `unused` gets none."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    chosen = torch.rand(num_rows, EXPERTS, generator=generator) < 0.5
    chosen[0], chosen[1] = True, False
    if unused is not None:
        chosen[:, unused] = False
    row_of_slot = chosen.T.nonzero()[:, 1].clone()
    weights = torch.rand(row_of_slot.shape[0], generator=generator, dtype=torch.float64)
    weights = weights.to(torch.promote_types(dtype, torch.float32))
    return rows, row_of_slot, weights, chosen.sum(0).cumsum(0).to(torch.int32)


def check(experts: Experts, slots: Slots, bound: float, **options: Any) -> None:
    forward = module_experts_forward(experts, **options).grouped
    out, grads = gradients(forward, experts, *slots)
    expected, expected_grads = plain_gradients(grouped_reference, as_float64(experts), *slots)
    assert out.dtype == slots[0].dtype
    assert error(out, expected) <= bound
    for name, grad in grads.items():
        assert error(grad, expected_grads[name]) <= 3 * bound, name


@pytest.mark.parametrize("gpu", [False, True], ids=["loop", "grouped_mm"])
@pytest.mark.parametrize("recompute", ["none", "gate_up"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_equals_reference(
    kind: str, dtype: torch.dtype, recompute: str, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if gpu:
        as_on_a_gpu(monkeypatch)
    experts = Experts(dtype=dtype, **KINDS[kind])
    for unused in (None, 0, 3):
        check(experts, grouped_slots(dtype, unused=unused), BOUNDS[dtype], recompute=recompute)


@pytest.mark.parametrize("backend", ["grouped_mm", "loop"])
def test_a_backend_can_be_asked_for(backend: str) -> None:
    torch.manual_seed(0)
    slots = grouped_slots(torch.bfloat16, unused=2)
    check(Experts(dtype=torch.bfloat16), slots, BOUNDS[torch.bfloat16], backend=backend)


def test_a_backend_refuses_without_a_slot_too() -> None:
    """As it does on the other ranks, which would wait for this one."""
    forward = module_experts_forward(Experts(dtype=torch.float64), backend="grouped_mm")
    rows, none = torch.randn(ROWS, HIDDEN, dtype=torch.float64), torch.empty(0, dtype=torch.long)
    with pytest.raises(ValueError, match=r"does not take torch\.float64"):
        forward.grouped(rows, none, none.double(), torch.zeros(EXPERTS, dtype=torch.int32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hot", range(EXPERTS))
def test_one_expert_gets_every_slot(kind: str, hot: int) -> None:
    torch.manual_seed(0)
    experts = Experts(**KINDS[kind])
    rows = torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    row_of_slot = torch.arange(ROWS).repeat(2)  # each row twice: the order of its slots is free
    weights = torch.rand(2 * ROWS, dtype=torch.float64)
    offsets = torch.tensor([0] * hot + [2 * ROWS] * (EXPERTS - hot))
    check(experts, (rows, row_of_slot, weights, offsets), 1e-13)


def test_blocks_of_slots_have_no_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    """More slots than the activation takes at once."""
    monkeypatch.setattr("ep_kernels.activation._CPU_BLOCK", 200)
    for kind in LEAN:
        torch.manual_seed(0)
        for recompute in ("none", "gate_up"):
            experts = Experts(**KINDS[kind])
            check(experts, grouped_slots(torch.float64), 1e-13, recompute=recompute)


def test_call_form_computes_the_same() -> None:
    torch.manual_seed(0)
    experts = Experts(has_bias=True)
    rows, row_of_slot, weights, offsets = grouped_slots(torch.float64)
    ids = torch.full((ROWS, EXPERTS), EXPERTS)
    table = torch.zeros(ROWS, EXPERTS, dtype=torch.float64)
    expert = torch.searchsorted(offsets, torch.arange(len(row_of_slot)), right=True)
    ids[row_of_slot, expert], table[row_of_slot, expert] = expert, weights
    forward = module_experts_forward(experts)
    out, grads = gradients(forward, experts, rows, ids, table)
    grouped_out, grouped_grads = gradients(
        forward.grouped, experts, rows, row_of_slot, weights, offsets
    )
    assert error(out, grouped_out) < 1e-15
    grads["weights"] = grads["weights"][row_of_slot, expert]
    for name, grad in grads.items():
        assert error(grad, grouped_grads[name]) < 1e-14, name


def test_a_foreign_forward_takes_grouped_slots() -> None:
    torch.manual_seed(0)
    experts = Experts(has_bias=True)
    slots = grouped_slots(torch.float64, unused=2)
    foreign = compacted_forward(experts.forward, EXPERTS, experts)
    out, grads = gradients(foreign.grouped, experts, *slots)
    expected, expected_grads = gradients(module_experts_forward(experts).grouped, experts, *slots)
    assert error(out, expected) < 1e-14
    for name, grad in grads.items():
        assert error(grad, expected_grads[name]) < 1e-13, name


@pytest.mark.parametrize(
    "make", [module_experts_forward, lambda e: compacted_forward(e, EXPERTS, e)]
)
@pytest.mark.parametrize("num_rows", [0, 5])
def test_no_slot_gives_zeros(make: Any, num_rows: int) -> None:
    experts = Experts(has_bias=True, dtype=torch.float32)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.fill_(float("nan"))
    rows, none = torch.randn(num_rows, HIDDEN), torch.zeros(0, dtype=torch.long)
    offsets = torch.zeros(EXPERTS, dtype=torch.int32)
    out, grads = gradients(make(experts).grouped, experts, rows, none, torch.zeros(0), offsets)
    assert out.shape == rows.shape
    assert out.eq(0).all()
    for name, grad in grads.items():
        assert grad.eq(0).all(), name


@pytest.mark.parametrize("gpu", [False, True], ids=["loop", "grouped_mm"])
@pytest.mark.parametrize("kind", LEAN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_no_slot_uses_is_never_read(
    kind: str, dtype: torch.dtype, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of an idle expert, a row without slots and new memory are full of NaN."""
    torch.manual_seed(0)
    if gpu:
        as_on_a_gpu(monkeypatch)
    experts = Experts(dtype=dtype, **KINDS[kind])
    slots = grouped_slots(dtype, unused=2)
    check(experts, slots, BOUNDS[dtype])
    expected, expected_grads = gradients(module_experts_forward(experts).grouped, experts, *slots)
    with torch.no_grad():
        slots[0][1] = float("nan")
        for parameter in experts.parameters():
            parameter[2] = float("nan")
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        for recompute in ("none", "gate_up"):
            forward = module_experts_forward(experts, recompute=recompute).grouped
            out, grads = gradients(forward, experts, *slots)
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
            for name, grad in grads.items():
                torch.testing.assert_close(grad, expected_grads[name], rtol=0, atol=0, msg=name)
                if name not in ("rows", "weights"):
                    assert grad[2].eq(0).all(), name
    finally:
        torch.use_deterministic_algorithms(deterministic)


def saved_bytes(experts: nn.Module, out_of: Any, slots: Slots) -> tuple[int, Tensor]:
    """The bytes of what is kept for backward, without parameters; each memory counted once."""
    known = {p.untyped_storage().data_ptr() for p in experts.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows, row_of_slot, weights, offsets = slots
    rows, weights = rows.detach().requires_grad_(), weights.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = out_of(rows, row_of_slot, weights, offsets)
    return sum(kept.values()), out


@pytest.mark.parametrize("kind", LEAN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", ["none", "gate_up"])
@pytest.mark.parametrize("autocast", [False, True])
def test_bytes_kept_for_backward(
    kind: str, dtype: torch.dtype, recompute: Any, autocast: bool
) -> None:
    experts = Experts(dtype=dtype, **KINDS[kind])
    slots = rows, row_of_slot, weights, offsets = grouped_slots(dtype)
    forward = module_experts_forward(experts, recompute=recompute).grouped
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        kept, out = saved_bytes(experts, forward, slots)
    assert out.requires_grad
    pre = (
        row_of_slot.numel() * getattr(experts, experts.up).shape[2 if experts.is_transposed else 1]
    )
    products = torch.bfloat16 if autocast and dtype is not torch.float64 else dtype
    indices = 2 * row_of_slot.nbytes + ROWS * row_of_slot.itemsize + offsets.nbytes
    expected = rows.nbytes + weights.nbytes + indices
    assert kept == expected + (pre * products.itemsize if recompute == "none" else 0)


def test_without_gradients_nothing_is_kept() -> None:
    experts, slots = Experts(dtype=torch.float32), grouped_slots(torch.float32)
    with torch.no_grad():
        kept, out = saved_bytes(experts, module_experts_forward(experts).grouped, slots)
    assert kept == 0
    assert not out.requires_grad


def test_frozen_first_weight_keeps_no_rows() -> None:
    experts, slots = Experts(dtype=torch.float32), grouped_slots(torch.float32)
    every, _ = saved_bytes(experts, module_experts_forward(experts).grouped, slots)
    experts.gate_up_proj.requires_grad_(False)
    fewer, _ = saved_bytes(experts, module_experts_forward(experts).grouped, slots)
    assert every - fewer == slots[0].nbytes


@pytest.mark.parametrize("kind", ["biased", "gpt-oss"])
@pytest.mark.parametrize("recompute", ["none", "gate_up"])
def test_one_wanted_gradient_is_the_same_as_among_all(kind: str, recompute: Any) -> None:
    torch.manual_seed(0)
    experts = Experts(**KINDS[kind])
    forward = module_experts_forward(experts, recompute=recompute).grouped
    rows, row_of_slot, weights, offsets = grouped_slots(torch.float64)
    leaves = {"rows": rows, "weights": weights, **dict(experts.named_parameters())}
    _, expected = gradients(forward, experts, rows, row_of_slot, weights, offsets)
    cotangent = torch.linspace(-1, 1, rows.numel(), dtype=torch.float64).reshape(rows.shape)
    for name, wanted in leaves.items():
        for leaf in leaves.values():
            leaf.requires_grad_(leaf is wanted)
        out = forward(rows, row_of_slot, weights, offsets)
        (grad,) = torch.autograd.grad(out, wanted, cotangent)
        assert error(grad, expected[name]) < 1e-15, name


@pytest.mark.parametrize("recompute", ["none", "gate_up"])
@pytest.mark.parametrize("kind", LEAN)
def test_backward_twice_gives_the_same(kind: str, recompute: Any) -> None:
    experts = Experts(**KINDS[kind])
    rows, row_of_slot, weights, offsets = grouped_slots(torch.float64)
    leaves = [rows.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    forward = module_experts_forward(experts, recompute=recompute).grouped
    out = forward(rows, row_of_slot, weights, offsets).sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(out, leaves), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recompute", ["none", "gate_up"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(recompute: Any, reentrant: bool) -> None:
    experts, slots = Experts(dtype=torch.float32), grouped_slots(torch.float32)
    forward = module_experts_forward(experts, recompute=recompute).grouped

    def checkpointed(*args: Tensor) -> Any:
        return checkpoint(forward, *args, use_reentrant=reentrant)

    _, expected = gradients(forward, experts, *slots)
    _, grads = gradients(checkpointed, experts, *slots)
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name


def test_a_second_derivative_is_refused() -> None:
    experts = Experts()
    rows, *rest = grouped_slots(torch.float64)
    out = module_experts_forward(experts).grouped(rows.requires_grad_(), *rest)
    (grad,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_sums_over_slots_keep_float32() -> None:
    """512 equal slots: summed in bfloat16, forward or backward, they stop growing at 256."""
    experts = Experts(512, intermediate=8, dtype=torch.bfloat16, has_bias=True)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    slots = (
        torch.randn(1, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(512, dtype=torch.long),
        torch.ones(512),
        torch.arange(1, 513, dtype=torch.int32),
    )
    check(experts, slots, 2e-2)


def test_sums_over_an_experts_slots_keep_float32() -> None:
    experts = Experts(1, dtype=torch.bfloat16, has_bias=True)
    rows = torch.randn(1, HIDDEN, dtype=torch.bfloat16)
    index, offsets = torch.zeros(2000, dtype=torch.long), torch.tensor([2000])
    check(experts, (rows, index, torch.ones(2000), offsets), 2e-2)


@pytest.mark.parametrize("kind", LEAN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_weights_are_not_rounded(kind: str, dtype: torch.dtype) -> None:
    """The router is trained by small differences of them."""
    torch.manual_seed(0)
    experts = Experts(dtype=dtype, **KINDS[kind])
    _, grads = gradients(module_experts_forward(experts).grouped, experts, *grouped_slots(dtype))
    found = grads["weights"]
    assert found.ne(found.to(dtype)).float().mean() > 0.9


def test_parameters_of_an_activation_get_their_gradients() -> None:
    torch.manual_seed(0)
    experts = Experts()
    experts.act_fn = nn.PReLU(dtype=torch.float64)
    slots = grouped_slots(torch.float64)
    _, grads = gradients(module_experts_forward(experts).grouped, experts, *slots)
    _, expected = gradients(lambda *s: grouped_reference(experts, *s), experts, *slots)
    assert error(grads["act_fn.weight"], expected["act_fn.weight"]) < 1e-13


@pytest.mark.parametrize("kind", LEAN)
@pytest.mark.parametrize("recompute", ["none", "gate_up"])
def test_the_host_waits_for_nothing(
    kind: str, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors have no values: reading one raises."""
    as_on_a_gpu(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=False):
        experts = Experts(dtype=torch.bfloat16, **KINDS[kind])
        rows = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16)
        offsets, index = torch.empty(EXPERTS, dtype=torch.int32), torch.empty(20, dtype=torch.long)
        forward = module_experts_forward(experts, recompute=recompute).grouped
        out, grads = gradients(forward, experts, rows, index, torch.rand(20), offsets)
        assert out.shape == rows.shape
        assert {"rows", "weights"} < set(grads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(5)}, "expected rows"),
        ({1: torch.zeros(3, 1, dtype=torch.long)}, "row_of_slot .S."),
        ({1: torch.zeros(3, dtype=torch.int32)}, "must be int64"),
        ({2: torch.zeros(2)}, "weights .S."),
        ({3: torch.tensor([1, 2, 3])}, "offsets .4."),
        ({3: torch.tensor([1.0, 2, 3, 3])}, "int32 or int64"),
        ({3: torch.tensor([0, 1, 2, 2])}, "number of slots, 3"),
        ({3: torch.tensor([0, 2, 1, 3])}, "must not fall"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[int, Tensor], message: str) -> None:
    given = [
        torch.zeros(5, HIDDEN),
        torch.zeros(3, dtype=torch.long),
        torch.zeros(3),
        torch.tensor([1, 2, 3, 3]),
    ]
    for place, tensor in change.items():
        given[place] = tensor
    with pytest.raises(ValueError, match=message):
        module_experts_forward(Experts(dtype=torch.float32)).grouped(*given)


def test_an_unknown_recompute_is_refused() -> None:
    with pytest.raises(ValueError, match="'all' is unknown; known are none, gate_up"):
        module_experts_forward(Experts(), recompute="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gated", "post norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_is_the_same(kind: str, dtype: torch.dtype) -> None:
    """In bfloat16 as one graph; in others the compiler does not know grouped_mm."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    experts, slots = Experts(dtype=dtype, **KINDS[kind]), grouped_slots(dtype)
    forward = module_experts_forward(experts).grouped

    def call(*args: Tensor) -> Tensor:
        return forward(*args)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=dtype is torch.bfloat16)
    out, grads = gradients(compiled, experts, *slots)
    expected, expected_grads = gradients(forward, experts, *slots)
    assert error(out, expected) <= BOUNDS[dtype]
    for name, grad in grads.items():
        assert error(grad, expected_grads[name]) <= 3 * BOUNDS[dtype], name


def test_compiled_once_for_all_sizes() -> None:
    """One graph for the first number of rows and slots, one for any other."""
    experts = Experts(dtype=torch.bfloat16)
    forward, graphs = module_experts_forward(experts).grouped, []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    for num_rows in (5, 9, 17, 2, 40):
        slots = grouped_slots(torch.bfloat16, num_rows=num_rows)
        out, _ = gradients(compiled, experts, *slots)
        expected, _ = gradients(forward, experts, *slots)
        assert error(out, expected) <= BOUNDS[torch.bfloat16]
    assert len(graphs) == 2


def test_slots_by_row_are_kept_until_the_index_changes() -> None:
    index = torch.tensor([2, 0, 2])
    first = kept_slots_by_row(index, 3)
    assert kept_slots_by_row(index, 3) is first
    assert kept_slots_by_row(index, 4)[1].tolist() == [0, 1, 1, 3]
    index[1] = 1
    assert [part.tolist() for part in kept_slots_by_row(index, 3)] == [[1, 0, 2], [0, 0, 1]]
    with torch.inference_mode():
        index = torch.tensor([1, 0])
        assert kept_slots_by_row(index, 2)[0].tolist() == [1, 0]
        index.zero_()
        assert kept_slots_by_row(index, 2)[0].tolist() == [0, 1]
