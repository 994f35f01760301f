"""The cast of rows to FP8 with power-of-two scales."""

import torch

from ep_dispatch.fp8 import quantize_rows


def restored(values, scales):
    exponents = scales.view(torch.uint8).int() - 127
    groups = values.double().view(*exponents.shape, 32)
    return torch.ldexp(groups, exponents.unsqueeze(-1)).view(values.shape)


def test_error_is_the_rounding_of_fp8():
    """Three mantissa bits: 1/16 of each value, where it is not tiny beside the largest of its 32."""
    x = torch.randn(7, 256) * torch.logspace(-30, 30, 7)[:, None]
    values, scales = quantize_rows(x)
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, (7, 256))
    assert (scales.dtype, scales.shape) == (torch.int32, (7, 2))
    largest = (
        x.view(7, 8, 32).abs().amax(-1, keepdim=True).expand(7, 8, 32).reshape(7, 256).double()
    )
    bound = torch.maximum(x.abs().double() / 16, largest * 2.0**-17)
    assert ((restored(values, scales) - x).abs() <= bound).all()


def test_scale_is_the_smallest_that_fits():
    """448 fits exactly; the next number needs twice the scale; nothing is clipped."""
    x = torch.zeros(3, 128)
    x[0, 0], x[1, 0], x[2, 0] = 448.0, 448.0001, -224.0
    values, scales = quantize_rows(x)
    assert [s & 0xFF for s in scales[:, 0].tolist()] == [127, 128, 126]
    assert restored(values, scales)[:, 0].tolist() == [448.0, 448.0, -224.0]


def test_zeros_stay_zeros_and_no_row_is_a_row():
    values, scales = quantize_rows(torch.zeros(2, 128, dtype=torch.bfloat16))
    assert (restored(values, scales) == 0).all()
    values, scales = quantize_rows(torch.zeros(0, 128))
    assert values.shape == (0, 128)
    assert scales.shape == (0, 1)
