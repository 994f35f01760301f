"""What `ep_kernels` and `ep_dispatch` run on CUDA, told to a tracker of fake tensors on the CPU.

There Triton kernels take the place of several operators, write into what is there, and make no
temporaries; passes over slots are made over larger blocks. Rows travel beside kernels until they are
waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import ep_kernels.activation
import ep_kernels.mlp
import ep_kernels.norm
import ep_kernels.rotary
import ep_kernels.rows
import expert_parallel.fusing.inputs
from ep_dispatch.exchange import Flight, RowExchange
from ep_kernels.activation import is_silu_gated
from ep_kernels.rows import accumulation_dtype
from ep_kernels.spec import ExpertsSpec

from .tracker import Tracker


@contextmanager
def cuda_paths(tracker: Tracker) -> Iterator[None]:
    """Run what CUDA would inside."""
    activation, rows = ep_kernels.activation, ep_kernels.rows
    forward, backward = activation.scaled_activation, activation.scaled_activation_backward

    def kernel(read: list[Tensor], written: list[Tensor]) -> None:
        tracker.run_kernel(
            sum(x.nbytes for x in read), sum(x.nbytes for x in written), 1, written[0].dtype
        )

    def activate(
        spec: ExpertsSpec, pre: Tensor, weights: Tensor, inner: int, *, copies: bool
    ) -> Tensor:
        if not is_silu_gated(spec):
            return forward(spec, pre, weights, inner, copies=copies)
        out = pre.new_empty(pre.shape[0], inner)
        kernel([pre, weights], [out])
        return out

    def activate_backward(
        spec: ExpertsSpec, pre: Tensor, weights: Tensor, grad: Tensor, **settings: Any
    ) -> Tensor:
        if not is_silu_gated(spec):
            return backward(spec, pre, weights, grad, **settings)
        weights_grad = pre.new_empty(pre.shape[0], dtype=accumulation_dtype(pre.dtype))
        out = settings["out"]
        kernel([pre, weights, grad], [grad, weights_grad] + ([] if out is None else [out]))
        return weights_grad

    def segment_sums(
        values: Tensor, order: Tensor, starts: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        out = values.new_empty(starts.shape[0], values.shape[1])
        kernel([values, order, starts], [out])
        return out

    def normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, scale = x.new_empty(x.shape), x.new_empty(x.shape[0], 1, dtype=torch.float32)
        kernel([x, weight], [out, scale])
        return out, scale

    def normalize_backward(
        grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, wants_x: bool, wants_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        # Two kernels of torch, which read the same.
        x_grad = x.new_empty(x.shape) if wants_x else None
        weight_grad = x.new_empty(x.shape[1]) if wants_weight else None
        for out in (x_grad, weight_grad):
            if out is not None:
                kernel([grad, x, weight, scale], [out])
        return x_grad, weight_grad

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
        out = torch.empty_like(x)
        kernel([x, cos, sin], [out])
        return out

    def sent_off(start: Callable[[RowExchange, Tensor], Flight]) -> Any:
        def run(exchange: RowExchange, rows: Tensor) -> Any:
            with tracker.sending_off() as wait:
                flight = start(exchange, rows)

            def arrived() -> Tensor:
                wait()
                return flight.wait()

            return SimpleNamespace(wait=arrived)

        return run

    with ExitStack() as stack:
        for owner, name, function in (
            (ep_kernels.mlp, "scaled_activation", activate),
            (ep_kernels.mlp, "scaled_activation_backward", activate_backward),
            (ep_kernels.mlp, "segment_sums", segment_sums),
            (rows, "segment_sums", segment_sums),
            (ep_kernels.norm, "normalize", normalize),
            (ep_kernels.norm, "normalize_backward", normalize_backward),
            (ep_kernels.rotary, "rotate", rotate),
            (RowExchange, "start", sent_off(RowExchange.start)),
            (RowExchange, "start_back", sent_off(RowExchange.start_back)),
            (expert_parallel.fusing.inputs, "SMALL", 0),
            (activation, "_CPU_BLOCK", activation._GPU_BLOCK),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield
