"""What the router may choose: named workloads, the same on every rank from a seed.

T = tokens of a batch, K = experts per token, E = experts of a layer, P = ranks of the EP group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

__all__ = ["WORKLOADS", "Route", "Workload"]

Route = Callable[[int, int, int, int, Generator], Tensor]
"""`(T, K, E, E/P, generator) -> ids [T, K]`, global expert ids or -1."""


@dataclass(frozen=True)
class Workload:
    """One way in which tokens are spread over batches and experts.

    Attributes:
        what: in words.
        route: chooses the experts.
        tokens: T of each batch; batch b has `tokens[b % len(tokens)]`. None: E in every batch.
        top_k: K, or as many as there are experts, if that is fewer. None: E.
        equal: all tokens of a batch are the same, and all routing weights.
        needs: capabilities (`CAPABILITIES`) without which a dispatcher cannot run it.
    """

    what: str
    route: Route
    tokens: tuple[int, ...] | None = (6,)
    top_k: int | None = 2
    equal: bool = False
    needs: frozenset[str] = frozenset()

    def tokens_of(self, batch: int, num_experts: int) -> int:
        """T of batch `batch`."""
        return num_experts if self.tokens is None else self.tokens[batch % len(self.tokens)]

    def ids(
        self, batch: int, num_experts: int, num_local_experts: int, generator: Generator
    ) -> Tensor:
        """The expert ids [T, K] of batch `batch`."""
        top_k = num_experts if self.top_k is None else min(self.top_k, num_experts)
        tokens = self.tokens_of(batch, num_experts)
        ids = self.route(tokens, top_k, num_experts, num_local_experts, generator)
        return ids.contiguous()  # as a router's top-k is


def _distinct(tokens: int, top_k: int, experts: int, generator: Generator) -> Tensor:
    """Ids below `experts`, no token with one twice, in any order."""
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]


def _random(tokens: int, top_k: int, experts: int, local: int, generator: Generator) -> Tensor:
    return _distinct(tokens, top_k, experts, generator)


def _balanced(tokens: int, top_k: int, experts: int, local: int, generator: Generator) -> Tensor:
    return torch.arange(tokens * top_k).view(tokens, top_k) % experts


def _hot_expert(tokens: int, top_k: int, experts: int, local: int, generator: Generator) -> Tensor:
    others = _distinct(tokens, top_k - 1, experts - 1, generator)
    return torch.cat([torch.full((tokens, 1), experts - 1), others], 1)


def _hot_rank(tokens: int, top_k: int, experts: int, local: int, generator: Generator) -> Tensor:
    return experts - local + _distinct(tokens, min(top_k, local), local, generator)


def _repeated(tokens: int, top_k: int, experts: int, local: int, generator: Generator) -> Tensor:
    ids = _distinct(tokens, top_k, experts, generator)
    ids[:, 1:2] = ids[:, :1]
    ids[::3] = ids[::3, :1]
    return ids


def _ties(tokens: int, top_k: int, experts: int, local: int, generator: Generator) -> Tensor:
    return _distinct(1, top_k, experts, generator).repeat(tokens, 1)


def _skipped(tokens: int, top_k: int, experts: int, local: int, generator: Generator) -> Tensor:
    ids = _distinct(tokens, top_k, experts, generator)
    ids[torch.rand(tokens, top_k, generator=generator) < 0.4] = -1
    ids[: tokens // 3] = -1
    return ids


WORKLOADS: dict[str, Workload] = {
    "balanced": Workload("every expert gets as many slots", _balanced, tokens=None),
    "hot_expert": Workload("every token names the last expert", _hot_expert),
    "hot_rank": Workload("all slots go to the last rank; the experts of others idle", _hot_rank),
    "no_tokens": Workload(
        "some ranks hold no token", _random, tokens=(0, 5), needs=frozenset({"empty", "uneven"})
    ),
    "nobody": Workload("no rank holds a token", _random, tokens=(0,), needs=frozenset({"empty"})),
    "ragged": Workload(
        "ranks hold different numbers of tokens",
        _random,
        tokens=(7, 1, 12, 3),
        top_k=3,
        needs=frozenset({"uneven"}),
    ),
    "repeated": Workload(
        "tokens name an expert two or three times",
        _repeated,
        top_k=3,
        needs=frozenset({"repeated"}),
    ),
    "ties": Workload("equal tokens, equal weights, equal experts", _ties, top_k=3, equal=True),
    "skipped": Workload(
        "slots, and whole tokens, with id -1",
        _skipped,
        tokens=(9,),
        top_k=3,
        needs=frozenset({"skipped"}),
    ),
    "top_1": Workload("one expert per token", _random, top_k=1),
    "top_all": Workload("every token names every expert", _random, top_k=None),
    "one_token": Workload("one token per batch, as in decoding", _random, tokens=(1,)),
}
"""By name, the workloads that `check` runs."""
