"""The MLP of experts whose weights are stored in FP8, by DeepGEMM. Inference only.

Weights are float8_e4m3fn with a scale per block of 128 x 128, as the fine-grained FP8 checkpoints of
transformers have them; activations are cast to the same, with a scale per 128 values of a row.

Shape letters: H hidden size, I intermediate size, U first projection's width, E experts held here,
R rows, S slots, M rows of the padded layout ([Note: the padded layout] in deep_gemm.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .deep_gemm import PaddedLayout, capability, load_library
from .local import local_tensor
from .rows import accumulation_dtype, sum_rows

_BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# The major compute capability from which on DeepGEMM takes a scale's exponent alone.
_EXPONENT_SCALES_FROM = 10


class FP8Weights(NamedTuple):
    """`up` [E, U, H] and `down` [E, H, I], float8_e4m3fn, and what each of their blocks is to be
    multiplied by: `up_scale` [E, U / 128, H / 128], `down_scale` [E, H / 128, I / 128].
    """  # noqa: D205

    up: Tensor
    up_scale: Tensor
    down: Tensor
    down_scale: Tensor


@dataclass(frozen=True)
class FP8Spec:
    """How an experts module stored in FP8 is put together.

    Attributes:
        up: name of the first weight.
        down: name of the second weight. Each has its scales under its name with `_scale_inv`.
        activation: name of the module's own way from the first projection to the second one's input.
    """

    up: str
    down: str
    activation: str

    @classmethod
    def from_module(cls, experts: nn.Module) -> FP8Spec:
        """The spec of a module that `holds_fp8`. Reads one attribute."""
        if getattr(experts, "has_gate", True):
            return cls("gate_up_proj", "down_proj", "_apply_gate")
        return cls("up_proj", "down_proj", "act_fn")

    @property
    def names(self) -> tuple[str, str, str, str]:
        """Of the parameters, in the order of `FP8Weights`."""
        return self.up, f"{self.up}_scale_inv", self.down, f"{self.down}_scale_inv"

    def activate(self, experts: nn.Module, pre: Tensor) -> Tensor:
        """From the first projection [M, U] to the second one's input [M, I]."""
        out: Tensor = getattr(experts, self.activation)(pre)
        return out

    def read_weights(self, experts: nn.Module) -> FP8Weights:
        """The present weights as plain tensors; a sharded one (DTensor) as its local part."""
        return FP8Weights(*(_local(experts, name).detach() for name in self.names))


def holds_fp8(experts: nn.Module) -> bool:
    """Whether a module's experts are stored in FP8, by their second projection."""
    weight = experts._parameters.get("down_proj")
    return weight is not None and weight.dtype is torch.float8_e4m3fn


def fp8_refusal(spec: FP8Spec, experts: nn.Module) -> str | None:
    """Why `fp8_mlp` can't compute a module that `holds_fp8`. Looks at dtypes and shapes only."""
    kind = type(experts).__name__
    if missing := [name for name in spec.names if experts._parameters.get(name) is None]:
        return f"{kind} has no parameter {', '.join(missing)}"
    if getattr(experts, "activation_scheme", "dynamic") != "dynamic":
        return f"{kind} has fixed scales for its activations; deep_gemm needs a scale per row"
    if getattr(experts, "has_bias", False):
        return f"{kind} has biases"
    device = experts._parameters[spec.down].device  # type: ignore[union-attr]
    has = None if device.type == "meta" else capability(device)
    for name in (spec.up, spec.down):
        weight, scale = (_local(experts, n) for n in (name, f"{name}_scale_inv"))
        if weight.dtype is not torch.float8_e4m3fn:
            return f"{kind}.{name} is {weight.dtype}, not torch.float8_e4m3fn"
        _, outputs, inputs = weight.shape
        if outputs % _BLOCK or inputs % _BLOCK:
            return f"sizes must be multiples of {_BLOCK}; {kind}.{name} is {tuple(weight.shape)}"
        expected = (weight.shape[0], outputs // _BLOCK, inputs // _BLOCK)
        if tuple(scale.shape) != expected:
            return (
                f"{kind}.{name}_scale_inv must hold a scale per {_BLOCK} x {_BLOCK} weights, "
                f"{expected}, got {tuple(scale.shape)}"
            )
        if scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
            return f"{kind}.{name}_scale_inv must be float32 or float8_e8m0fnu, got {scale.dtype}"
        if has is not None and has[0] >= _EXPONENT_SCALES_FROM and scale.dtype is torch.float32:
            return (
                f"{kind}.{name}_scale_inv is float32, but on a GPU of compute capability {has} "
                "scales must be powers of two (float8_e8m0fnu)"
            )
    return None


def _local(experts: nn.Module, name: str) -> Tensor:
    parameter = experts._parameters[name]
    assert parameter is not None
    return local_tensor(parameter)


def quantize(x: Tensor, *, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    """Cast rows to FP8.

    Args:
        x: [R, A], A a multiple of 128.
        powers_of_two: round scales up to such.

    Returns:
        values [R, A] float8_e4m3fn and scales [R, A / 128] float32: their product is about `x`. The
        largest of 128 values becomes the largest that fits (without `powers_of_two`).
    """
    groups = x.float().unflatten(1, (-1, _BLOCK))
    scale = (groups.abs().amax(dim=2) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    if powers_of_two:
        mantissa, exponent = torch.frexp(scale)  # 0.5 <= mantissa < 1
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    values = (groups / scale.unsqueeze(2)).flatten(1)
    return values.to(torch.float8_e4m3fn), scale


def fp8_mlp(
    parameters: FP8Weights,
    activate: Callable[[Tensor], Tensor],
    rows: Tensor,
    row_of_slot: Tensor,
    weights: Tensor,
    offsets: Tensor,
) -> Tensor:
    """For every row, the sum over its slots of weight times the slot's expert on the row.

    Args:
        parameters: the weights of E experts.
        activate: from the first projection [M, U] to the second one's input [M, I].
        rows: [R, H].
        row_of_slot: [S] int64, grouped by expert. Slots past the last offset add nothing.
        weights: [S], the routing weights.
        offsets: [E], integer: the end of each expert's slots.

    Returns:
        [R, H] of the dtype of the rows. Products are rounded to bfloat16; routing weights and sums
        are float32 or wider.

    Costs no host synchronization.
    """
    if row_of_slot.shape[0] == 0:
        return torch.zeros_like(rows)
    library = load_library()
    has = capability(rows.device)
    powers_of_two = has is not None and has[0] >= _EXPONENT_SCALES_FROM
    alignment = library.get_mk_alignment_for_contiguous_layout()
    layout = PaddedLayout.build(offsets, row_of_slot.shape[0], alignment)

    def project(values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
        out = rows.new_empty(values.shape[0], weight.shape[1], dtype=torch.bfloat16)
        pair = weight.contiguous(), weight_scale.float().contiguous()
        library.m_grouped_fp8_gemm_nt_contiguous((values, scales), pair, out, layout.expert_of_row)
        return out

    # A row is quantized once, whatever the number of its slots.
    row = row_of_slot[layout.slot_of_row]
    values, scales = (x[row] for x in quantize(rows, powers_of_two=powers_of_two))
    pre = project(values, scales, parameters.up, parameters.up_scale)
    # What was not written must not make a scale that can't be packed.
    hidden = activate(layout.without_padding(pre))
    values, scales = quantize(hidden, powers_of_two=powers_of_two)
    out = layout.unpadded(project(values, scales, parameters.down, parameters.down_scale))
    past = torch.arange(out.shape[0], device=out.device) >= offsets[-1]
    wide = accumulation_dtype(weights.dtype)
    out = out.masked_fill_(past[:, None], 0) * weights.to(wide).masked_fill(past, 0)[:, None]
    return sum_rows(out, row_of_slot, rows.shape[0], rows.dtype)
