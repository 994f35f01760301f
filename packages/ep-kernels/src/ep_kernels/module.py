"""A module's experts as a function of routed rows: the shape in which a dispatcher calls them.

Shape letters: H hidden size, E experts held here, R rows, J slots of a row, S valid slots of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn

from .deep_gemm import place_refusal
from .experts import experts_forward
from .fp8 import FP8Spec, fp8_mlp, fp8_refusal, holds_fp8
from .grouped import BackendRequest, check_backend, expert_of_slot
from .local import local_parameters, touch
from .low_rank import let_take_low_rank, low_rank_of
from .mlp import Recompute, choose_way, experts_mlp
from .rows import sum_rows, take_rows
from .spec import ExpertsSpec, ExpertsWeights, why_not

ModuleForward = Callable[[Tensor, Tensor, Tensor], Tensor]

# Without gradients, so few slots are computed with the skipped ones left in: waiting for the host
# to learn how many are valid would cost more than the memory that it saves (decoding).
_FEW_SLOTS = 1 << 14


class RoutedExperts(Protocol):
    """Experts that take routed rows, in either of two forms.

    Both give, for every row, the sum over its slots of weight times expert output: [R, H] of the
    dtype of the rows, accumulated, as is its gradient, in float32 or wider. Parameters are read at
    each call, so FSDP2 may swap them; each one gets a gradient, zero if no row came.
    """

    def __call__(self, rows: Tensor, local_expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Of rows [R, H], ids [R, J] (int64) and weights [R, J].

        An id equal to E skips the slot: it contributes exactly zero and gets exactly zero gradient.
        Costs one host synchronization, to leave skipped slots out of memory; none for few slots
        without gradients, while a CUDA graph is captured, and for J == 1.
        """

    def grouped(
        self, rows: Tensor, row_of_slot: Tensor, weights: Tensor, offsets: Tensor
    ) -> Tensor:
        """Of rows [R, H] and their slots, grouped by expert.

        Args:
            rows: [R, H]. One row may have any number of slots; a row without has the output zero.
            row_of_slot: [S] int64.
            weights: [S].
            offsets: [E], int32 or int64: the end of each expert's slots. The last one is S.

        Costs no host synchronization, except by the backend `loop` on a GPU and by `deep_gemm` in
        backward (one each).
        """


def module_experts_forward(
    experts: nn.Module, *, recompute: Recompute = "none", backend: BackendRequest = "auto"
) -> RoutedExperts:
    """The experts of a module as a function of routed rows.

    Call it before the module's `forward` is replaced: for a module that `ExpertsSpec.from_module`
    does not understand, the `forward` it has now is wrapped (`compacted_forward`).

    Args:
        experts: the module.
        recompute: "gate_up" keeps nothing for backward but what was received: the first projection
            is computed again there, for gated experts two ninths more to multiply.
        backend: who computes the products. "auto" is what `choose_backend` finds best at each call,
            and a module's own forward for one that is not understood. What any other backend can't
            compute is an error. "deep_gemm" also takes experts stored in FP8 (float8_e4m3fn, with
            a `_scale_inv` per 128 x 128 weights), for inference: there is no backward for them.

    Saves for backward what `experts_mlp` does. Plain autograd, which saves each intermediate result
    and does not recompute, is the way of: experts with a norm after them, activations with
    parameters of their own or that draw random numbers (dropout), low-rank terms (`with_low_rank`),
    torch.compile, and calls where the host does not know how many slots are valid. A module's own
    forward saves what it will.

    Raises:
        ValueError: an unknown `recompute` or `backend`; a backend that can't compute these experts
            or run here. What a call adds to that (dtypes, torch.compile) is told by the call.
    """
    if recompute not in get_args(Recompute):
        raise ValueError(
            f"recompute={recompute!r} is unknown; known are {', '.join(get_args(Recompute))}."
        )
    device = next((parameter.device for parameter in experts.parameters()), None)
    check_backend(backend, device)
    if backend == "deep_gemm" and holds_fp8(experts):
        return _FP8Experts(experts)
    spec = ExpertsSpec.from_module(experts)
    if spec is not None:
        return _ModuleExperts(experts, spec, recompute, backend)
    if backend != "auto":
        raise ValueError(
            f'the backend "{backend}" is for experts that are understood; {why_not(experts)}. "auto", '
            "the default, calls their own forward."
        )
    return compacted_forward(experts.forward, lambda: _num_experts(experts), experts)


class _ModuleExperts:
    """Experts that are understood, computed by what is in this package."""

    def __init__(
        self,
        experts: nn.Module,
        spec: ExpertsSpec,
        recompute: Recompute,
        backend: BackendRequest,
    ) -> None:
        self._experts, self._spec, self._recompute = experts, spec, recompute
        self._backend: BackendRequest = backend
        let_take_low_rank(experts, spec)

    def __call__(self, rows: Tensor, local_expert_ids: Tensor, weights: Tensor) -> Tensor:
        parameters = self._spec.read_weights(self._experts)
        slots = sorted_slots(rows, local_expert_ids, weights, parameters.num_experts)
        compute = self._plain if slots.num_used is None else self._compute
        return compute(parameters, rows, *slots)

    def grouped(
        self, rows: Tensor, row_of_slot: Tensor, weights: Tensor, offsets: Tensor
    ) -> Tensor:
        parameters = self._spec.read_weights(self._experts)
        check_slots(rows, row_of_slot, weights, offsets, parameters.num_experts)
        num_used = row_of_slot.shape[0]
        return self._compute(parameters, rows, row_of_slot, weights, offsets, num_used)

    def _compute(
        self,
        parameters: ExpertsWeights,
        rows: Tensor,
        row_of_slot: Tensor,
        weights: Tensor,
        offsets: Tensor,
        num_used: int | None,
    ) -> Tensor:
        way = choose_way(self._spec, parameters, row_of_slot.shape[0])
        if way.plain or low_rank_of(self._experts, self._spec) is not None:
            return self._plain(parameters, rows, row_of_slot, weights, offsets, num_used)
        return experts_mlp(
            self._spec,
            parameters,
            rows,
            row_of_slot,
            weights,
            offsets,
            self._recompute,
            way.copies,
            self._backend,
        )

    def _plain(
        self,
        parameters: ExpertsWeights,
        rows: Tensor,
        row_of_slot: Tensor,
        weights: Tensor,
        offsets: Tensor,
        num_used: int | None,
    ) -> Tensor:
        taken = take_rows(rows, row_of_slot)
        out = experts_forward(
            self._spec,
            parameters,
            taken,
            offsets,
            weights,
            num_used=num_used,
            backend=self._backend,
            low_rank=low_rank_of(self._experts, self._spec),
        )
        if num_used == 0:  # a norm's parameters get their gradients too
            with local_parameters(self._experts):
                out = touch(out, *self._experts.parameters())
        return sum_rows(out, row_of_slot, rows.shape[0], rows.dtype)


class _FP8Experts:
    """Experts stored in FP8, computed by DeepGEMM."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts, self._spec = experts, FP8Spec.from_module(experts)
        if refusal := fp8_refusal(self._spec, experts):
            raise ValueError(_refused_fp8(refusal))

    def __call__(self, rows: Tensor, local_expert_ids: Tensor, weights: Tensor) -> Tensor:
        num_experts = self._spec.read_weights(self._experts).up.shape[0]
        row_of_slot, weights, offsets, _ = sorted_slots(
            rows, local_expert_ids, weights, num_experts
        )
        return self.grouped(rows, row_of_slot, weights, offsets)

    def grouped(
        self, rows: Tensor, row_of_slot: Tensor, weights: Tensor, offsets: Tensor
    ) -> Tensor:
        parameters = self._spec.read_weights(self._experts)
        check_slots(rows, row_of_slot, weights, offsets, parameters.up.shape[0])
        if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
            raise RuntimeError(
                "experts stored in FP8 have no backward; call them under torch.no_grad() or "
                "torch.inference_mode(), or load them dequantized to train them."
            )
        refusal = fp8_refusal(self._spec, self._experts) or place_refusal(rows.device)
        if refusal:
            raise ValueError(_refused_fp8(refusal))
        activate = functools.partial(self._spec.activate, self._experts)
        return fp8_mlp(parameters, activate, rows, row_of_slot, weights, offsets)


def _refused_fp8(refusal: str) -> str:
    return (
        f'the backend "deep_gemm" cannot compute these FP8 experts: {refusal}. Change that, or load '
        "them dequantized."
    )


def compacted_forward(
    module_forward: ModuleForward,
    num_local_experts: int | Callable[[], int],
    experts: nn.Module | None = None,
) -> RoutedExperts:
    """Any experts' own `forward(hidden, ids, weights)`, made to honour the id that skips a slot.

    It sees the valid (row, slot) pairs alone, one slot each, so it needs no notion of skipping.

    Args:
        module_forward: takes hidden [S, H], ids [S, 1] below E and weights [S, 1]; gives [S, H].
        num_local_experts: E, or a function that tells it at call time.
        experts: the module whose parameters it uses: they are shown to it as plain tensors, and
            each gets a gradient also if no row reaches it.

    Costs one host synchronization (how many pairs there are; none if they come grouped), and what
    the forward costs.
    """
    return _CompactedExperts(module_forward, num_local_experts, experts)


class _CompactedExperts:
    """Experts that are not understood, computed by their own forward."""

    def __init__(
        self,
        module_forward: ModuleForward,
        num_local_experts: int | Callable[[], int],
        experts: nn.Module | None,
    ) -> None:
        self._forward, self._count, self._experts = module_forward, num_local_experts, experts

    def __call__(self, rows: Tensor, local_expert_ids: Tensor, weights: Tensor) -> Tensor:
        check_routing(rows, local_expert_ids, weights)
        skip = self._num_experts()
        _check_ids(local_expert_ids, skip)
        row, slot = torch.nonzero(local_expert_ids < skip, as_tuple=True)
        return self._compute(rows, row, local_expert_ids[row, slot], weights[row, slot])

    def grouped(
        self, rows: Tensor, row_of_slot: Tensor, weights: Tensor, offsets: Tensor
    ) -> Tensor:
        check_slots(rows, row_of_slot, weights, offsets, self._num_experts())
        return self._compute(rows, row_of_slot, expert_of_slot(offsets, row_of_slot), weights)

    def _num_experts(self) -> int:
        return self._count if isinstance(self._count, int) else self._count()

    def _compute(self, rows: Tensor, row_of_slot: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What the module's forward gives for each slot, summed by row."""
        if self._experts is None:
            return self._summed(rows, row_of_slot, ids, weights)
        with local_parameters(self._experts):
            out = self._summed(rows, row_of_slot, ids, weights)
            return touch(out, *self._experts.parameters())

    def _summed(self, rows: Tensor, row_of_slot: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if row_of_slot.shape[0] == 0:
            return touch(torch.zeros_like(rows), rows, weights)
        out = self._forward(take_rows(rows, row_of_slot), ids[:, None], weights[:, None])
        return sum_rows(out, row_of_slot, rows.shape[0], rows.dtype)


class _Slots(NamedTuple):
    """The slots of routed rows, grouped by expert; skipped ones last, or left out.

    Attributes:
        row_of_slot: [S] int64.
        weights: [S].
        offsets: [E] int64: the end of each expert's slots.
        num_used: the last offset, where the host knows it: skipped slots are left out then.
    """

    row_of_slot: Tensor
    weights: Tensor
    offsets: Tensor
    num_used: int | None


def sorted_slots(
    rows: Tensor, local_expert_ids: Tensor, weights: Tensor, num_experts: int
) -> _Slots:
    """The slots of rows [R, H], ids [R, J] and weights [R, J], as a call of `RoutedExperts` takes them."""
    check_routing(rows, local_expert_ids, weights)
    _check_ids(local_expert_ids, num_experts)
    slots = local_expert_ids.shape[1]
    ids, order = local_expert_ids.reshape(-1).sort(stable=True)
    every = torch.arange(num_experts, device=ids.device)
    offsets = torch.searchsorted(ids, every, right=True)
    num_used = int(offsets[-1]) if _compacts(rows, slots) else None
    order = order[:num_used]
    row_of_slot = order if slots == 1 else order // slots
    sorted_weights = weights.reshape(-1, 1).index_select(0, order)[:, 0]
    return _Slots(row_of_slot, sorted_weights, offsets, num_used)


def _check_ids(ids: Tensor, skip: int) -> None:
    """Raise a ValueError for ids out of range. On a CPU only: elsewhere it would wait for them."""
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high > skip:
            raise ValueError(
                f"local expert ids from {low} to {high}: with {skip} experts here they must be 0 "
                f"to {skip - 1}, or {skip} to skip a slot. Global ids must be made local first."
            )


def check_routing(rows: Tensor, local_expert_ids: Tensor, weights: Tensor) -> None:
    """Raise a ValueError unless rows are [R, H], ids [R, J] integers, and weights [R, J]."""
    if (
        rows.dim() != 2
        or local_expert_ids.dim() != 2
        or local_expert_ids.shape[0] != rows.shape[0]
        or weights.shape != local_expert_ids.shape
    ):
        raise ValueError(
            "expected rows [R, H], local_expert_ids [R, J] and weights [R, J]; got "
            f"{tuple(rows.shape)}, {tuple(local_expert_ids.shape)} and {tuple(weights.shape)}."
        )
    if local_expert_ids.is_floating_point() or local_expert_ids.dtype is torch.bool:
        raise ValueError(f"local_expert_ids must be integers, got {local_expert_ids.dtype}.")


def check_slots(
    rows: Tensor, row_of_slot: Tensor, weights: Tensor, offsets: Tensor, num_experts: int
) -> None:
    """Raise a ValueError unless they are rows [R, H], [S] int64, [S], and [E] integers."""
    if (
        rows.dim() != 2
        or row_of_slot.dim() != 1
        or weights.shape != row_of_slot.shape
        or offsets.shape != (num_experts,)
    ):
        raise ValueError(
            f"expected rows [R, H], row_of_slot [S], weights [S] and offsets [{num_experts}]; got "
            f"{tuple(rows.shape)}, {tuple(row_of_slot.shape)}, {tuple(weights.shape)} and "
            f"{tuple(offsets.shape)}."
        )
    if row_of_slot.dtype is not torch.int64 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "row_of_slot must be int64 and offsets int32 or int64, got "
            f"{row_of_slot.dtype} and {offsets.dtype}."
        )


def _compacts(rows: Tensor, slots: int) -> bool:
    """Whether to leave skipped slots out, which needs their number on the host."""
    if torch.compiler.is_compiling():
        return False
    if rows.device.type != "cuda":
        return True
    if slots == 1 or torch.cuda.is_current_stream_capturing():
        return False
    return torch.is_grad_enabled() or rows.shape[0] * slots > _FEW_SLOTS


def _num_experts(experts: nn.Module) -> int:
    count = getattr(experts, "num_experts", None)
    if not isinstance(count, int):
        raise TypeError(
            f"{type(experts).__name__} has no integer `num_experts`; give `compacted_forward` the "
            "number of its experts."
        )
    return count
