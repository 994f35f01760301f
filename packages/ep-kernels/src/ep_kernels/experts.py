"""The experts' MLP over rows grouped by expert.

Shape letters: H hidden size, I intermediate size, U first projection's width, E experts, R rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .activation import try_activation
from .grouped import (
    Backend,
    BackendRequest,
    choose_backend,
    counts_of,
    expert_of_slot,
    grouped_mm,
    products_mm,
    products_of,
)
from .local import touch
from .low_rank import ExpertsLowRank, LowRank
from .rows import accumulation_dtype
from .spec import ExpertsSpec, ExpertsWeights, compute_dtype

Product = Callable[[Tensor, Tensor], Tensor]


def experts_forward(
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    rows: Tensor,
    offsets: Tensor,
    row_weights: Tensor | None = None,
    *,
    num_used: int | None = None,
    backend: BackendRequest = "auto",
    low_rank: ExpertsLowRank | None = None,
) -> Tensor:
    """Run each expert on its rows and scale the results by their routing weights.

    Args:
        spec: how the experts are put together.
        weights: the weights of E experts.
        rows: [R, H], grouped by expert. Cast to the dtype of the weights, or to autocast's.
        offsets: [E], integer: the end of each expert's rows. Rows past the last end belong to no
            expert: they come out as zeros, and get zero gradients, whatever they hold.
        row_weights: [R], the routing weight of each row, or None for ones.
        num_used: the last offset, where the host knows it: the rest is then cut off, not masked.
        backend: who computes the products; `auto` is what `choose_backend` finds best.
        low_rank: terms of the weights, computed as products of their own (by the backend that `auto`
            chooses for their sizes), so that no weight-sized matrix is made for them.

    Returns:
        [R, H], of the dtype of the products or, with `row_weights`, of the wider of the two.

    Raises:
        ValueError: if shapes don't fit together, or if `backend` cannot compute them.

    Costs one host synchronization by the backend `loop`, one in backward by `deep_gemm` (its weight
    gradients take sizes from the host), else none. Plain autograd: the rows, the first projection
    and what the activation saves are kept for backward; with low-rank terms the input of each
    projection and its product with the first factor too.
    """
    low_rank = low_rank or ExpertsLowRank()
    _check(spec, weights, rows, offsets, row_weights)
    dtype = compute_dtype(weights.up)
    weights = ExpertsWeights(*(None if w is None else w.to(dtype) for w in weights))  # type: ignore[arg-type]
    sizes = (*weights.up.shape[1:], *weights.down.shape[1:])
    choice = choose_backend(rows.device, dtype, *sizes, backend=backend)
    ranks = [n for term in low_rank if term is not None for n in term.left.shape[1:]]
    ranks += [term.right.shape[2] for term in low_rank if term is not None]
    beside = choose_backend(rows.device, dtype, *ranks) if ranks else choice
    ends = offsets
    if "loop" in (choice.backend, beside.backend):  # which takes no rows past the last offset
        ends = offsets.cpu()
        num_used = sum(counts_of(ends, rows.shape[0]))
    elif rows.shape[0] == 0:
        num_used = 0

    given = rows, row_weights
    past = None
    if num_used is None:
        past = torch.arange(rows.shape[0], device=rows.device) >= offsets[-1]
    else:
        rows = rows[:num_used]
        row_weights = None if row_weights is None else row_weights[:num_used]
    if num_used == 0:
        wide = dtype if row_weights is None else torch.promote_types(dtype, row_weights.dtype)
        inputs = [x for x in (*given, *weights, *low_rank.tensors()) if x is not None]
        return touch(torch.zeros_like(given[0], dtype=wide), *inputs)

    def product_by(backend: Backend) -> Product:
        if backend == "grouped_mm":  # an operator, which torch.compile traces
            return functools.partial(grouped_mm, offsets=offsets.to(torch.int32))
        return functools.partial(products_mm, products=products_of(backend, ends, rows.shape[0]))

    product = product_by(choice.backend)
    narrow = product if beside.backend == choice.backend else product_by(beside.backend)
    out = _mlp(spec, weights, low_rank, rows.to(dtype), offsets, product, narrow, past)
    if row_weights is not None:
        out = out * (row_weights if past is None else row_weights.masked_fill(past, 0))[:, None]
    unused = given[0].shape[0] - rows.shape[0]
    return torch.nn.functional.pad(out, (0, 0, 0, unused)) if unused else out


def _mlp(
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    low_rank: ExpertsLowRank,
    rows: Tensor,
    offsets: Tensor,
    product: Product,
    narrow: Product,
    past: Tensor | None,
) -> Tensor:
    """The MLP of rows grouped by expert.

    Args:
        spec: how the experts are put together.
        weights: of the dtype of the rows.
        low_rank: terms of the weights.
        rows: [R, H].
        offsets: [E], the end of each expert's rows.
        product: of rows with each expert's matrix. It may leave rows `past` the last offset
            unwritten, and their gradients, so each is masked before and after. A mask selects and
            does not multiply by zero: what was in the memory may be NaN.
        narrow: the same for the factors of low-rank terms.
        past: [R], True for such rows; None if there are none.
    """
    expert = None
    if weights.up_bias is not None or weights.down_bias is not None:
        expert = expert_of_slot(offsets, rows).clamp_(max=weights.num_experts - 1)

    def masked(x: Tensor) -> Tensor:
        return x if past is None else x.masked_fill(past[:, None], 0)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, term: LowRank | None) -> Tensor:
        x = masked(x)
        out = product(x, weight if spec.transposed else weight.mT)
        if term is not None:
            left, right = term.left.to(x.dtype), term.right.to(x.dtype)
            first, second = (left, right) if spec.transposed else (right.mT, left.mT)
            out = out + narrow(masked(narrow(x, first)), second) * term.scale
        return masked(_add_bias(out, bias, expert))

    up = linear(rows, weights.up, weights.up_bias, low_rank.up)
    # Autograd forbids writing to one of the two parts that `chunk` gives.
    chunked = spec.gated and spec.gate is None and torch.is_grad_enabled()
    copies = chunked and try_activation(spec, up, up.shape[1]).writes
    out = linear(spec.activate(up, copies=copies), weights.down, weights.down_bias, low_rank.down)
    return out if spec.post_norm is None else masked(spec.post_norm(out))


def _add_bias(out: Tensor, bias: Tensor | None, expert: Tensor | None) -> Tensor:
    """Add `bias[expert]`, by way of float32 so that the gradient sums many rows in float32."""
    if bias is None:
        return out
    wide = bias.to(accumulation_dtype(bias.dtype))
    return (out + wide[expert]).to(out.dtype)


def _check(
    spec: ExpertsSpec,
    weights: ExpertsWeights,
    rows: Tensor,
    offsets: Tensor,
    row_weights: Tensor | None,
) -> None:
    up, down = weights.up, weights.down
    if up.dim() != 3 or down.dim() != 3 or up.shape[0] != down.shape[0]:
        raise ValueError(
            f"weights {tuple(up.shape)} and {tuple(down.shape)} must be 3-d, one matrix per expert."
        )
    (inner, wide), (narrow, outer) = up.shape[1:], down.shape[1:]
    if not spec.transposed:
        inner, wide, narrow, outer = wide, inner, outer, narrow
    if wide != narrow * (2 if spec.gated else 1):
        kind = "gated" if spec.gated else "ungated"
        raise ValueError(
            f"{kind} experts: a first projection of width {wide} doesn't fit a second one from "
            f"{narrow}. Is `transposed` ({spec.transposed}) right?"
        )
    if rows.dim() != 2 or rows.shape[1] != inner:
        raise ValueError(f"rows {tuple(rows.shape)} must be [R, {inner}], as the weights say.")
    if inner != outer:
        raise ValueError(f"experts map {inner} to {outer}; input and output must have one size.")
    if offsets.shape != (up.shape[0],):
        raise ValueError(
            f"offsets {tuple(offsets.shape)} must be [{up.shape[0]}]: one end per expert."
        )
    if row_weights is not None and row_weights.shape != rows.shape[:1]:
        raise ValueError(
            f"row_weights {tuple(row_weights.shape)} must be [{rows.shape[0]}]: one per row."
        )
