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

from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from . import checks
from .agreement import Notice, agree
from .checkpointing import CheckpointMemory
from .collectives import _all_gather
from .host import capturing, on_device, on_host
from .implementation import EPImplementation, ExpertsForward
from .links import GradNeeds, join_parameters, new_link
from .routing import SKIPPED, local_routes, owner_places
from .symmetric_buffers import HEADER
from .symmetric_exchange import Exchange, exchange_back, exchange_there

__all__ = ["SymmetricMemory"]


@dataclass(frozen=True, eq=False)
class _Call:
    """What the ranks agreed on for a call, and what a recomputation of it uses again.

    Attributes:
        index: [T, K], the expert ids.
        capacity: C.
        top_k: K, the largest of all ranks.
        needs: which gradients travel.
    """

    index: Tensor
    capacity: int
    top_k: int
    needs: GradNeeds


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


def _overflow(rows: int, room: str = "max_rows_per_pair allows") -> str:
    return (
        f"a rank had {rows} rows for one rank of its EP group, more than {room}; give a larger "
        "max_rows_per_pair, or none (a rank then has room for all tokens of every other)"
    )


class SymmetricMemory(EPImplementation):
    """Rows are written straight into the other ranks' memory; no size is read on the host.

    A token crosses once to each rank that holds any of its experts, with its routing; the sum of their
    weighted outputs comes back. All sizes depend on C alone, the rows that one rank may send to one, so
    nothing waits for the host, and a CUDA graph can be captured (with `max_tokens`). Fits every layout,
    slices over TP as `AllToAll` does, and keeps the routing in a checkpointed region as it does.

    The ranks of an EP group must be on one machine: GPUs with access to each other's memory, where rows
    are written by a Triton kernel, or CPU processes, over shared memory.

    Args:
        experts_forward: see `EPImplementation`. Slots without a token have the skip id. On CUDA it is
            called with one slot a row, R*K rows, for which the experts of `ep_kernels` need no host
            synchronization.
        max_tokens: the largest T that any rank will hold, the same on all. Nothing is then agreed on per
            call: C is fixed, so that CUDA graphs can be captured after a call of each layer (warm-up), and
            each rank checks its own input, as `AllReduce` does. None: each call agrees on its largest T
            and its input, by an all-gather of nine integers a rank and a host synchronization.
        max_rows_per_pair: C, if it is less than the worst case, where all tokens of a rank go to one. A routing
            that needs more is an error: on the CPU at once, on all ranks; on CUDA the output and the
            gradients of rows that were sent are NaN, and on each rank a later call, or `check`, raises.
        settings: see `EPImplementation`.

    Raises:
        ValueError: `max_tokens` or `max_rows_per_pair` is less than 1.

    Cost of a forward: rows there and back, two barriers each; one all-gather over TP. Memory:
    `R * (H + 2K)` values of buffer in all layers of a group together, and in each layer `R` rows, which the
    experts keep for backward. Backward: the same exchanges, for the gradients that any rank of the group
    needs (with `max_tokens`: all).
    """

    def __init__(
        self,
        experts_forward: ExpertsForward,
        *,
        max_tokens: int | None = None,
        max_rows_per_pair: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(experts_forward, **settings)
        for name, value in (("max_tokens", max_tokens), ("max_rows_per_pair", max_rows_per_pair)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} must be None or an int of at least 1, the same on all ranks, got {value!r}."
                )
        self.max_tokens, self.max_rows_per_pair = max_tokens, max_rows_per_pair
        self._memory = CheckpointMemory[_Call]()

    def check(self) -> None:
        """Raise what went wrong on the device in the calls of this EP group since the last look.

        Call it on all ranks. Cost: on CUDA a host synchronization.

        Raises:
            RuntimeError: more rows than `max_rows_per_pair`, or expert ids out of range; the call gave NaN.
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
        inner, rows = self._split(inner, hidden_states, needs.hidden, "dispatch")
        inner, weights = self._split(inner, top_k_weights, needs.weights, "dispatch")
        ids = call.index[slice(*self._slice(top_k_index.shape[0]))]
        if more := call.top_k - ids.shape[1]:
            weights, ids = pad(weights, (0, more)), pad(ids, (0, more), value=SKIPPED)
        there, back = (
            Exchange(group, self.ep_size, call.capacity, call.top_k, self.phase(name))
            for name in ("dispatch", "combine")
        )
        with torch.no_grad():
            place, counts, invalid = owner_places(ids, experts=self.num_experts, ranks=self.ep_size)
            facts = torch.stack([counts.max(), invalid.long()])
            header = pad(facts.expand(self.ep_size, 2), (1, HEADER - 3))
            header[:, 0] = counts
        inner, rows, weights, ids, told = exchange_there(
            inner, there, needs, rows, weights, ids.int(), place, header
        )
        bad = self._judge(told, call)
        ids, foreign = local_routes(ids, self.ep_rank, self.num_local_experts)
        # Masked before anything multiplies: see `AllReduce`.
        out = self._run(rows, ids, weights.masked_fill(foreign, 0)).to(dtype)
        out = exchange_back(link if inner is None else inner, back, out, place, told[:, 0])
        if bad is not None:
            out = out * torch.where(bad, torch.nan, 1.0)  # so that gradients are NaN too
        return self._gather(out, hidden_states.shape[0])

    def _look(self, *, wait: bool = False) -> None:
        alarm = None if self.ep_group is None else _alarms.get(self.ep_group)
        if alarm is not None:
            alarm.look(wait=wait)

    def _asks(self, device: torch.device) -> bool:
        """Whether what is on the device may be read on the host."""
        return device.type == "cpu"

    def _capacity(self, tokens: int) -> int:
        """C, for the largest T of any rank."""
        if self._slices:
            tokens = -(-tokens // self.tp_size)
        return max(
            1, tokens if self.max_rows_per_pair is None else min(tokens, self.max_rows_per_pair)
        )

    def _agree(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> _Call:
        """What all ranks tell each other before any row moves."""
        problem = self._problem(hidden, top_k_index, top_k_weights)
        notice, top_k = Notice(rank=self.ep_rank, refused=True), 0
        device = self._device()
        if problem is None:
            notice, top_k = self._notice(top_k_weights, hidden), top_k_index.shape[1]
            device = top_k_index.device
        own = on_device([top_k, *notice.encode()], device)[None]
        if problem is None:
            own[0, -1] += self._outside(top_k_index).any()
        known = own
        if self.ep_group is not None and self.ep_size > 1:
            with self.phase("counts"):
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

    def _notice(self, top_k_weights: Tensor, hidden_states: Tensor | None) -> Notice:
        notice = super()._notice(top_k_weights, hidden_states)
        return replace(notice, bound=self.max_rows_per_pair or 0)

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
            most, rank = (int(x) for x in told[:, 1].max(0))
            if most > call.capacity:
                room = f"max_rows_per_pair={self.max_rows_per_pair} (EP rank {rank}, {self.layer})"
                raise RuntimeError(f"{_overflow(most, room)}.")
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
