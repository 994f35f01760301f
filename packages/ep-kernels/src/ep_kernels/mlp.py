"""The experts' MLP over slots of rows, as one autograd function that saves little.

Shape letters: H hidden size, I intermediate size, U first projection's width, E experts held here,
R rows, S slots: a slot is one (row, expert) pair.

[Note: where the routing weight goes]
An output row is the sum over its slots of w * (h @ D + b), with h the activation of a slot, D and b
the second projection of its expert. The weight is applied to h: (w * h) @ D + w * b, which is the
same. So the second projection's result is summed as it is and needs not be kept: the gradient of w
is <dY @ D^T, h> + <dY, b>, with dY @ D^T computed for h in any case, and that of D is (w * h)^T dY.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .activation import (
    blocks,
    fits_a_block,
    is_silu_gated,
    scaled_activation,
    scaled_activation_backward,
    try_activation,
)
from .grouped import BackendRequest, choose_backend, expert_of_slot, products_of
from .local import touch
from .products import Products, Taken
from .rows import accumulation_dtype, kept_slots_by_row, segment_sums
from .spec import ExpertsSpec, ExpertsWeights, compute_dtype

Recompute = Literal["none", "gate_up"]


class Way(NamedTuple):
    """How to compute some experts.

    Attributes:
        plain: by plain autograd: `experts_mlp` can't, or torch.compile can't trace it.
        copies: with an activation that is given copies of its input, as it may write there.
    """

    plain: bool
    copies: bool


def choose_way(spec: ExpertsSpec, parameters: ExpertsWeights, slots: int) -> Way:
    """How to compute the experts on so many slots.

    Costs a run of the activation on one row, and no host synchronization.
    """
    if spec.post_norm is not None or torch.compiler.is_compiling():
        return Way(plain=True, copies=False)
    width = parameters.up.shape[2 if spec.transposed else 1]
    # Without gradients, what is drawn matters to a reentrant checkpoint alone: to draw the same
    # again, by plain autograd, it takes one pass over all slots.
    grad = torch.is_grad_enabled()
    if is_silu_gated(spec) or (not grad and fits_a_block(slots, width, parameters.up.device)):
        return Way(plain=False, copies=False)
    trial = try_activation(spec, parameters.up, width)
    return Way(plain=trial.learns or trial.draws, copies=grad and trial.writes)


def experts_mlp(
    spec: ExpertsSpec,
    parameters: ExpertsWeights,
    rows: Tensor,
    row_of_slot: Tensor,
    weights: Tensor,
    offsets: Tensor,
    recompute: Recompute = "none",
    copies: bool = True,
    backend: BackendRequest = "auto",
) -> Tensor:
    """For every row, the sum over its slots of weight times the slot's expert on the row.

    Args:
        spec: how the experts are put together; without `post_norm`, and with an activation that
            neither has parameters nor draws random numbers.
        parameters: the weights of E experts.
        rows: [R, H]. Cast to the dtype of the parameters, or to autocast's.
        row_of_slot: [S] int64, grouped by expert.
        weights: [S], the routing weights, of any float dtype.
        offsets: [E], integer: the end of each expert's slots; the last one is S.
        recompute: "gate_up" also computes the first projection again in backward.
        copies: whether the activation is given copies, as one that works in place needs.
        backend: who computes the products; `auto` is what `choose_backend` finds best.

    Returns:
        [R, H] of the dtype of the rows, summed in float32 or wider. A row without slots is zero.

    Raises:
        ValueError: if the offsets fall or don't end at S, where the host knows them; if `backend`
            cannot compute the products.

    Costs no host synchronization, except by the backend "loop" on a GPU and by "deep_gemm" in
    backward (one). Saves for backward:
        rows [R, H], as received: the gradient of the first weight (only if wanted);
        the first projection [S, U]: the activation and its gradient (unless recomputed);
        weights [S]: both factors of the product need the other;
        row_of_slot [S], and its transpose [S] and [R]: the gathers and sums over slots.
    Differentiable once. The method of SonicMoE and Megatron Core: routing weight before the second
    projection, gathers done again in backward.
    """
    dtype = compute_dtype(parameters.up)
    tensors = (rows, weights, *parameters.tensors())
    sizes = (*parameters.up.shape[1:], *parameters.down.shape[1:])
    # Without a slot too: a backend refuses on all ranks, or on none.
    chosen = choose_backend(rows.device, dtype, *sizes, backend=backend).backend
    if row_of_slot.shape[0] == 0:
        return touch(torch.zeros_like(rows), *tensors)
    plan = _Plan(
        spec=spec,
        products=products_of(chosen, offsets, row_of_slot.shape[0]),
        dtype=dtype,
        recomputes=recompute == "gate_up",
        copies=copies,
        keeps=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
    )
    out: Tensor = _ExpertsMLP.apply(plan, rows, weights, row_of_slot, offsets, *parameters)
    return out


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What a call knows besides its tensors.

    Attributes:
        spec: how the experts are put together.
        products: who multiplies.
        dtype: that products are computed in.
        recomputes: whether backward computes the first projection again.
        copies: whether the activation is given copies.
        keeps: whether there will be a backward.
    """

    spec: ExpertsSpec
    products: Products
    dtype: torch.dtype
    recomputes: bool
    copies: bool
    keeps: bool

    def project(self, x: Tensor | Taken, weight: Tensor) -> Tensor:
        """From a projection's input [S, A] to its output [S, B]."""
        return self.products.rows(x, weight if self.spec.transposed else weight.mT)

    def project_back(self, grad: Tensor | Taken, weight: Tensor) -> Tensor:
        """From the gradient of a projection's output [S, B] to that of its input [S, A]."""
        return self.products.rows(grad, weight.mT if self.spec.transposed else weight)

    def weight_grad(self, x: Tensor | Taken, grad: Tensor | Taken, weight: Tensor) -> Tensor:
        """The gradient of a projection's weight, from its input and its output's gradient."""
        pair = (x, grad) if self.spec.transposed else (grad, x)
        return self.products.matrices(*pair, weight.dtype)

    def take(self, rows: Tensor, row_of_slot: Tensor) -> Taken:
        """Each slot's row, in the dtype of the products."""
        return Taken(rows.to(self.dtype), row_of_slot)

    def first_projection(
        self, rows: Tensor, row_of_slot: Tensor, offsets: Tensor, up: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The input of the activation: [S, U]."""
        pre = self.project(self.take(rows, row_of_slot), up)
        if bias is not None:
            for part, expert in blocks(pre.shape[1], pre, expert_of_slot(offsets, pre)):
                part.add_(bias[expert])
        return pre


class _ExpertsMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        rows: Tensor,
        weights: Tensor,
        row_of_slot: Tensor,
        offsets: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        by_row = kept_slots_by_row(row_of_slot, rows.shape[0])
        pre = plan.first_projection(rows, row_of_slot, offsets, up, up_bias)
        inner = down.shape[1 if plan.spec.transposed else 2]
        hidden = scaled_activation(plan.spec, pre, weights, inner, copies=plan.copies)
        if plan.keeps:
            ctx.plan = plan
            ctx.like_rows = rows.dtype
            wants_rows = plan.recomputes or up.requires_grad
            ctx.save_for_backward(
                rows if wants_rows else None,
                None if plan.recomputes else pre,
                weights,
                row_of_slot,
                *by_row,
                offsets,
                up,
                down,
                up_bias,
                down_bias,
            )
        del pre
        out = plan.project(hidden, down)
        del hidden
        if down_bias is not None:
            tensors = out, weights, expert_of_slot(offsets, out)
            for part, weight, expert in blocks(out.shape[1], *tensors):
                part.add_(weight[:, None] * down_bias[expert])
        return _sums(out, by_row, rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        plan: _Plan = ctx.plan
        rows, pre, weights, row_of_slot, *by_row, offsets, up, down, up_bias, down_bias = (
            ctx.saved_tensors
        )
        _, need_rows, need_weights, _, _, need_up, need_down, need_up_bias, need_down_bias = (
            ctx.needs_input_grad
        )
        if pre is None:
            pre = plan.first_projection(rows, row_of_slot, offsets, up, up_bias)
        need_pre = need_rows or need_up or need_up_bias
        pre_grad = torch.empty_like(pre) if need_pre and not plan.recomputes else pre
        rows_grad = up_grad = down_grad = up_bias_grad = down_bias_grad = None

        out_grad = plan.take(grads[0].contiguous(), row_of_slot)
        hidden = plan.project_back(out_grad, down)  # its gradient, until the next line
        weights_grad = scaled_activation_backward(
            plan.spec,
            pre,
            weights,
            hidden,
            copies=plan.copies,
            out=pre_grad if need_pre else None,
        )
        del pre
        if need_rows:  # before the weights' gradients, so that its temporaries don't add to them
            rows_grad = _sums(plan.project_back(pre_grad, up), by_row, ctx.like_rows)
        if need_down:
            down_grad = plan.weight_grad(hidden, out_grad, down)
        del hidden
        if need_down_bias:
            down_bias_grad = _sums_by_expert(
                out_grad.rows, row_of_slot, offsets, down_bias.dtype, weights
            )
        if down_bias is not None and need_weights:
            _add_products(weights_grad, out_grad, down_bias, offsets)
        del out_grad
        if need_up_bias:
            every = torch.arange(pre_grad.shape[0], device=pre_grad.device)
            up_bias_grad = _sums_by_expert(pre_grad, every, offsets, up_bias.dtype)
        if need_up:
            up_grad = plan.weight_grad(plan.take(rows, row_of_slot), pre_grad, up)
        return (
            None,
            rows_grad,
            weights_grad.to(weights.dtype) if need_weights else None,
            None,
            None,
            up_grad,
            down_grad,
            up_bias_grad,
            down_bias_grad,
        )


def _sums(values: Tensor, by_row: Any, dtype: torch.dtype) -> Tensor:
    """The sum over each row's slots: [R, H] of `dtype`, rounded once."""
    wide = torch.promote_types(values.dtype, dtype)
    return segment_sums(values.to(wide), *by_row).to(dtype)


def _sums_by_expert(
    rows: Tensor,
    row_of_slot: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    weights: Tensor | None = None,
) -> Tensor:
    """The sum over each expert's slots of `rows` [R, A], times `weights` [S]: [E, A] of `dtype`."""
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]]).to(row_of_slot.dtype)
    scale = None if weights is None else weights.to(rows.dtype)
    return segment_sums(rows, row_of_slot, starts, scale).to(dtype)


def _add_products(to: Tensor, grads: Taken, bias: Tensor, offsets: Tensor) -> None:
    """Add to `to` [S] the scalar product of `grads` [S, H] and the bias of the slot's expert."""
    wide = accumulation_dtype(grads.rows.dtype)
    tensors = grads.index, expert_of_slot(offsets, to), to
    for index, expert, total in blocks(bias.shape[1], *tensors):
        total.add_((grads.rows[index].to(wide) * bias[expert]).sum(dim=-1))
