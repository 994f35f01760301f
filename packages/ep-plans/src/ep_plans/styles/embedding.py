"""Sharded input embeddings. The token ids are the same on every rank of the TP group."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ep_dispatch.collectives import (
    chunk_bounds,
    gather_over_group,
    group_rank,
    group_size,
    reduce_over_group,
)
from ep_plans.styles.base import (
    Context,
    Forward,
    Moved,
    Style,
    around_forward,
    attributes,
    local_parameters,
    size_of,
)


class EmbeddingRowwise(Style):
    """The vocabulary is cut: ids of other ranks give zeros, and the lookups are summed.

    Cost: an all-reduce of the output in forward.
    """

    def cut(self, module: nn.Module, parameter_name: str, ndim: int) -> tuple[int, int] | None:
        """The vocabulary, the first dimension."""
        return 0, 1

    def check(self, model: nn.Module, name: str) -> None:
        """The vocabulary's size is known."""
        size_of(model.get_submodule(name), "num_embeddings", name, "embedding_rowwise")

    def moved(self, model: nn.Module, name: str, hidden: int, slots: int) -> Moved:
        """The output."""
        return Moved(reduced=hidden)

    def install(self, context: Context) -> None:
        """Look up the local ids, zero the others, sum over the group."""
        module, group = context.module, context.group
        size = size_of(module, "num_embeddings", context.name, "embedding_rowwise")
        start, end = chunk_bounds(size, group_size(group), group_rank(group))
        padding = getattr(module, "padding_idx", None)
        here = None if padding is None or not start <= padding < end else padding - start

        def run(forward: Forward, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            foreign = (ids < start) | (ids >= end)
            local_ids = (ids - start).masked_fill(foreign, 0)
            if start == end:
                # A rank with no part of the vocabulary still has to give rows of the right form.
                with local_parameters(module):
                    weight: Any = module.weight
                rows = weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum() * 0
                return reduce_over_group(rows, group)
            with attributes(module, {"padding_idx": here}), local_parameters(module):
                rows = forward(local_ids, *args, **kwargs)
            return reduce_over_group(rows.masked_fill(foreign.unsqueeze(-1), 0), group)

        around_forward(module, run)


class EmbeddingColwise(Style):
    """The hidden dimension is cut: each rank looks up its slice, and the slices are gathered.

    Cost: an all-gather of the output in forward.
    """

    def cut(self, module: nn.Module, parameter_name: str, ndim: int) -> tuple[int, int] | None:
        """The hidden dimension, the last one."""
        return ndim - 1, 1

    def check(self, model: nn.Module, name: str) -> None:
        """The hidden size is known."""
        size_of(model.get_submodule(name), "embedding_dim", name, "embedding_colwise")

    def moved(self, model: nn.Module, name: str, hidden: int, slots: int) -> Moved:
        """The output."""
        return Moved(gathered=hidden)

    def install(self, context: Context) -> None:
        """Look up the slices, gather them."""
        module, group = context.module, context.group
        size = size_of(module, "embedding_dim", context.name, "embedding_colwise")

        def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            with local_parameters(module):
                rows = forward(*args, **kwargs)
            return gather_over_group(rows, group, -1, size=size)

        around_forward(module, run)
