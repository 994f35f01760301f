"""Each kernel compiles for GPUs, of which none is needed: run by `test_triton.py`."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ep_kernels.triton_kernels import activation, products, rotary, rows

WIDE = {"bf16": tl.float32, "fp64": tl.float64}


def check(kernel: Any, pointers: dict[str, str], capability: int, **constants: Any) -> None:
    """Compile `kernel`; what is neither a pointer nor a constant is an int32."""
    signature = {
        name: pointers.get(name, "constexpr" if name in constants else "i32")
        for name in kernel.arg_names
    }
    # What a GPU specializes for: multiples of 16, at which rows are copied by vectors.
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in pointers
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]


@pytest.mark.parametrize(("dtype", "capability", "ones"), [("bf16", 80, False), ("fp64", 90, True)])
def test_elementwise(dtype: str, capability: int, ones: bool) -> None:
    """A size of 1 is a constant to Triton, of which not all works that works on others."""
    x, i, wide = f"*{dtype}", "*i64", {"WIDE": WIDE[dtype], "BLOCK": 256}
    one = dict.fromkeys(["width", "stride", "tiles", "inner", "pre_stride", "num_slots"], 1)

    def call(kernel: Any, pointers: dict[str, str], **constants: Any) -> None:
        sizes = {k: v for k, v in one.items() if k in kernel.arg_names} if ones else {}
        check(kernel, pointers, capability, **constants, **sizes)

    call(rows._gather_kernel, {"rows": x, "index": i, "out": x}, BLOCK=256)
    for weighted, slots in [(False, 1), (True, 32)]:
        pointers = dict.fromkeys(["values", "weights", "out"], x) | {"order": i, "starts": i}
        call(rows._sum_kernel, pointers, WEIGHTED=weighted, SLOTS=slots, **wide)
    pointers = {"pre": x, "weights": "*fp32", "out": x}
    call(activation._forward_kernel, pointers, **wide)
    dots = "*fp64" if dtype == "fp64" else "*fp32"
    for wanted in (False, True):
        more = {"grad": x, "dots": dots}
        call(activation._backward_kernel, pointers | more, WANTED=wanted, **wide)


@pytest.mark.parametrize(("dtype", "capability", "rest"), [("bf16", 90, 0), ("fp64", 80, 64)])
@pytest.mark.parametrize("back", [False, True])
def test_rotary(dtype: str, capability: int, rest: int, back: bool) -> None:
    pointers = dict.fromkeys(["x", "cos", "sin", "out"], f"*{dtype}")
    sizes = {"HEADS": 16, "HALF": 64, "REST": rest, "WIDE": WIDE[dtype], "BACK": back}
    check(rotary._rotary_kernel, pointers, capability, **sizes)


@pytest.mark.parametrize(
    ("dtype", "capability", "ones"), [("bf16", 90, False), ("fp32", 80, False), ("bf16", 80, True)]
)
def test_products(dtype: str, capability: int, ones: bool) -> None:
    x, i, size = f"*{dtype}", "*i64", 64 if dtype == "fp32" else 128
    tile = {"PRECISION": "ieee", "COLUMNS": size}
    one = ["num_experts", "inner", "outer", "rows_stride", "expert_stride", "tiles_across"]
    one += ["inner_stride"]
    table = dict.fromkeys(["index", "ends", "tile_expert", "tile_slot"], i)
    check(
        products._rows_kernel,
        {"rows": x, "weight": x, "out": x} | table,
        capability,
        TAKEN=not ones,
        SLOTS=64,
        INNER=32,
        **tile,
        **(dict.fromkeys(one, 1) if ones else {"outer_stride": 1}),
    )
    one = ["height", "width", "left_stride", "right_stride", "tiles_down", "tiles_across"]
    table = dict.fromkeys(["left_index", "right_index", "ends"], i)
    check(
        products._matrices_kernel,
        {"left": x, "right": x, "out": x} | table,
        capability,
        LEFT_TAKEN=not ones,
        RIGHT_TAKEN=ones,
        ROWS=size,
        SLOTS=32,
        **tile,
        **(dict.fromkeys(one, 1) if ones else {}),
    )
