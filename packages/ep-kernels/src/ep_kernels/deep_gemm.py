"""Products by DeepGEMM's grouped kernels, and the layout of rows that they take.

Written against DeepGEMM 2.6.1 (https://github.com/deepseek-ai/DeepGEMM) and sgl-deep-gemm 0.2.5,
SGLang's build of it. Found under the import name `deep_gemm`, whichever distribution brings it.

Shape letters: E experts held here, S slots, M rows of the padded layout, A and B sizes of a product.

[Note: the padded layout]
The kernels work on blocks of rows, all of one expert. So each expert's slots begin at a multiple of
the library's alignment, and `expert_of_row` [M] names each row's expert, -1 for padding. How many
rows there are depends on the routing, which the host does not know: M is the most there can be, with
alignment - 1 rows of padding for each of min(S, E) experts. A row's product depends on no other row,
so padding may hold anything, and what comes out of it, written or not, is not read. Weight gradients
are sums over an expert's rows: for those, padding is zero.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from .products import GroupedProducts, Taken

_FUNCTIONS = (
    "get_mk_alignment_for_contiguous_layout",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
)
_ARCHITECTURES = (9, 10)  # majors of the compute capabilities that there are kernels for
# The inner size of a bf16 product is a multiple of it, and each size is the inner one of some product.
_STEP = 64


def load_library() -> ModuleType:
    """Import `deep_gemm`.

    Raises:
        ImportError: it cannot be imported, or lacks the grouped kernels; the message says which.
    """
    advice = "install sgl-deep-gemm, or DeepGEMM 2.5 or newer from its sources"
    try:
        library = importlib.import_module("deep_gemm")
    except Exception as error:  # its import runs code that looks for a CUDA toolkit
        raise ImportError(
            f"deep_gemm cannot be imported ({type(error).__name__}: {error}); {advice}"
        ) from error
    if missing := [name for name in _FUNCTIONS if not hasattr(library, name)]:
        version = getattr(library, "__version__", "(no version)")
        raise ImportError(f"deep_gemm {version} lacks {', '.join(missing)}; {advice}")
    return library


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None for another device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def place_refusal(device: torch.device) -> str | None:
    """All that keeps `deep_gemm` from running on a device; on the meta device, that it is missing."""
    refusals = []
    has = capability(device)
    # Where weights on the meta device will be is not known yet.
    if device.type != "meta" and (has is None or has[0] not in _ARCHITECTURES):
        got = f"got {device.type}" if has is None else f"this one has {has}"
        refusals.append(
            f"deep_gemm needs a GPU of compute capability 9.x or 10.x (Hopper, Blackwell), {got}"
        )
    try:
        load_library()
    except ImportError as error:
        refusals.append(str(error))
    return "; ".join(refusals) or None


def products_refusal(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> str | None:
    """What keeps `DeepGemmProducts` from computing products of such sizes."""
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace deep_gemm"
    if dtype is not torch.bfloat16:
        return f"deep_gemm multiplies bfloat16, not {dtype}"
    if odd := [size for size in sizes if size % _STEP]:
        return f"deep_gemm needs sizes that are multiples of {_STEP}: {odd}"
    return place_refusal(device)


@dataclass(frozen=True)
class PaddedLayout:
    """Where slots grouped by expert go, so that each expert begins at a multiple of an alignment.

    Attributes:
        row_of_slot: [S] int64, the row of each slot. Slots past the last offset go past the rows of
            the last expert.
        slot_of_row: [M] int64, the slot of each row; of a row of padding, any.
        expert_of_row: [M] int32, -1 for padding and for slots past the last offset.
        sizes: [E] int32, each expert's number of rows, padding included.
    """

    row_of_slot: Tensor
    slot_of_row: Tensor
    expert_of_row: Tensor
    sizes: Tensor

    @classmethod
    def build(cls, offsets: Tensor, num_slots: int, alignment: int) -> PaddedLayout:
        """The layout of S slots whose experts end at `offsets` [E]. No host synchronization."""
        num_experts, ends = offsets.shape[0], offsets.to(torch.int64)
        counts = ends.diff(prepend=ends.new_zeros(1))
        sizes = (counts + alignment - 1) // alignment * alignment
        # By how much each expert's slots move, and those past the last offset.
        moves = torch.nn.functional.pad((sizes - counts).cumsum(0), (1, 0))
        slots = torch.arange(num_slots, device=offsets.device)
        expert = torch.searchsorted(ends, slots, right=True)
        row_of_slot = slots + moves[expert]

        most = num_slots + min(num_slots, num_experts) * (alignment - 1)
        num_rows = -(-most // alignment) * alignment
        expert_of_row = torch.full((num_rows,), -1, dtype=torch.int32, device=offsets.device)
        used = expert.masked_fill(expert == num_experts, -1)
        expert_of_row[row_of_slot] = used.to(torch.int32)
        slot_of_row = torch.zeros(num_rows, dtype=torch.int64, device=offsets.device)
        slot_of_row[row_of_slot] = slots
        return cls(row_of_slot, slot_of_row, expert_of_row, sizes.to(torch.int32))

    def padded(self, slots: Tensor | Taken) -> Tensor:
        """From slots [S, A] to rows [M, A]. Padding repeats some slot."""
        if isinstance(slots, Tensor):
            return slots.index_select(0, self.slot_of_row)
        return slots.rows.index_select(0, slots.index[self.slot_of_row])

    def unpadded(self, rows: Tensor) -> Tensor:
        """From rows [M, B] to slots [S, B]."""
        return rows.index_select(0, self.row_of_slot)

    def without_padding(self, rows: Tensor) -> Tensor:
        """`rows` [M, A], overwritten by zeros where they belong to no expert."""
        return rows.masked_fill_((self.expert_of_row < 0)[:, None], 0)


class DeepGemmProducts:
    """By DeepGEMM, in bfloat16, summed in float32.

    `rows` costs no host synchronization, a copy into the padded layout (for `Taken` rows the one
    that they need anyway) and one back. `matrices` are DeepGEMM's where it has a k-grouped kernel:
    that one takes sizes from the host, so the first call waits for the device, and adds to
    float32, from which the result is rounded; else torch's grouped_mm.
    """

    def __init__(self, offsets: Tensor, num_slots: int) -> None:
        self._library = load_library()
        alignment = self._library.get_mk_alignment_for_contiguous_layout()
        self._layout = PaddedLayout.build(offsets, num_slots, alignment)
        self._offsets = offsets

    def rows(self, rows: Tensor | Taken, weight: Tensor) -> Tensor:
        """`rows` [S, A] times each expert's part of `weight` [E, A, B]: [S, B]."""
        padded = self._layout.padded(rows)
        out = padded.new_empty(padded.shape[0], weight.shape[2])
        # The kernel takes [E, B, A], each matrix stored by rows or by columns.
        matrices = weight.to(padded.dtype).mT
        if not (matrices.is_contiguous() or matrices.mT.is_contiguous()):
            matrices = matrices.contiguous()
        self._library.m_grouped_bf16_gemm_nt_contiguous(
            padded, matrices, out, self._layout.expert_of_row
        )
        return self._layout.unpadded(out)

    def matrices(self, left: Tensor | Taken, right: Tensor | Taken, dtype: torch.dtype) -> Tensor:
        """Per expert, `left` [S, A] transposed times `right` [S, B]: [E, A, B] of `dtype`."""
        product = getattr(self._library, "k_grouped_bf16_gemm_tn_contiguous", None)
        if product is None:
            return GroupedProducts(self._offsets).matrices(left, right, dtype)
        one, other = (
            self._layout.without_padding(self._layout.padded(x))[: sum(self._sizes)]
            for x in (left, right)
        )
        shape = len(self._sizes), one.shape[1], other.shape[1]
        out = torch.zeros(shape, dtype=torch.float32, device=one.device)  # what it adds to
        product(one, other, out, self._sizes, self._layout.sizes, out)
        return out.to(dtype)

    @cached_property
    def _sizes(self) -> list[int]:
        sizes: list[int] = self._layout.sizes.tolist()
        return sizes
