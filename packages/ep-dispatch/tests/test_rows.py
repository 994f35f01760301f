"""Row work, without processes: adjoints, precision, and rows that must not be read."""

import pytest
import torch

from ep_dispatch.routing import transpose_index
from ep_dispatch.rows import gather_rows, sum_rows

# For each row its token; and the number of tokens.
INDICES = {
    "rows by token": ([0, 0, 1, 2, 2, 2, 3], 4),
    "rows in any order": ([2, 0, 3, 2, 1, 0, 2], 4),
    "tokens without rows": ([4, 1, 1], 6),
    "no row": ([], 3),
    "no token": ([], 0),
}


@pytest.mark.parametrize("name", INDICES)
def test_gather_and_sum_are_transposes(name):
    """<gather(x), y> == <x, sum(y)>, and each one's backward is the other."""
    values, tokens = INDICES[name]
    index = torch.tensor(values, dtype=torch.int64)
    both = index, *transpose_index(index, tokens)
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(index), 3, dtype=torch.float64, requires_grad=True)
    rows, sums = gather_rows(x, *both), sum_rows(y, *both)
    torch.testing.assert_close((rows * y).sum(), (x * sums).sum())
    assert torch.autograd.gradcheck(lambda a: gather_rows(a, *both), (x,))
    assert torch.autograd.gradcheck(lambda a: sum_rows(a, *both), (y,))
    assert torch.autograd.gradgradcheck(lambda a: gather_rows(a, *both), (x,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 3, 8, 100])
def test_sum_adds_each_token_its_rows(dtype, width):
    index = torch.randint(0, 9, (40,))
    rows = torch.randn(40, width).to(dtype)
    expected = torch.zeros(9, width, dtype=torch.float64).index_add(0, index, rows.double())
    sums = sum_rows(rows, index, *transpose_index(index, 9))
    assert sums.dtype == dtype
    torch.testing.assert_close(sums, expected.to(dtype))


def test_operators_are_known_to_the_compiler():
    """Schema, fake kernel and autograd registration agree with what they do."""
    index = torch.tensor([2, 0, 2, 1])
    both = index, *transpose_index(index, 3)
    for operator, rows in ((torch.ops.ep.gather_rows, 3), (torch.ops.ep.sum_rows, 4)):
        x = torch.randn(rows, 5, requires_grad=True)
        torch.library.opcheck(operator.default, (x, *both))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_accumulated_wide(dtype):
    """A sum of 256 ones and small numbers: in the rows' own dtype the small ones would vanish."""
    K = 257
    rows = torch.full((K, 1), 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12, dtype=dtype)
    rows[0] = 1.0
    zeros = torch.zeros(K, dtype=torch.long)
    index = zeros, *transpose_index(zeros, 1)
    exact = rows.double().sum()
    assert sum_rows(rows, *index).item() == exact.to(dtype).item() != 1.0
    x = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    gather_rows(x, *index).backward(rows)
    assert x.grad.item() == exact.to(dtype).item()


def test_only_indices_are_saved():
    """What backward keeps: integers."""
    saved = []
    index = torch.tensor([0, 2, 1, 2])
    both = index, *transpose_index(index, 3)
    x = torch.randn(3, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sum_rows(gather_rows(x, *both), *both)
    assert saved
    assert not any(t.is_floating_point() for t in saved)
