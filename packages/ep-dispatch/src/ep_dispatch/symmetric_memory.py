"""`symmetric_memory`: rows are written straight into the other ranks' memory; no size is read on the host.

T = tokens of this rank, H = hidden size, K = experts per token, E = experts of a layer, P = ranks of the
EP group, C = rows that one rank may send to one, R = P * C, the rows that a rank has room for.

    hidden [T, H], weights, ids [T, K] -slice 1/tp-> -written to the owners' memory-> [R, H], [R, K], [R, K]
        -experts, slots without a token skipped-> [R, H] -written back to the sources' memory-> [P, C, H]
        -sum over a token's rows-> -gather over tp-> [T, H]

Sizes that depend on C alone, as the low-latency kernels of DeepEP have them
(https://github.com/deepseek-ai/DeepEP).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding_bag, pad

from . import checks
from .agreement import Notice, agree
from .checkpointing import CheckpointMemory
from .collectives import _all_gather, chunk_bounds, gather_over_group
from .host import on_host
from .implementation import EPImplementation, ExpertsForward
from .links import GradNeeds, _facts, _filled, join_parameters, new_link, split_linked
from .routing import SKIPPED, local_routes, owner_places
from .symmetric_buffers import HEADER, Buffer, capturing, shared_buffer

__all__ = ["SymmetricMemory"]

_ALIGNMENT = 16  # bytes, of each part of a row


@dataclass(frozen=True, eq=False)
class _Call:
    """What the ranks agreed on for a call, and what a recomputation of it uses again.

    Attributes:
        index: [T, K], the expert ids.
        capacity: C.
        slots: K, the largest of all ranks.
        needs: which gradients travel.
    """

    index: Tensor
    capacity: int
    slots: int
    needs: GradNeeds


@dataclass(frozen=True)
class _Field:
    """A part of a row: `width` values of a dtype."""

    width: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """In bytes, with what is left free behind it."""
        return -(-self.width * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [N, *] side by side: [N, W] int64."""
    fields = [_Field(x.shape[1], x.dtype) for x in tensors]
    width = sum(field.size for field in fields) // torch.int64.itemsize
    words = tensors[0].new_empty((tensors[0].shape[0], width), dtype=torch.int64)
    for part, x in zip(_unpacked(words, fields), tensors, strict=True):
        part.copy_(x)
    return words


def _unpacked(words: Tensor, fields: Sequence[_Field]) -> list[Tensor]:
    """Views of the parts of rows [N, W]."""
    raw, begin, parts = words.view(torch.uint8), 0, []
    for field in fields:
        end = begin + field.width * field.dtype.itemsize
        parts.append(raw[:, begin:end].view(field.dtype))
        begin += field.size
    return parts


@dataclass(frozen=True)
class _Exchange:
    """Rows of tokens to the ranks that own their experts, and rows back to the tokens' ranks.

    Attributes:
        group: the ranks.
        ranks: P.
        capacity: C.
        slots: K, at most so many ranks hold an expert of a token.
    """

    group: ProcessGroup
    ranks: int
    capacity: int
    slots: int

    def there(
        self,
        tensors: Sequence[Tensor],
        place: Tensor,
        fills: Sequence[float],
        header: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """Bring tensors [T, *] to the owners.

        Args:
            tensors: of the tokens.
            place: [P, T], see `owner_places`.
            fills: what stands in the rows where no token came, for each tensor.
            header: [P, HEADER], what each rank is told: first how many rows come for it.
            counts: [P], how many came when the header was sent; with them none is.

        Returns:
            copies [R, *], rows of source p from `p * C` on; the headers [P, HEADER] that came.
        """
        packed = _packed(tensors)
        buffer = self._move(packed.expand(self.ranks, *packed.shape), place, header)
        told = buffer.header(self.ranks).clone()
        fields = [_Field(x.shape[1], x.dtype) for x in tensors]
        count = self.ranks * self.capacity
        views = _unpacked(buffer.rows(count, packed.shape[1], self.ranks), fields)
        absent = self._row_places(told[:, 0] if counts is None else counts).view(-1, 1) < 0
        # Copied, since the next exchange overwrites; and filled, since what lies there is of the last one.
        copies = [x.masked_fill(absent, fill) for x, fill in zip(views, fills, strict=True)]
        return copies, told

    def back(self, tensors: Sequence[Tensor], place: Tensor, counts: Tensor) -> list[Tensor]:
        """From tensors [R, *] of the owners to their sums over each token's rows, [T, *].

        Accumulated in float32 or wider, in the order of ranks.
        """
        packed = _packed(tensors)
        width = packed.shape[1]
        rows = packed.view(self.ranks, self.capacity, width)
        buffer = self._move(rows, self._row_places(counts), None)
        count = self.ranks * self.capacity
        arrived = buffer.rows(count + 1, width, self.ranks)
        arrived[count] = 0  # stands for the rows that a token has not
        first = torch.arange(self.ranks, device=place.device)[:, None] * self.capacity
        absent = (place < 0) | (place >= self.capacity)
        rows_of_token = (place + first).masked_fill(absent, count).T
        if self.slots < self.ranks:
            rows_of_token = rows_of_token.sort(dim=1).values[:, : self.slots]
        fields = [_Field(x.shape[1], x.dtype) for x in tensors]
        return [_sum(x, rows_of_token) for x in _unpacked(arrived, fields)]

    def _row_places(self, counts: Tensor) -> Tensor:
        """[P, C], 0 to C - 1 for rows that came from source p, -1 for others."""
        places = torch.arange(self.capacity, device=counts.device).expand(self.ranks, -1)
        return places.masked_fill(places >= counts[:, None], -1)

    def _move(self, rows: Tensor, place: Tensor, header: Tensor | None) -> Buffer:
        buffer = shared_buffer(self.group, rows.device, capacity=self.capacity, width=rows.shape[2])
        buffer.barrier(self.group)
        buffer.put(rows, place, self.capacity, header)
        buffer.barrier(self.group)
        return buffer


def _sum(rows: Tensor, rows_of_token: Tensor) -> Tensor:
    if rows_of_token.numel() == 0 or rows.shape[1] == 0:
        return rows.new_zeros((rows_of_token.shape[0], rows.shape[1]))
    return embedding_bag(rows_of_token.contiguous(), rows, mode="sum")


class _Dispatch(torch.autograd.Function):
    """Hidden states and weights there, with the ids; the gradients of both in one exchange back."""

    @staticmethod
    def forward(
        ctx: Any, link: Tensor | None, exchange: _Exchange, needs: GradNeeds, hidden: Tensor,
        weights: Tensor, ids: Tensor, place: Tensor, header: Tensor,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        (rows, slot_weights, slot_ids), told = exchange.there(
            [hidden, weights, ids], place, [0, 0, SKIPPED], header
        )
        ctx.save_for_backward(place, told[:, 0])
        ctx.exchange, ctx.needs = exchange, (needs.hidden, needs.weights)
        ctx.facts = [_facts(rows), _facts(slot_weights)]
        outputs = zip((rows, slot_weights), ctx.needs, strict=True)
        ctx.mark_non_differentiable(slot_ids, told, *(x for x, need in outputs if not need))
        ctx.set_materialize_grads(False)
        return None if link is None else torch.zeros_like(link), rows, slot_weights, slot_ids, told

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        place, counts = ctx.saved_tensors
        parts = zip(grads[:2], ctx.facts, ctx.needs, strict=True)
        filled = [_filled(grad, facts) for grad, facts, need in parts if need]
        sums = iter(ctx.exchange.back(filled, place, counts))
        hidden, weights = (next(sums) if need else None for need in ctx.needs)
        return None, None, None, hidden, weights, None, None, None


class _Combine(torch.autograd.Function):
    """The experts' outputs back, summed per token."""

    @staticmethod
    def forward(
        ctx: Any,
        link: Tensor | None,
        exchange: _Exchange,
        rows: Tensor,
        place: Tensor,
        counts: Tensor,
    ) -> Tensor:
        # All ranks ask for these first in backward: see `ep_dispatch.links._SumLinked`.
        ctx.save_for_backward(place, counts)
        ctx.exchange = exchange
        return exchange.back([rows], place, counts)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        place, counts = ctx.saved_tensors
        (rows,), _ = ctx.exchange.there([grad], place, [0], counts=counts)
        return None, None, rows, None, None


class _Alarm:
    """What went wrong in the calls of a group, on a device that is not asked at once."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        # The most rows for one rank, of calls in which they were too many; whether any id was wrong.
        self.worst = torch.zeros(2, dtype=torch.int64, device=device)
        self.seen = torch.zeros(2, dtype=torch.int64, pin_memory=pinned)
        self.copied = torch.cuda.Event() if pinned else None

    def note(self, worst: Tensor) -> None:
        """Keep what happened in this call, and send it to the host."""
        torch.maximum(self.worst, worst, out=self.worst)
        if capturing():
            return
        self.seen.copy_(self.worst, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def look(self, *, wait: bool = False) -> None:
        """Raise what the host knows by now, or all that there is."""
        if wait:
            self.seen.copy_(self.worst)
        elif self.copied is not None and not self.copied.query():
            return
        rows, bad_ids = self.seen.tolist()
        if rows or bad_ids:
            self.worst.zero_()
            self.seen.zero_()
        if bad_ids:
            raise RuntimeError(
                "a call of this EP group had expert ids out of range on some rank; its output was NaN."
            )
        if rows:
            raise RuntimeError(f"{_overflow(rows)}; the output of that call was NaN.")


_alarms: WeakKeyDictionary[ProcessGroup, _Alarm] = WeakKeyDictionary()


def _overflow(rows: int) -> str:
    return (
        f"a rank had {rows} rows for one rank of its EP group, more than max_rows allows; give a larger "
        "max_rows, or none (a rank then has room for all tokens of every other)"
    )


class SymmetricMemory(EPImplementation):
    """Rows are written straight into the other ranks' memory; no size is read on the host.

    A token crosses once to each rank that holds any of its experts, with its routing; the sum of their
    weighted outputs comes back. All sizes depend on C alone, the rows that one rank may send to one, so
    nothing waits for the host, and a CUDA graph can be captured (with `max_tokens`). Fits every layout,
    slices over TP as `AllToAll` does, and keeps the routing in a checkpointed region as it does.

    The ranks of an EP group must be on one machine: GPUs with access to each other's memory, where rows
    are written by a Triton kernel, or CPU processes, over shared memory. It has not run on a GPU yet.

    Args:
        experts_forward: see `EPImplementation`. Slots without a token have the skip id. On CUDA it is
            called with one slot a row, R*K rows, for which the experts of `ep_kernels` need no host
            synchronization.
        max_tokens: the largest T that any rank will hold, the same on all. Nothing is then agreed on per
            call: C is fixed, so that CUDA graphs can be captured after a call of each layer (warm-up), and
            each rank checks its own input, as `AllReduce` does. None: each call agrees on its largest T
            and its input, by an all-gather of eight integers a rank and a host synchronization.
        max_rows: C, if it is less than the worst case, where all tokens of a rank go to one. A routing
            that needs more is an error: on the CPU at once, on all ranks; on CUDA the output and the
            gradients of rows that were sent are NaN, and on each rank a later call, or `check`, raises.
        settings: see `EPImplementation`.

    Raises:
        ValueError: `max_tokens` or `max_rows` is less than 1.

    Cost of a forward: rows there and back, two barriers each; one all-gather over TP. Memory:
    `R * (H + K)` values of buffer in all layers of a group together, and in each layer `R` rows, which the
    experts keep for backward. Backward: the same exchanges, for the gradients that any rank of the group
    needs (with `max_tokens`: all).
    """

    def __init__(
        self,
        experts_forward: ExpertsForward,
        *,
        max_tokens: int | None = None,
        max_rows: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(experts_forward, **settings)
        for name, value in (("max_tokens", max_tokens), ("max_rows", max_rows)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be None or at least 1, got {value!r}.")
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self._memory = CheckpointMemory[_Call]()

    def check(self) -> None:
        """Raise what went wrong on the device in the calls of this EP group since the last look.

        Call it on all ranks. Cost: on CUDA a host synchronization.

        Raises:
            RuntimeError: more rows than `max_rows`, or expert ids out of range; the call gave NaN.
        """
        self._look(wait=True)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Write rows to their owners, run the experts, write back, sum."""
        if not capturing():
            self._look()
        call = self._memory.recall()
        if call is None:
            agreed = self._agree if self.max_tokens is None else self._assume
            call = agreed(hidden_states, top_k_index, top_k_weights)
            self._memory.remember(call)
        group, needs, dtype = self.ep_group, call.needs, hidden_states.dtype
        if group is None or self.ep_size == 1:
            ids, foreign = local_routes(call.index, 0, self.num_local_experts)
            return self._run(hidden_states, ids, top_k_weights.masked_fill(foreign, 0)).to(dtype)
        link = new_link(hidden_states.device) if needs.rows else None
        inner = link if needs.hidden or needs.weights else None
        rows, weights, ids = hidden_states, top_k_weights, call.index
        if self._slices:
            assert self.tp_group is not None
            phase = self.phase("dispatch")
            for_rows, rows = split_linked(
                inner if needs.hidden else None, rows, self.tp_group, phase
            )
            inner = inner if for_rows is None else for_rows
            for_weights = inner if needs.weights else None
            for_weights, weights = split_linked(for_weights, weights, self.tp_group, phase)
            inner = inner if for_weights is None else for_weights
            ids = ids[slice(*chunk_bounds(ids.shape[0], self.tp_size, self.tp_rank))]
        if more := call.slots - ids.shape[1]:
            weights, ids = pad(weights, (0, more)), pad(ids, (0, more), value=SKIPPED)
        exchange = _Exchange(group, self.ep_size, call.capacity, call.slots)
        with torch.no_grad():
            place, counts, invalid = owner_places(ids, experts=self.num_experts, ranks=self.ep_size)
            facts = torch.stack([counts.max(), invalid.long()])
            header = pad(facts.expand(self.ep_size, 2), (1, HEADER - 3))
            header[:, 0] = counts
        inner, rows, weights, ids, told = _Dispatch.apply(
            inner, exchange, needs, rows, weights, ids.int(), place, header
        )
        bad = self._judge(told, call)
        ids, foreign = local_routes(ids, self.ep_rank, self.num_local_experts)
        # Masked before anything multiplies: see `AllReduce`.
        out = self._run(rows, ids, weights.masked_fill(foreign, 0)).to(dtype)
        out = _Combine.apply(link if inner is None else inner, exchange, out, place, told[:, 0])
        if bad is not None:
            out = out * torch.where(bad, torch.nan, 1.0)  # so that gradients are NaN too
        if self._slices:
            out = gather_over_group(out, self.tp_group, size=hidden_states.shape[0])
        return out

    def _look(self, *, wait: bool = False) -> None:
        alarm = None if self.ep_group is None else _alarms.get(self.ep_group)
        if alarm is not None:
            alarm.look(wait=wait)

    @property
    def _slices(self) -> bool:
        return self.tp_size > 1 and not self.sequence_parallel

    def _asks(self, device: torch.device) -> bool:
        """Whether what is on the device may be read on the host."""
        return device.type == "cpu"

    def _capacity(self, tokens: int) -> int:
        """C, for the largest T of any rank."""
        if self._slices:
            tokens = -(-tokens // self.tp_size)
        return max(1, tokens if self.max_rows is None else min(tokens, self.max_rows))

    def _agree(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> _Call:
        """What all ranks tell each other before any row moves."""
        problem = self._problem(hidden, top_k_index, top_k_weights)
        notice, slots = Notice(rank=self.ep_rank, refused=True), 0
        device = self._device()
        if problem is None:
            slots, device = top_k_index.shape[1], top_k_index.device
            notice = Notice(
                rank=self.ep_rank,
                grad=torch.is_grad_enabled(),
                hidden=hidden.requires_grad,
                weights=top_k_weights.requires_grad,
                experts=self.experts_need_grad(),
                tokens=hidden.shape[0],
                batch=self._first_of_batch,
                width=hidden.shape[1],
                dtype=hidden.dtype,
                weights_dtype=top_k_weights.dtype,
            )
        own = torch.tensor([[slots, *notice.encode()]], device=device)
        if problem is None:
            own[0, -1] += self._outside(top_k_index).any()
        known = own
        if self.ep_group is not None and self.ep_size > 1:
            known = _all_gather(own, self.ep_group, 0, self.ep_size)
        told = on_host(known)
        notices = [Notice.decode(numbers[1:]) for numbers in told]
        if problem is not None:
            raise ValueError(problem)
        if notices[self.ep_rank].bad_ids:
            raise ValueError(checks.ids_problem(top_k_index, self.num_experts))
        needs = agree(notices) or GradNeeds()
        capacity = self._capacity(max(notice.tokens for notice in notices))
        return _Call(top_k_index, capacity, max(numbers[0] for numbers in told), needs)

    def _assume(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> _Call:
        """What holds for every call, if the largest batch is given."""
        assert self.max_tokens is not None
        problem = self._problem(hidden, top_k_index, top_k_weights)
        if problem is None and hidden.shape[0] > self.max_tokens:
            problem = f"got {hidden.shape[0]} tokens with max_tokens={self.max_tokens}; give a larger one."
        alone = self.ep_size == 1 and self._asks(hidden.device)
        if problem is None and alone and self._outside(top_k_index).any():
            problem = checks.ids_problem(top_k_index, self.num_experts)
        if problem is not None:
            raise ValueError(problem)
        grad = torch.is_grad_enabled()
        needs = GradNeeds(hidden=grad, weights=grad, rows=grad)
        return _Call(top_k_index, self._capacity(self.max_tokens), top_k_index.shape[1], needs)

    def _outside(self, ids: Tensor) -> Tensor:
        return (ids < SKIPPED) | (ids >= self.num_experts)

    def _problem(self, hidden: object, top_k_index: object, top_k_weights: object) -> str | None:
        if problem := checks.inputs_problem(hidden, top_k_index, top_k_weights):
            return problem
        assert isinstance(hidden, Tensor)
        if hidden.device.type not in ("cpu", "cuda"):
            return f"symmetric_memory runs on CPU and CUDA, got tensors on {hidden.device}."
        return None

    def _device(self) -> torch.device:
        """Where tensors are that the group can send."""
        if self.ep_group is not None and dist.get_backend(self.ep_group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _judge(self, told: Tensor, call: _Call) -> Tensor | None:
        """Raise on all ranks what any had wrong, or give back, on the device, whether there was anything.

        Args:
            told: [P, HEADER], of each rank the most rows that it had for one rank, and whether any of its
                ids were wrong, in columns 1 and 2.
            call: this one.
        """
        group = self.ep_group
        assert group is not None
        if self._asks(told.device):
            wrong = told[:, 2].nonzero()[:, 0].tolist()
            if self.ep_rank in wrong:
                raise ValueError(checks.ids_problem(call.index, self.num_experts))
            if wrong:
                raise RuntimeError(
                    f"ranks {wrong} of the EP group had expert ids out of range (each says why)."
                )
            most = int(told[:, 1].max())
            if most > call.capacity:
                raise RuntimeError(f"{_overflow(most)}.")
            return None
        if group not in _alarms:
            _alarms[group] = _Alarm(told.device)
        rows, invalid = told[:, 1:3].amax(0).unbind()
        worst = torch.stack([rows.masked_fill(rows <= call.capacity, 0), invalid])
        _alarms[group].note(worst)
        return (worst > 0).any()

    def _run(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's experts; sizes are those of the arguments, whatever the ids are."""
        count, slots = ids.shape
        if slots == 1 or self._asks(rows.device):
            out = self.run_experts(rows, ids, weights)
        else:
            copies = rows[:, None].expand(count, slots, -1).reshape(count * slots, -1)
            out = self.run_experts(copies, ids.reshape(-1, 1), weights.reshape(-1, 1))
            out = out.view(count, slots, -1).sum(1)
        # Which experts got a token is not known to the host, so all parameters are joined.
        return join_parameters(out, self.expert_parameters())
