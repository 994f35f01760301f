"""Rows that travel in a narrower dtype: the error that it costs, and no more."""

import pytest
import torch
import torch.distributed as dist

from ep_dispatch import AllToAll
from ep_dispatch.wire import decode, encode

# A bound for one rounding of each of: rows, outputs, gradients (always in bf16); 2^-9 and 2^-4 are those of
# bf16 and e4m3.
BOUNDS = {torch.bfloat16: 2**-7, torch.float16: 2**-7, torch.float8_e4m3fn: 2**-3}


@pytest.mark.parametrize("wire", BOUNDS)
@pytest.mark.parametrize("name", ["all_to_all", "all_to_all_hierarchical"])
def test_error_is_that_of_the_rounding(ranks, moe, wire, name):
    def run(rank):
        more = (("ranks_per_node", 4),) if name != "all_to_all" else ()
        settings = (("wire_dtype", wire), *more)
        case = moe.Case(ep=8, tp=2, dtype=torch.float32, name=name, settings=settings)
        moe.check(rank, case, bound=BOUNDS[wire])
        with pytest.raises(AssertionError):  # something did travel in the narrow dtype
            moe.check(rank, case, bound=BOUNDS[wire] / 1000)

    ranks.run(run)


@pytest.mark.parametrize("wire", BOUNDS)
def test_small_gradients_cross(ranks, wire):
    def run(rank):
        gradients = []
        for dtype in (None, wire):
            hidden = torch.ones(4, 8, requires_grad=True)
            layer = AllToAll(
                lambda rows, ids, weights: rows * weights.sum(1, keepdim=True),
                num_local_experts=1,
                ep_group=dist.group.WORLD,
                wire_dtype=dtype,
            )
            out = layer(hidden, torch.full((4, 1), 1 - rank), torch.ones(4, 1))
            (1e-9 * out.sum()).backward()
            gradients.append(hidden.grad)
        torch.testing.assert_close(*gradients, rtol=2**-7, atol=0.0)

    ranks.run(run, world=2)


@pytest.mark.parametrize("wire", [None, *BOUNDS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 16), (0, 16), (3, 1), (1, 7)])
def test_encoding_is_undone(wire, dtype, shape):
    x = torch.randn(shape).to(dtype) * torch.logspace(-20, 8, shape[0])[:, None].to(dtype)
    x[:1] = 0
    back = decode(encode(x, wire), wire, dtype)
    assert back.dtype == dtype
    if wire is None or wire.itemsize >= dtype.itemsize:
        assert torch.equal(back, x)
    elif wire is torch.float16:
        pass  # large and small rows leave its range: the user's choice
    else:
        scale = x.abs().amax(1, keepdim=True) if wire is torch.float8_e4m3fn else x.abs()
        assert ((back - x).abs() <= scale * (2**-4 if wire.itemsize == 1 else 2**-8)).all()


def test_not_a_wire_dtype():
    with pytest.raises(ValueError, match=r"wire_dtype must be None or one of .*got torch.int8"):
        AllToAll(lambda *args: None, num_local_experts=1, wire_dtype=torch.int8)


def test_what_is_not_finite_stays_so():
    for value in (float("nan"), float("inf")):
        x = torch.tensor([[1.0, value], [1.0, 2.0]])
        back = decode(encode(x, torch.float8_e4m3fn), torch.float8_e4m3fn, torch.float32)
        assert not back[0].isfinite().all()
        assert back[1].isfinite().all()


def test_rows_of_any_size_stay_numbers():
    """As small as float32 holds them, and larger than it does."""
    small = torch.tensor([[3e-43, 0.0], [1e-38, 1e-40]])
    large = torch.tensor([[1e300, 1.0], [-1e300, 0.0]], dtype=torch.float64)
    for x in (small, large):
        back = decode(encode(x, torch.float8_e4m3fn), torch.float8_e4m3fn, x.dtype)
        assert back.isfinite().all()
    assert back[0, 0] > 1e38
    assert back[1, 0] < -1e38
