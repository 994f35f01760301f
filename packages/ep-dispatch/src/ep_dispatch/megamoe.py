"""`deepgemm_megamoe`: DeepGEMM's Mega MoE kernel, which fuses dispatch, experts and combine.

Written against DeepGEMM 2.6.1 (https://github.com/deepseek-ai/DeepGEMM), found under the import name
`deep_gemm`, whichever distribution brings it.

[Note: rounds]
The buffer is sized for the usual batch, of decoding; a prefill may be larger. What does not fit goes through
the same kernel in further rounds: a token's output does not depend on the others. The other way would be bf16,
but what it needs is gone: the kernel's weights take the place of the checkpoint's, and bf16 ones beside them
would take four times their memory. How many rounds there are follows from T and from the buffer, which are the
same on all ranks, so nobody is asked. A round may write over the inputs of the one before it: the kernel ends
when the peers have read them, on which layers that share the buffer rely too.

T = tokens of the batch, H = hidden size, I = intermediate size, K = experts per token, E = experts of a
layer, P = ranks of the EP group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from . import checks
from .collectives import chunk_bounds, gather_over_group, group_size
from .fp8 import quantize_rows
from .host import capturing
from .implementation import MEGAMOE, EPImplementation, ExpertsForward

__all__ = ["DeepGemmMegaMoe", "megamoe_problems", "release_buffers"]

_FUNCTIONS = (
    "fp8_fp4_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
)
_WEIGHTS = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")
_FP4 = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
_ALIGNMENT = 128  # of H and I
_SCALED = 32  # FP4 weights that share a scale


def load_library() -> ModuleType:
    """Import `deep_gemm`.

    Raises:
        ImportError: it cannot be imported, or has no Mega MoE; the message says which.
    """
    advice = "install sgl-deep-gemm, or DeepGEMM 2.5 or newer from its sources"
    try:
        library = importlib.import_module("deep_gemm")
    except Exception as error:  # its import runs code that looks for a CUDA toolkit
        raise ImportError(
            f"the package deep_gemm cannot be imported ({type(error).__name__}: {error}); {advice}"
        ) from error
    if missing := [name for name in _FUNCTIONS if not hasattr(library, name)]:
        raise ImportError(
            f"deep_gemm {getattr(library, '__version__', '(no version)')} has no Mega MoE (it lacks "
            f"{', '.join(missing)}); {advice}"
        )
    return library


def device_problem() -> str | None:
    """What keeps this machine's device from running the kernel."""
    if not torch.cuda.is_available():
        return "a CUDA GPU of compute capability 10.0 (SM100) or higher is needed, this process has no CUDA"
    major, minor = torch.cuda.get_device_capability()
    if major < 10:
        return (
            f"compute capability 10.0 (SM100) or higher is needed, {torch.cuda.get_device_name()} has "
            f"{major}.{minor}"
        )
    return None


def experts_problems(experts: nn.Module | None) -> list[str]:
    """What keeps an experts module from running through the kernel; looks at dtypes and shapes only."""
    if experts is None:
        return ["the experts module is not known; pass `experts=`"]
    missing = [name for name in _WEIGHTS if getattr(experts, name, None) is None]
    if missing:
        sentence = (
            f"FP4 experts with the weights {', '.join(_WEIGHTS)} are needed, {type(experts).__name__} "
            f"lacks {', '.join(missing)}; load a checkpoint quantized so"
        )
        return [sentence]
    found: list[str] = []
    gate_up, gate_up_scale, down, down_scale = (getattr(experts, name) for name in _WEIGHTS)
    for name in ("gate_up_proj", "down_proj"):
        dtype = getattr(experts, name).dtype
        if dtype not in _FP4:
            found.append(f"{name} must hold packed FP4 (int8, two values a byte), got {dtype}")
    hidden, intermediate = down.shape[1], gate_up.shape[1] // 2
    if hidden % _ALIGNMENT or intermediate % _ALIGNMENT:
        found.append(
            f"hidden and intermediate sizes must be multiples of {_ALIGNMENT}, got {hidden} and "
            f"{intermediate}"
        )
    for name, weight, scale in (
        ("gate_up_proj", gate_up, gate_up_scale),
        ("down_proj", down, down_scale),
    ):
        expected = (*weight.shape[:2], weight.shape[2] * 2 // _SCALED)
        if tuple(scale.shape) != expected:
            found.append(
                f"{name}_scale_inv must hold a scale per {_SCALED} weights, {list(expected)}, got "
                f"{list(scale.shape)}"
            )
    activation = getattr(getattr(experts, "config", None), "hidden_act", "silu")
    if activation not in ("silu", "swish", "swiglu"):
        found.append(f"the gate's activation must be SiLU, got {activation!r}")
    return found


def megamoe_problems(experts: nn.Module | None) -> list[str]:
    """All that keeps `experts` from running through Mega MoE here; empty if nothing does."""
    found = []
    if problem := device_problem():
        found.append(problem)
    try:
        load_library()
    except ImportError as error:
        found.append(str(error))
    return found + experts_problems(experts)


@dataclass(frozen=True)
class _Shape:
    experts: int
    topk: int
    hidden: int
    intermediate: int


# One buffer serves all layers of a group, since they run one after another; it is given back when the
# group goes, or by `release_buffers`.
_buffers: WeakKeyDictionary[ProcessGroup, dict[_Shape, Any]] = WeakKeyDictionary()


def release_buffers(group: ProcessGroup | None = None) -> None:
    """Free the symmetric buffers of `group` (None: of all groups).

    A collective in effect: call it on every rank, when no rank runs a layer any more and before the
    process groups are destroyed.
    """
    for key in list(_buffers) if group is None else [group]:
        for buffer in _buffers.pop(key, {}).values():
            buffer.destroy()


def shared_buffer(
    library: ModuleType,
    group: ProcessGroup,
    shape: _Shape,
    tokens: int,
    max_tokens: int | None = None,
) -> Any:
    """The group's buffer for rows of that shape.

    Without `max_tokens`, of `tokens` per rank or more: a larger batch replaces it. With, of that many from
    the first call on. While a CUDA graph is captured, the one there is, of whatever size.

    Allocating is a collective, and waits for the device: the first call does, and each that needs a larger
    buffer.

    Raises:
        RuntimeError: a CUDA graph is captured and there is no buffer yet.
        ValueError: the ranks want buffers of different sizes; on all of them.
    """
    wanted = tokens if max_tokens is None else max_tokens
    buffers = _buffers.setdefault(group, {})
    held = buffers.get(shape)
    if held is not None and (held.num_max_tokens_per_rank >= wanted or capturing()):
        return held
    if capturing():
        raise RuntimeError(
            f"Mega MoE needs a symmetric buffer of {wanted} tokens a rank, which cannot be allocated "
            "while a CUDA graph is captured; run a batch once before capturing."
        )
    _check_same(group, wanted)
    if held is not None:
        # Peers write into it: it may go only when all have done with it.
        _synchronize()
        torch.distributed.barrier(group)
        buffers.pop(shape).destroy()
    buffers[shape] = library.get_symm_buffer_for_mega_moe(
        group, shape.experts, wanted, shape.topk, shape.hidden, shape.intermediate
    )
    return buffers[shape]


def _check_same(group: ProcessGroup, wanted: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(group_size(group))]
    torch.distributed.all_gather(sizes, torch.tensor([wanted], device=device), group)
    by_rank = [int(size) for size in sizes]
    if len(set(by_rank)) > 1:
        raise ValueError(
            "the ranks of an EP group must hold the same batch and give the same max_tokens; they want Mega "
            f"MoE buffers of {by_rank} tokens, by EP rank."
        )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def transform_weights(
    library: ModuleType, weights: Callable[[str], Tensor]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The experts' weights and scales in the layout of the kernel.

    Args:
        library: `deep_gemm`.
        weights: gives a weight by name: gate_up_proj [E/P, 2I, H/2] and down_proj [E/P, H, I/2], two FP4
            values a byte, and their `_scale_inv`, one power-of-two scale per 32 values.
    """
    layers = []
    for name in ("gate_up_proj", "down_proj"):
        weight = weights(name).view(torch.int8).contiguous()
        count, outputs, packed = weight.shape
        scale = weights(f"{name}_scale_inv")
        if scale.dtype in (torch.uint8, torch.int8):  # bare exponents
            scale = scale.view(torch.float8_e8m0fnu)
        scale = library.transform_sf_into_required_layout(
            scale.float(), outputs, 2 * packed, recipe=(1, _SCALED), num_groups=count
        )
        layers.append((weight, scale))
    transformed: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    transformed = library.transform_weights_for_mega_moe(*layers)
    return transformed


class DeepGemmMegaMoe(EPImplementation):
    """DeepGEMM Mega MoE: one kernel moves the tokens, runs the experts, and brings the outputs back.

    The kernel takes each rank's rows as tokens of that rank's own. The ranks of the group share one
    batch here, so each hands in its `1/P` slice, padded to equal size with a skipped token where the
    slice is short, and the outputs are gathered. Activations are cast to FP8, weights are FP4.
    `experts_forward` is not called.

    The weights are transformed at the first call. The module then holds the transformed ones (twice the
    memory would be the alternative) and refuses to be saved. A module that FSDP2 manages keeps its own.

    Inference only: the kernel has no backward.

    Args:
        experts_forward: as for the base class, as is what `settings` holds.
        max_tokens: the tokens of a rank that the symmetric buffer is sized for, the same on all ranks; the
            library rounds it up. A larger slice goes through it in rounds ([Note: rounds]), with the same
            result. None: the buffer grows with the largest batch; a CUDA graph that was captured before
            would then write to one that is gone.

    Raises:
        ValueError: when built, if it cannot run here; the error lists all that is missing. Or a
            `max_tokens` that is no positive integer.

    Cost: FP8 rows over symmetric memory, one all-gather of [T, H] in bf16; no host synchronization. A new
    buffer (`shared_buffer`) costs a collective and waits for the device.
    """

    needs_shared_batch: ClassVar[bool] = True
    runs_megamoe_experts: ClassVar[bool] = True

    def __init__(
        self, experts_forward: ExpertsForward, *, max_tokens: int | None = None, **settings: Any
    ) -> None:
        super().__init__(experts_forward, **settings)
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise ValueError(
                "max_tokens must be a positive integer, the tokens of a rank that the buffer is sized for, "
                f"or None to let it grow, got {max_tokens!r}."
            )
        self.max_tokens = max_tokens
        if problems := megamoe_problems(self.experts):
            raise ValueError(
                f'ep_implementation="{MEGAMOE}" cannot run here: {"; ".join(problems)}. Use another '
                'ep_implementation ("auto", "all_to_all", "all_reduce") and experts_implementation.'
            )
        if self.ep_group is None:
            raise ValueError(
                f'ep_implementation="{MEGAMOE}" needs a process group, for its symmetric buffers; start '
                "torch.distributed and pass ep_group, of one rank too."
            )
        self.library = load_library()
        self._layers: Any = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Slice; quantize into the shared buffer and run the kernel, in rounds; gather."""
        if problem := checks.inputs_problem(hidden_states, top_k_index, top_k_weights):
            raise ValueError(problem)
        inputs_need = hidden_states.requires_grad or top_k_weights.requires_grad
        if torch.is_grad_enabled() and (inputs_need or self.expert_parameters()):
            raise RuntimeError(
                f'ep_implementation="{MEGAMOE}" is for inference only, its kernel has no backward; call '
                'the model under torch.no_grad() or torch.inference_mode(), or train with "all_to_all".'
            )
        assert self.ep_group is not None
        num_tokens, width = hidden_states.shape
        if num_tokens == 0:
            return hidden_states.clone()
        first, last = chunk_bounds(num_tokens, self.ep_size, self.ep_rank)
        padded = -(-num_tokens // self.ep_size)
        layers = self._transformed()
        shape = _Shape(
            experts=self.num_experts,
            topk=top_k_index.shape[1],
            hidden=width,
            intermediate=layers[0][0].shape[1] // 2,
        )
        buffer = shared_buffer(self.library, self.ep_group, shape, padded, self.max_tokens)
        mine = [tensor[first:last] for tensor in (hidden_states, top_k_index, top_k_weights)]
        output = hidden_states.new_empty((padded, width), dtype=torch.bfloat16)
        rounds = output.split(buffer.num_max_tokens_per_rank)
        for number, part in enumerate(rounds):
            start = number * buffer.num_max_tokens_per_rank
            x, index, weights = (tensor[start : start + len(part)] for tensor in mine)
            self._run(buffer, layers, x, index, weights, part)
        output = output[: last - first].to(hidden_states.dtype)
        return gather_over_group(output, self.ep_group, size=num_tokens)

    def _run(
        self, buffer: Any, layers: Any, x: Tensor, index: Tensor, weights: Tensor, output: Tensor
    ) -> None:
        """Fill the buffer and run the kernel; `output` may have more rows than there are tokens here."""
        own, padded = len(x), len(output)
        values, scales = quantize_rows(x)
        buffer.x[:own].copy_(values)
        buffer.x_sf[:own].copy_(scales)
        buffer.topk_idx[:own].copy_(index)
        buffer.topk_weights[:own].copy_(weights)
        # What the padding's rows hold does not matter: no expert computes them.
        buffer.topk_idx[own:padded].fill_(-1)
        buffer.topk_weights[own:padded].zero_()
        config = getattr(self.experts, "config", None)
        self.library.fp8_fp4_mega_moe(
            output, *layers, buffer, activation_clamp=getattr(config, "swiglu_limit", None)
        )

    def _transformed(self) -> Any:
        if self._layers is None:
            with torch.no_grad():
                self._layers = transform_weights(self.library, self._weight)
            self._keep_transformed_only()
        return self._layers

    def _weight(self, name: str) -> Tensor:
        assert self.experts is not None
        weight = getattr(self.experts, name)
        local: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
        if local.shape[0] != self.num_local_experts:
            raise ValueError(
                f"{name} must hold this rank's {self.num_local_experts} experts, got "
                f"{list(local.shape)}; shard it over the EP group before the first call."
            )
        return local.detach()

    def _keep_transformed_only(self) -> None:
        experts = self.experts
        assert experts is not None
        if any(hasattr(module, "unshard") for module in experts.modules()):
            return  # FSDP2 puts its own parameters back at every forward
        (gate_up, gate_up_scale), (down, down_scale) = self._layers
        tensors = (gate_up, gate_up_scale, down, down_scale)
        for name, tensor in zip(_WEIGHTS, tensors, strict=True):
            kind = experts._buffers if name in experts._buffers else experts._parameters
            kind[name] = (
                tensor if kind is experts._buffers else nn.Parameter(tensor, requires_grad=False)
            )
        experts.register_state_dict_pre_hook(_refuse_saving)


def _refuse_saving(experts: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise RuntimeError(
        f"the weights of {prefix.rstrip('.') or type(experts).__name__} were transformed for DeepGEMM Mega "
        "MoE and cannot be saved; load the model anew to save it."
    )
