"""A module's experts as a function of routed rows: the shape in which a dispatcher calls them.

Shape letters: H hidden size, E experts held here, R rows, J slots of a row, N valid slots of all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .experts import experts_forward
from .local import local_parameters, touch
from .rows import sum_rows, take_rows
from .spec import ExpertsSpec

RoutedExperts = Callable[[Tensor, Tensor, Tensor], Tensor]

# Without gradients, so few slots are computed with the skipped ones left in: waiting for the host
# to learn how many are valid would cost more than the memory that it saves (decoding).
_FEW_SLOTS = 1 << 14


def module_experts_forward(experts: nn.Module) -> RoutedExperts:
    """The experts of a module as `forward(rows, local_expert_ids, weights) -> Tensor`.

    Call it before the module's `forward` is replaced: for a module that `ExpertsSpec.from_module`
    does not understand, the `forward` it has now is wrapped (`compacted_forward`).

    The function returned takes rows [R, H], ids [R, J] (int64) and weights [R, J], and gives the
    sum over a row's slots of weight times expert output: [R, H], of the dtype of the rows. An id
    equal to E skips the slot, which contributes exactly zero and gets exactly zero gradient. The
    sum over slots, and its backward, accumulate in float32 or wider. Parameters are read at each
    call, so FSDP2 may swap them; each one gets a gradient, zero if no row came.

    Costs no host synchronization for few slots without gradients, while a CUDA graph is captured,
    and for J == 1; else one, to leave skipped slots out of memory.
    """
    spec = ExpertsSpec.from_module(experts)
    if spec is None:
        return compacted_forward(experts.forward, lambda: _num_experts(experts), experts)
    known = spec

    def forward(rows: Tensor, local_expert_ids: Tensor, weights: Tensor) -> Tensor:
        parameters = known.read_weights(experts)
        check_routing(rows, local_expert_ids, weights)
        _check_ids(local_expert_ids, parameters.num_experts)
        num_rows, slots = local_expert_ids.shape
        ids, order = local_expert_ids.reshape(-1).sort(stable=True)
        every = torch.arange(parameters.num_experts, device=ids.device)
        offsets = torch.searchsorted(ids, every, right=True)
        num_used = int(offsets[-1]) if _compacts(rows, slots) else None
        order = order[:num_used]
        source = order if slots == 1 else order // slots
        out = experts_forward(
            known,
            parameters,
            take_rows(rows, source),
            offsets,
            weights.reshape(-1, 1).index_select(0, order)[:, 0],
            num_used=num_used,
        )
        return sum_rows(out, source, num_rows, rows.dtype)

    return forward


def compacted_forward(
    module_forward: RoutedExperts,
    num_local_experts: int | Callable[[], int],
    experts: nn.Module | None = None,
) -> RoutedExperts:
    """Any experts' own `forward(hidden, ids, weights)`, made to honour the id that skips a slot.

    It sees the valid (row, slot) pairs alone, one slot each, so it needs no notion of skipping.

    Args:
        module_forward: takes hidden [N, H], ids [N, 1] below E and weights [N, 1]; gives [N, H].
        num_local_experts: E, or a function that tells it at call time.
        experts: the module whose parameters it uses: they are shown to it as plain tensors, and
            each gets a gradient also if no row reaches it.

    Costs one host synchronization (how many pairs there are), and what the forward costs.
    """

    def forward(rows: Tensor, local_expert_ids: Tensor, weights: Tensor) -> Tensor:
        check_routing(rows, local_expert_ids, weights)
        skip = num_local_experts if isinstance(num_local_experts, int) else num_local_experts()
        _check_ids(local_expert_ids, skip)
        if experts is None:
            return _compacted(module_forward, skip, rows, local_expert_ids, weights)
        with local_parameters(experts):
            out = _compacted(module_forward, skip, rows, local_expert_ids, weights)
            return touch(out, *experts.parameters())

    return forward


def _compacted(
    module_forward: RoutedExperts, skip: int, rows: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    row, slot = torch.nonzero(ids < skip, as_tuple=True)
    if row.numel() == 0:
        return touch(torch.zeros_like(rows), rows, weights)
    out = module_forward(take_rows(rows, row), ids[row, slot, None], weights[row, slot, None])
    return sum_rows(out, row, rows.shape[0], rows.dtype)


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
