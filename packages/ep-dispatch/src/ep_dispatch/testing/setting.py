"""One dispatcher on this rank, its inputs, and what must come out: the oracle.

T = tokens of a batch, H = hidden size, K = experts per token, E = experts of a layer, B = batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Generator, Tensor
from torch.distributed import ProcessGroup

from ep_dispatch.collectives import group_rank, group_size

from .experts import KitExperts, SmoothExperts
from .workloads import Workload

__all__ = ["Dispatcher", "DispatcherFactory", "Place", "Result", "Setting"]

Dispatcher = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(hidden [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]`."""


class DispatcherFactory(Protocol):
    """Builds the dispatcher of one layer on this rank."""

    def __call__(
        self,
        experts_forward: KitExperts,
        *,
        num_local_experts: int,
        ep_group: ProcessGroup | None,
        tp_group: ProcessGroup | None,
    ) -> Dispatcher:
        """The dispatcher.

        Args:
            experts_forward: a module, `(rows [R, H], local_expert_ids [R, J], weights [R, J]) -> [R, H]`;
                a slot with id `num_local_experts` is skipped.
            num_local_experts: E / P; rank p of `ep_group` holds experts `p * E / P` and following.
            ep_group: the ranks that hold distinct experts.
            tp_group: those of them that hold the same tokens as this rank; None: this rank alone.
        """


@dataclass(frozen=True)
class Place:
    """Where this rank is.

    Attributes:
        ep_group, tp_group: as the dispatcher gets them.
        batch, batches: the number of this rank's batch, and how many the EP group holds.
    """

    ep_group: ProcessGroup | None
    tp_group: ProcessGroup | None
    batch: int
    batches: int

    @classmethod
    def of(cls, ep_group: ProcessGroup | None, tp_group: ProcessGroup | None) -> Place:
        """Find the batches of the group. Cost: an all-gather of an object."""
        first = 0 if ep_group is None else dist.get_rank()
        if tp_group is not None:
            first = min(dist.get_process_group_ranks(tp_group))
        firsts = sorted(set(gather(first, ep_group)))
        return cls(ep_group, tp_group, firsts.index(first), len(firsts))

    @property
    def rank(self) -> int:
        """This rank in the EP group."""
        return group_rank(self.ep_group)

    @property
    def ranks(self) -> int:
        """P."""
        return group_size(self.ep_group)


def gather(value: Any, group: ProcessGroup | None) -> list[Any]:
    """`value` of every rank of the group, in order."""
    values = [value] * group_size(group)
    if group is not None and len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


class NoHistoryError(Exception):
    """An output that backward cannot go through."""


@dataclass(frozen=True)
class Batch:
    """Inputs of a batch and its output's gradient, in float64 on the CPU; `ids` are integers."""

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    cotangent: Tensor

    @classmethod
    def make(
        cls, workload: Workload, batch: int, experts: int, local: int, hidden: int, seed: int, real: bool
    ) -> Batch:  # fmt: skip
        """From a seed; small integers, or real numbers of very different sizes."""
        generator = Generator().manual_seed(1000 * seed + batch)
        ids = workload.ids(batch, experts, local, generator)

        def values(*shape: int) -> Tensor:
            if not real:
                return torch.randint(-3, 4, shape, generator=generator, dtype=torch.float64)
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
            return numbers * 4.0 ** torch.randint(-3, 1, shape, generator=generator)

        x, cotangent = values(len(ids), hidden), values(len(ids), hidden)
        weights = torch.randint(1, 5, ids.shape, generator=generator, dtype=torch.float64)
        if real:
            weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64)
        if workload.equal and len(ids):
            x, weights = x[:1].repeat(len(ids), 1), torch.full_like(weights, weights[0, 0].item())
        return cls(x, ids, weights, cotangent)


@dataclass(frozen=True)
class Result:
    """What a call gave, or must give.

    Attributes:
        output: [T, H].
        gradients: of the hidden states, the routing weights, and each of the rank's expert parameters,
            by name; None: there is none.
    """

    output: Tensor
    gradients: dict[str, Tensor | None]


class Setting:
    """A layer, the dispatcher under test, and the oracle, for one workload, kind of experts and dtype.

    Args:
        place: where this rank is.
        factory: builds the dispatcher.
        workload: the workload.
        kind: the experts. `SmoothExperts` come with real numbers, others with small integers.
        dtype, device: of the dispatcher's inputs; the oracle is in float64 on the CPU.
        num_local_experts: E / P.
        hidden: H.
    """

    def __init__(
        self,
        place: Place,
        factory: DispatcherFactory,
        workload: Workload,
        kind: type[KitExperts],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_local_experts: int,
        hidden: int,
    ) -> None:
        self.place, self.workload, self.kind = place, workload, kind
        self.dtype, self.device, self.hidden = dtype, device, hidden
        self.num_local_experts = num_local_experts
        self.num_experts = num_local_experts * place.ranks
        self.whole = kind(self.num_experts, hidden, Generator().manual_seed(7))
        with torch.no_grad():  # both sides start from values that the dtype can hold
            for parameter in self.whole.parameters():
                parameter.copy_(parameter.to(dtype))
        mine = self.whole.local(place.rank * num_local_experts, num_local_experts)
        self.experts = mine.to(device=device, dtype=dtype)
        self.dispatcher = factory(
            self.experts,
            num_local_experts=num_local_experts,
            ep_group=place.ep_group,
            tp_group=place.tp_group,
        )

    def batch(self, number: int, seed: int) -> Batch:
        """The inputs of a batch, in numbers that the dtype can hold."""
        real = issubclass(self.kind, SmoothExperts)
        batch = Batch.make(
            self.workload, number, self.num_experts, self.num_local_experts, self.hidden, seed, real
        )
        rounded = (
            x.to(self.dtype).double() for x in (batch.hidden, batch.weights, batch.cotangent)
        )
        hidden, weights, cotangent = rounded
        return Batch(hidden, batch.ids, weights, cotangent)

    def inputs(self, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """This rank's hidden states, ids, routing weights, and the gradient of its output."""
        batch = self.batch(self.place.batch, seed)
        hidden, weights, cotangent = (
            x.to(device=self.device, dtype=self.dtype)
            for x in (batch.hidden, batch.weights, batch.cotangent)
        )
        ids = batch.ids.to(self.device)
        return hidden.requires_grad_(), ids, weights.requires_grad_(), cotangent

    def run(self, seed: int = 1, *, backwards: int = 1) -> Result:
        """One forward and its backward, or several of them."""
        hidden, ids, weights, cotangent = self.inputs(seed)
        self.experts.zero_grad()
        output = self.dispatcher(hidden, ids, weights)
        self.check_history(output)
        for number in range(backwards):
            output.backward(cotangent, retain_graph=number + 1 < backwards)
        return self.result(output, hidden, weights)

    def check_history(self, output: Tensor) -> None:
        """Before a backward, in which a rank without one would leave the others alone.

        Raises:
            NoHistoryError: on every rank, if the output of any has no history.
        """
        ranks = gather(output.requires_grad, self.place.ep_group)
        without = [rank for rank, has in enumerate(ranks) if not has]
        if without:
            raise NoHistoryError(
                f"the output of ranks {without} has no history, though hidden states, routing weights "
                "and experts need gradients"
            )

    def result(self, output: Tensor, hidden: Tensor, weights: Tensor) -> Result:
        """The output, and the gradients that are there now."""
        leaves = {"hidden states": hidden, "routing weights": weights}
        leaves |= {f"expert parameter {n}": p for n, p in self.experts.named_parameters()}
        return Result(output.detach(), {name: leaf.grad for name, leaf in leaves.items()})

    def expected(self, *seeds: int) -> Result:
        """By definition, in float64: every expert on every token, times the weights that name it.

        Of several seeds, the output and the inputs' gradients of the last, the parameters' of all.
        """
        self.whole.zero_grad()
        mine: Result | None = None
        for seed in seeds or (1,):
            for number in range(self.place.batches):
                batch = self.batch(number, seed)
                hidden, weights = batch.hidden.requires_grad_(), batch.weights.requires_grad_()
                output = torch.zeros_like(hidden)
                for index in range(self.num_experts):
                    named = torch.where(batch.ids == index, weights, 0.0).sum(1, keepdim=True)
                    output = output + self.whole.expert(index, hidden) * named
                output.backward(batch.cotangent)
                if number == self.place.batch:
                    gradients = {"hidden states": hidden.grad, "routing weights": weights.grad}
                    mine = Result(output.detach(), gradients)
        assert mine is not None
        first = self.place.rank * self.num_local_experts
        for name, parameter in self.whole.named_parameters():
            assert parameter.grad is not None
            local = parameter.grad[first : first + self.num_local_experts].clone()
            mine.gradients[f"expert parameter {name}"] = local
        return mine
