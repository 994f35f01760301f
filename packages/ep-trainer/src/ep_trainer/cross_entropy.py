"""Cross-entropy from hidden states, a chunk of tokens at a time: the logits never exist whole.

    T tokens, H hidden size, V vocabulary, v its part on this rank, C tokens of a chunk, P ranks

[Note: gradients in the forward]
The gradient of a token's logits needs nothing but its logits and its label, so each chunk's part of
the gradients is computed while its logits are there, for the sum of the losses, and backward multiplies
by one number. Nothing is computed twice. Kept from forward to backward: the gradients themselves, of
the sizes of the hidden states and of the weight, which backward makes in any case.
With the vocabulary cut over P ranks a token's loss needs two numbers of each rank: the logarithm of its
part of the softmax's sum, and the label's logit, which one rank has.
Sources: Liger Kernel (Hsu et al., 2024) for the gradients in the forward; Megatron-LM (Shoeybi et al.,
2019) for the cut vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ep_dispatch.collectives import (
    chunk_bounds,
    copy_to_group,
    gather_over_group,
    group_rank,
    group_size,
)
from ep_trainer.data import IGNORED


def chunked_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = 1024,
    num_items: Tensor | float | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """The loss of `functional.cross_entropy(hidden_states @ weight.T + bias, labels)`.

    Args:
        hidden_states: [..., H], the same on every rank of `group`.
        weight: [v, H], this rank's rows of the output projection as `chunk_bounds` cuts them; all of
            them without a group.
        labels: [...] int64, already shifted: the label of each position.
        bias: [v].
        chunk_tokens: C, the tokens whose logits exist at one time.
        num_items: what the sum of the losses is divided by; None: the labels that count.
        label_smoothing: the part of the target that is spread over the vocabulary, as torch's.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma); None: they stay.
        ignore_index: the label of positions that don't count.
        group: the ranks that the vocabulary is cut over.
        vocab_size: V; needed with a group.

    Returns:
        A scalar of float32 (or wider), the same on every rank of the group. Without a label that counts,
        and without `num_items`, it is NaN, as torch's is.

    Raises:
        ValueError: shapes don't fit, a setting is out of range, a label is (seen on the CPU only: on a
            device the loss is NaN then, since looking would be a host synchronization).

    Cost: three products of [T, H] and [v, H]. Memory: a few times [C, v] in float32; one gradient of the
    weight, in float32 if that is narrower. With a group one all-gather of two numbers (three with label
    smoothing) per token and rank in each chunk, and an all-reduce of [T, H] in backward.
    """
    vocab = weight.shape[0] if vocab_size is None else vocab_size
    _check(
        hidden_states, weight, labels, bias, chunk_tokens, label_smoothing, softcap, group, vocab
    )
    if labels.device.type == "cpu" and labels.numel():
        wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocab))]
        if wrong.numel():
            raise ValueError(
                f"labels must be in 0..{vocab - 1}, or {ignore_index} where they don't count; got "
                f"{int(wrong[0])}."
            )
    group = group if group_size(group) > 1 else None
    settings = _Settings(chunk_tokens, label_smoothing, softcap, ignore_index, group, vocab)
    hidden = copy_to_group(hidden_states.flatten(0, -2), group)
    targets = labels.reshape(-1)
    total: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, settings)
    if num_items is None:
        return total / targets.ne(ignore_index).sum()
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


def _check(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    chunk_tokens: int,
    label_smoothing: float,
    softcap: float | None,
    group: ProcessGroup | None,
    vocab: int,
) -> None:
    if isinstance(weight, DTensor) or isinstance(hidden_states, DTensor):
        raise ValueError(
            "chunked_cross_entropy takes what this rank holds, got a DTensor: pass weight.to_local() and "
            "the group that the vocabulary is cut over (inside the forward of the module that FSDP gathers)."
        )
    if weight.ndim != 2 or hidden_states.ndim < 2 or hidden_states.shape[-1] != weight.shape[1]:
        raise ValueError(
            "hidden_states must be [..., H] and weight [vocabulary, H], got "
            f"{list(hidden_states.shape)} and {list(weight.shape)}."
        )
    if labels.shape != hidden_states.shape[:-1] or labels.is_floating_point():
        raise ValueError(
            f"labels must be integers of shape {list(hidden_states.shape[:-1])}, one for each position of "
            f"hidden_states, got {list(labels.shape)} of {labels.dtype}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {list(bias.shape)}.")
    if type(chunk_tokens) is not int or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be an int of at least 1, got {chunk_tokens!r}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in 0..1, got {label_smoothing}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}.")
    start, end = chunk_bounds(vocab, group_size(group), group_rank(group))
    if weight.shape[0] != end - start:
        raise ValueError(
            f"of a vocabulary of {vocab} over {group_size(group)} ranks, rank {group_rank(group)} holds "
            f"{end - start} rows, got a weight with {weight.shape[0]}; pass vocab_size, the whole size."
        )


@dataclass(frozen=True)
class _Settings:
    chunk_tokens: int
    label_smoothing: float
    softcap: float | None
    ignore_index: int
    group: ProcessGroup | None
    vocab: int

    @property
    def first(self) -> int:
        """The first entry of the vocabulary that this rank holds."""
        return chunk_bounds(self.vocab, group_size(self.group), group_rank(self.group))[0]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the losses. Kept for backward: the gradients of the inputs that need one."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_vH: Tensor,
        bias_v: Tensor | None,
        labels_T: Tensor,
        settings: _Settings,
    ) -> Tensor:
        dtype = _compute_dtype(hidden_TH)
        wide = torch.promote_types(dtype, torch.float32)
        needs = ctx.needs_input_grad[:3]
        weight = weight_vH.to(dtype)
        bias = None if bias_v is None else bias_v.to(dtype)
        ctx.grads = [
            torch.empty_like(hidden_TH) if needs[0] else None,
            weight.new_zeros(weight.shape, dtype=wide) if needs[1] else None,
            weight.new_zeros(weight.shape[:1], dtype=wide) if needs[2] else None,
        ]
        ctx.dtypes = [x if x is None else x.dtype for x in (hidden_TH, weight_vH, bias_v)]
        total = hidden_TH.new_zeros((), dtype=wide)
        with torch.autocast(hidden_TH.device.type, enabled=False):
            for start in range(0, hidden_TH.shape[0], settings.chunk_tokens):
                chunk = slice(start, start + settings.chunk_tokens)
                rows = hidden_TH[chunk].to(dtype)
                logits = functional.linear(rows, weight, bias)
                losses, grad = _losses(logits.to(wide), labels_T[chunk], settings, any(needs))
                del logits
                total += losses.sum()
                if grad is not None:
                    _add_gradients(ctx.grads, chunk, grad, rows, weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "chunked_cross_entropy: backward a second time; its gradients are kept for one."
            )
        # Used up, so that a gradient of the weight's size is not held twice.
        grads, ctx.grads = ctx.grads, None
        return (
            *(
                None if x is None else x.mul_(grad).to(dtype)
                for x, dtype in zip(grads, ctx.dtypes, strict=True)
            ),
            None,
            None,
        )


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """What the plain way's product is computed in."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _losses(
    logits_Cv: Tensor, labels_C: Tensor, settings: _Settings, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of each token [C], and the gradient of its logits [C, v]. `logits_Cv` is used up."""
    smoothing, vocab = settings.label_smoothing, settings.vocab
    counts_C = labels_C != settings.ignore_index
    slope_Cv = None
    if settings.softcap is not None:
        logits_Cv = logits_Cv.div_(settings.softcap).tanh_()
        slope_Cv = 1 - logits_Cv.square() if with_gradient else None
        logits_Cv = logits_Cv.mul_(settings.softcap)
    size = logits_Cv.shape[1]
    place_C = labels_C - settings.first
    here_C = counts_C & (place_C >= 0) & (place_C < size)
    place_C1 = place_C.masked_fill(~here_C, 0)[:, None]
    if size:
        target_C = logits_Cv.gather(1, place_C1).squeeze(1).masked_fill(~here_C, 0)
        most_C = logits_Cv.amax(1)
    else:  # a rank without a part of the vocabulary
        target_C = logits_Cv.new_zeros(labels_C.shape)
        most_C = logits_Cv.new_full(labels_C.shape, -torch.inf)
    known = [target_C, logits_Cv.sum(1)] if smoothing else [target_C]
    exp_Cv = logits_Cv.sub_(most_C[:, None]).exp_()
    log_sum_C = most_C + exp_Cv.sum(1).log()
    log_sum_C, target_C, *sums = _over_group([log_sum_C, *known], settings.group)
    losses_C = log_sum_C - (1 - smoothing) * target_C
    if smoothing:
        losses_C = losses_C - smoothing / vocab * sums[0]
    # A label out of range: on the CPU it was refused.
    inside_C = (labels_C >= 0) & (labels_C < vocab)
    losses_C = losses_C.masked_fill(~inside_C, torch.nan).masked_fill(~counts_C, 0)
    if not with_gradient:
        return losses_C, None
    grad_Cv = exp_Cv.mul_((most_C - log_sum_C).exp()[:, None])
    if smoothing:
        grad_Cv.sub_(smoothing / vocab)
    if size:
        ours = here_C.to(grad_Cv.dtype).mul_(smoothing - 1)
        grad_Cv.scatter_add_(1, place_C1, ours[:, None])
    if slope_Cv is not None:
        grad_Cv.mul_(slope_Cv)
    return losses_C, grad_Cv.masked_fill_(~counts_C[:, None], 0)


def _over_group(known: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """Of each rank's logarithm of a sum and further parts of sums: the whole ones."""
    if group is None:
        return known
    size = group_size(group)
    ranks = gather_over_group(torch.stack(known)[None], group, 0, size=size)
    return [ranks[:, 0].logsumexp(0), *ranks[:, 1:].sum(0)]


def _add_gradients(
    grads: list[Tensor | None], chunk: slice, grad_Cv: Tensor, rows_CH: Tensor, weight_vH: Tensor
) -> None:
    hidden, weight, bias = grads
    if bias is not None:
        bias += grad_Cv.sum(0)
    narrow = grad_Cv.to(rows_CH.dtype)
    if hidden is not None:
        hidden[chunk] = narrow @ weight_vH
    if weight is None:
        return
    if weight.dtype == narrow.dtype:
        weight.addmm_(narrow.T, rows_CH)
    else:
        weight += narrow.T @ rows_CH
