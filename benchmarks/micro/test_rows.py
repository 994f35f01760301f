"""Row work and index work of ep-dispatch: `nox -s micro`.

T tokens of width H, K experts per token of E, P ranks of a group.
"""

from __future__ import annotations

import pytest
import torch

from ep_dispatch.routing import owner_places, transpose_index
from ep_dispatch.rows import gather_rows, sum_rows

H, K, E, P = 1024, 8, 64, 8


@pytest.fixture(params=[256, 2048], ids="T={}".format)
def tokens(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return request.param


def chosen(tokens: int) -> torch.Tensor:
    return torch.rand(tokens, E).topk(K).indices


def index(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = torch.arange(tokens).repeat_interleave(K)[torch.randperm(tokens * K)]
    return rows, *transpose_index(rows, tokens)


@pytest.mark.benchmark(group="gather rows")
def test_gather_rows(benchmark, tokens):
    x, names = torch.randn(tokens, H), index(tokens)
    out = benchmark(gather_rows, x, *names)
    assert torch.equal(out, x[names[0]])
    benchmark.extra_info["bytes"] = 2 * out.numel() * out.element_size()


@pytest.mark.benchmark(group="sum rows")
def test_sum_rows(benchmark, tokens):
    rows, names = torch.randn(tokens * K, H), index(tokens)
    out = benchmark(sum_rows, rows, *names)
    expected = torch.zeros(tokens, H, dtype=torch.float64).index_add_(0, names[0], rows.double())
    assert torch.allclose(out.double(), expected, atol=1e-4)
    benchmark.extra_info["bytes"] = rows.numel() * rows.element_size()


@pytest.mark.benchmark(group="order rows by token")
def test_transpose_index(benchmark, tokens):
    rows = index(tokens)[0]
    order, ends = benchmark(transpose_index, rows, tokens)
    assert torch.equal(rows[order], rows.sort().values)
    assert int(ends[-1]) == len(rows)


@pytest.mark.benchmark(group="places at owners")
def test_owner_places(benchmark, tokens):
    ids = chosen(tokens)
    _, counts, invalid = benchmark(owner_places, ids, experts=E, ranks=P)
    owners = torch.zeros(tokens, P, dtype=torch.bool).scatter_(1, ids // (E // P), True)
    assert torch.equal(counts, owners.sum(0))
    assert not invalid
