"""`deep_gemm` as far as it is called, in plain torch: the functions of 2.6.1 and what they insist on.

What the kernels leave unwritten or compute from padding is NaN here, so that it shows where read.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

import ep_kernels


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    without: tuple[str, ...] = (),
    alignment: int = 128,
    capability: tuple[int, int] | None = (9, 0),
) -> ModuleType:
    """Put the stand-in where `import deep_gemm` finds it, and let this device pass for a GPU."""
    library = ModuleType("deep_gemm")
    functions = (
        m_grouped_bf16_gemm_nt_contiguous,
        m_grouped_fp8_gemm_nt_contiguous,
        k_grouped_bf16_gemm_tn_contiguous,
    )
    for function in functions:
        setattr(library, function.__name__, function)
    library.get_mk_alignment_for_contiguous_layout = lambda: alignment
    library.alignment, library.major = alignment, capability and capability[0]
    library.calls = []
    for name in without:
        delattr(library, name)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    monkeypatch.setattr(ep_kernels.deep_gemm, "capability", lambda _: capability)
    monkeypatch.setattr(ep_kernels.fp8, "capability", lambda _: capability)
    return library


def _called(name: str) -> ModuleType:
    library = sys.modules["deep_gemm"]
    library.calls.append(name)
    return library


def _by_blocks(product: object, d: Tensor, layout: Tensor, alignment: int) -> None:
    """A block's first row decides whose it is; the rest of it is that expert's or padding."""
    assert layout.dtype is torch.int32
    assert layout.is_contiguous()
    assert layout.shape == d.shape[:1]
    assert d.dtype is torch.bfloat16
    assert d.is_contiguous()
    for start in range(0, d.shape[0], alignment):
        block = slice(start, start + alignment)
        experts = layout[block]
        valid = experts >= 0
        assert (experts[valid] == experts[0]).all(), "two experts in a block"
        assert not (valid[1:] & ~valid[:-1]).any(), "padding before rows"
        d[block] = float("nan")
        if valid.any():
            out = product(block, int(experts[0]))  # type: ignore[operator]
            d[block][valid] = out[valid].to(d.dtype)


def m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False,
                                      ensure_zero_padding=True, expected_m_for_psum_layout=None):  # fmt: skip
    library = _called("m_grouped_bf16")
    (m, k), (groups, n, k_) = a.shape, b.shape
    assert (k, (m, n)) == (k_, d.shape)
    assert a.dtype is b.dtype is torch.bfloat16
    assert k % 64 == 0
    assert n % 8 == 0
    assert a.is_contiguous()
    assert b.stride(0) == n * k
    assert 1 in (b.stride(1), b.stride(2))
    assert int(grouped_layout.max()) < groups
    wide = b.float()
    _by_blocks(lambda block, e: a[block].float() @ wide[e].T, d, grouped_layout, library.alignment)


def m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None,
                                     compiled_dims="nk", disable_ue8m0_cast=False, use_psum_layout=False,
                                     ensure_zero_padding=True, expected_m_for_psum_layout=None):  # fmt: skip
    library = _called("m_grouped_fp8")
    (x, x_scale), (w, w_scale) = a, b
    (m, k), (groups, n, k_) = x.shape, w.shape
    assert (k, (m, n)) == (k_, d.shape)
    assert x.dtype is w.dtype is torch.float8_e4m3fn
    assert x_scale.dtype is w_scale.dtype is torch.float32
    assert x.is_contiguous()
    assert w.is_contiguous()
    assert w_scale.is_contiguous()
    assert x_scale.shape == (m, -(-k // 128))
    assert w_scale.shape == (groups, -(-n // 128), -(-k // 128))
    assert x_scale.isfinite().all(), "scales of padding are packed too"
    if library.major == 10:
        for scale in (x_scale, w_scale):
            assert (torch.frexp(scale).mantissa == 0.5).all(), "scales are powers of two"
    rows = x.float() * x_scale.repeat_interleave(128, 1)
    matrices = w.float() * w_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    _by_blocks(lambda block, e: rows[block] @ matrices[e].T, d, grouped_layout, library.alignment)


def k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks_cpu, grouped_layout, c=None, compiled_dims="mn",
                                      use_psum_layout=False):  # fmt: skip
    library = _called("k_grouped_bf16")
    groups, m, n = d.shape
    assert a.shape == (sum(ks_cpu), m)
    assert b.shape == (sum(ks_cpu), n)
    assert a.dtype is b.dtype is torch.bfloat16
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert d.is_contiguous()
    assert d.dtype is torch.float32
    assert c is d
    assert grouped_layout.dtype is torch.int32
    assert grouped_layout.tolist() == ks_cpu
    assert len(ks_cpu) == groups
    assert all(k % library.alignment == 0 for k in ks_cpu)
    for one, other, to in zip(a.split(ks_cpu), b.split(ks_cpu), d, strict=True):
        to += one.float().T @ other.float()
