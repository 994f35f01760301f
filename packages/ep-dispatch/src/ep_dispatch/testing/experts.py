"""Experts whose every sum is exact, and smooth ones.

[Note: exact sums]
Hidden states, routing weights, parameters and output gradients are small integers. Each product and
each partial sum is then an integer below 2**24, which float32 holds exactly, in whatever order it is
summed. So output and gradients of a right dispatcher equal the reference bit for bit, and a fault shows
however small it is: there is no bound that it could hide under.

R = rows, H = hidden size, J = slots of a row, E = experts of a layer.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

__all__ = ["KitExperts", "LinearExperts", "ScalingExperts", "SmoothExperts"]


class KitExperts(nn.Module):
    """Some of a layer's experts: `(rows [R, H], local_expert_ids [R, J], weights [R, J]) -> [R, H]`.

    A slot with an id that is none of `0 .. num_experts - 1` is skipped, and its row is not read (it may
    hold anything). Each parameter has the experts in dimension 0. Every parameter takes part in every call, if with no row: a dispatcher need only call
    it for the parameters to have a gradient.
    """

    num_experts: int

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """What expert `index` makes of the rows."""
        raise NotImplementedError

    def forward(self, rows: Tensor, local_expert_ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the outputs of each row's experts, in the dtype of `rows`."""
        out = torch.zeros_like(rows)
        for index in range(self.num_experts):
            row, slot = torch.where(local_expert_ids == index)
            scaled = self.expert(index, rows[row]) * weights[row, slot, None]
            out = out.index_add(0, row, scaled.to(out.dtype))
        return out

    def local(self, first: int, count: int) -> KitExperts:
        """A copy that holds experts `first` to `first + count - 1`."""
        mine = type(self).__new__(type(self))
        nn.Module.__init__(mine)
        mine.num_experts = count
        for name, parameter in self.named_parameters():
            kept = parameter.detach()[first : first + count].clone()
            mine.register_parameter(name, nn.Parameter(kept))
        return mine


class ScalingExperts(KitExperts):
    """Expert e multiplies by a small integer of its own: `scale` [E]."""

    def __init__(self, num_experts: int, hidden: int, generator: Generator) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.scale = nn.Parameter(torch.arange(1, num_experts + 1, dtype=torch.float64))

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """A multiple of the rows."""
        return rows * self.scale[index]


class LinearExperts(KitExperts):
    """Expert e is a matrix of small integers and a bias: `weight` [E, H, H], `bias` [E, H]."""

    def __init__(self, num_experts: int, hidden: int, generator: Generator) -> None:
        super().__init__()
        self.num_experts = num_experts
        shape = (num_experts, hidden, hidden)
        weight = torch.randint(-2, 3, shape, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(weight)
        bias = torch.randint(-2, 3, shape[:2], generator=generator, dtype=torch.float64)
        self.bias = nn.Parameter(bias)

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """A linear map of the rows, which makes something of a row of zeros too."""
        return nn.functional.linear(rows, self.weight[index], self.bias[index])


class SmoothExperts(KitExperts):
    """Gated experts over real numbers, whose gradients depend on the saved rows: `up`, `gate` [E, H, H]."""

    def __init__(self, num_experts: int, hidden: int, generator: Generator) -> None:
        super().__init__()
        self.num_experts = num_experts
        shape = (num_experts, hidden, hidden)
        for name in ("up", "gate"):
            values = torch.randn(shape, generator=generator, dtype=torch.float64) / hidden**0.5
            self.register_parameter(name, nn.Parameter(values))

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """Like the first half of a gated MLP."""
        up, gate = self.get_parameter("up")[index], self.get_parameter("gate")[index]
        return nn.functional.silu(rows @ gate.T) * (rows @ up.T)
