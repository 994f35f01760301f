"""Row work, without processes: adjoints, precision, and rows that must not be read."""

import pytest
import torch

from ep_dispatch.routing import SlotOrder, inverse_permutation
from ep_dispatch.rows import gather_rows, permute_rows, sum_rows


def order_of(ids, num_experts):
    order = SlotOrder.of(ids, num_experts)
    slots = order.slots[: int(order.counts.sum())]
    return slots // ids.shape[1], order.rows


IDS = {
    "all slots": torch.tensor([[0, 2], [1, 2], [2, 0], [3, 1], [2, 2]]),
    "skipped slots": torch.tensor([[0, -1], [1, 2], [-1, -1], [3, 1], [-1, 2]]),
    "one slot": torch.tensor([[0], [2], [1]]),
    "one slot, skipped": torch.tensor([[-1], [2], [1]]),
    "nothing but skipped": torch.full((3, 2), -1),
    "no token": torch.zeros(0, 2, dtype=torch.long),
}


@pytest.mark.parametrize("name", IDS)
def test_gather_and_sum_are_transposes(name):
    """<gather(x), y> == <x, sum(y)>, and each one's backward is the other."""
    token_of_row, row_of_slot = order_of(IDS[name], 4)
    x = torch.randn(len(IDS[name]), 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(token_of_row), 3, dtype=torch.float64, requires_grad=True)
    rows, sums = gather_rows(x, token_of_row, row_of_slot), sum_rows(y, token_of_row, row_of_slot)
    torch.testing.assert_close((rows * y).sum(), (x * sums).sum())
    assert torch.autograd.gradcheck(lambda a: gather_rows(a, token_of_row, row_of_slot), (x,))
    assert torch.autograd.gradcheck(lambda a: sum_rows(a, token_of_row, row_of_slot), (y,))
    assert torch.autograd.gradgradcheck(lambda a: gather_rows(a, token_of_row, row_of_slot), (x,))


def test_sum_adds_each_token_its_rows():
    token_of_row, row_of_slot = order_of(IDS["skipped slots"], 4)
    rows = torch.randn(len(token_of_row), 3)
    expected = torch.zeros(5, 3).index_add(0, token_of_row, rows)
    torch.testing.assert_close(sum_rows(rows, token_of_row, row_of_slot), expected)


def test_what_a_missing_row_is_replaced_by_does_not_matter():
    """A slot without a row adds zero though the row read in its place holds NaN."""
    token_of_row, row_of_slot = order_of(torch.tensor([[0, -1], [1, -1]]), 2)
    rows = torch.tensor([[1.0], [float("nan")]])
    sums = sum_rows(rows, token_of_row, row_of_slot)
    assert sums[0].item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_accumulated_wide(dtype):
    """A sum of 256 ones and small numbers: in the rows' own dtype the small ones would vanish."""
    K = 257
    rows = torch.full((K, 1), 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12, dtype=dtype)
    rows[0] = 1.0
    index = torch.zeros(K, dtype=torch.long), torch.arange(K)[None]
    exact = rows.double().sum()
    assert sum_rows(rows, *index).item() == exact.to(dtype).item() != 1.0
    x = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    gather_rows(x, *index).backward(rows)
    assert x.grad.item() == exact.to(dtype).item()


def test_permutation_undone_is_the_identity():
    order = torch.randperm(7)
    inverse = inverse_permutation(order)
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(permute_rows(permute_rows(x, order, inverse), inverse, order), x)
    assert torch.autograd.gradcheck(lambda a: permute_rows(a, order, inverse), (x,))


def test_only_indices_are_saved():
    """What backward keeps: integers."""
    saved = []
    token_of_row, row_of_slot = order_of(IDS["all slots"], 4)
    x = torch.randn(5, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sum_rows(gather_rows(x, token_of_row, row_of_slot), token_of_row, row_of_slot)
    assert saved
    assert not any(t.is_floating_point() for t in saved)
