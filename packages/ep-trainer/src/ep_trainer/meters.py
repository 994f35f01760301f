"""Callbacks that measure: tokens per second, memory, how the experts are loaded.

A meter is a `TrainerCallback` whose `metrics` `EPTrainer` adds to each training log, so that they
reach every logger.

    T tokens of this rank, K experts per token, E experts of a layer, L layers with experts
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from ep_mesh import ParallelMesh
from ep_plans import parallel_state


class Meter(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Adds `metrics()` to the logs of training."""

    def count(self, tokens: float) -> None:
        """This rank's share of a micro-batch's input tokens; a TP group's shares are its tokens."""

    def metrics(self) -> dict[str, float]:
        """Numbers since the last log. Called on every rank, so it may communicate."""
        return {}


class Speed(Meter):
    """`tokens_per_second_per_rank`: input tokens of all batches, by time and by ranks.

    A token counts once, whatever the TP size. The first log since training began has no rate: the
    steps before it also allocate and compile. One gather of a number from all ranks per log.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._since: float | None = None

    def count(self, tokens: float) -> None:
        """Add to the tokens."""
        self._tokens += tokens

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Forget what was before."""
        self._tokens, self._since = 0.0, None

    def metrics(self) -> dict[str, float]:
        """The rate since the last log."""
        now = time.perf_counter()
        tokens, since = self._tokens, self._since
        self._tokens, self._since = 0.0, now
        if since is None:
            return {}
        rate = _mean_over_world(tokens / (now - since))
        return {"tokens_per_second_per_rank": round(rate, 1)}


class Memory(Meter):
    """`peak_memory_gb`: of the rank that needed most, since the start; `per_rank` has all.

    On CUDA what torch allocated, on the CPU the resident memory of the process. One gather of a
    number from all ranks per log.
    """

    def __init__(self) -> None:
        self.per_rank: list[float] = []

    def metrics(self) -> dict[str, float]:
        """The peak so far."""
        mine = peak_memory() / 1e9
        self.per_rank = _gathered(mine)
        return {"peak_memory_gb": round(max(self.per_rank), 3)}


class ExpertLoad(Meter):
    """`expert_load_max`: the most loaded expert of any layer, in shares of an even load.

    1 is perfect balance, E / K the worst: one expert gets every token. `shares` [L, E] are the
    experts' parts of their layer's routes since the last log (rows sum to 1), `history` the tensors
    of all logs. Only training counts, each token once: not in evaluation, nor when activation
    checkpointing runs a layer again. One all-reduce of L x E numbers per log.
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.shares: Tensor | None = None
        self.history: list[Tensor] = []
        self._counts: dict[str, Tensor] = {}
        self._open: set[str] = set()
        self._handles: list[RemovableHandle] = []

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Watch the experts of the model."""
        self.close()
        experts = experts_modules(model)
        self.layers = list(experts)
        self._counts = {}
        for name, (module, num_experts) in experts.items():
            hook = self._counter(name, num_experts, *_ids_are_local(model, name))
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        self._weight = _token_weight(model)

        def open_all(module: nn.Module, inputs: Any) -> None:
            # A recomputed layer runs again without a forward of the whole model before it.
            self._open = set(self.layers) if module.training else set()

        self._handles.append(model.register_forward_pre_hook(open_all))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the model as it was."""
        self.close()

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _counter(
        self, name: str, num_experts: int, first: int, skipped: int | None
    ) -> Callable[[nn.Module, Any, Any], None]:
        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in self._open:
                return
            self._open.discard(name)
            ids_TK = _expert_ids(args, kwargs)
            if ids_TK is None:
                return
            flat = ids_TK.detach().reshape(-1)
            kept = torch.ones_like(flat) if skipped is None else flat.ne(skipped).to(flat.dtype)
            flat = flat + first if skipped is None else (flat + first).clamp(max=num_experts - 1)
            total = self._counts.setdefault(name, flat.new_zeros(num_experts))
            total.index_add_(0, flat, kept)

        return count

    def metrics(self) -> dict[str, float]:
        """The load since the last log."""
        if not self._counts:
            return {}
        counts = torch.stack([self._counts[name] for name in self.layers]).double() * self._weight
        if dist.is_initialized():
            dist.all_reduce(counts)
        self._counts = {}
        self.shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).cpu()
        self.history.append(self.shares)
        worst = (self.shares.amax() * self.shares.shape[1]).item()
        return {"expert_load_max": round(worst, 3)}


def experts_modules(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Modules with stacked experts by name, with the number of experts of the whole layer."""
    state = parallel_state(model)
    spread = set() if state is None else set(state.plans.experts)
    found: dict[str, tuple[nn.Module, int]] = {}
    for name, module in model.named_modules():
        number = getattr(module, "num_experts", None)
        if isinstance(number, int) and any(p.ndim == 3 for p in module.parameters(recurse=False)):
            ranks = state.config.layout.ep if state is not None and name in spread else 1
            found[name] = (module, number * ranks)
    return found


def peak_memory() -> int:
    """Bytes that this rank needed at most so far."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _ids_are_local(model: nn.Module, name: str) -> tuple[int, int | None]:
    """The number of the module's first expert and the id that means "not here", if ids are local.

    A masking router gives local ids: each rank counts the routes to its own experts.
    """
    state = parallel_state(model)
    if state is None or name not in state.plans.masked:
        return 0, None
    here = getattr(model.get_submodule(name), "num_experts", 0)
    return state.mesh.coordinate("ep") * here, here


def _token_weight(model: nn.Module) -> float:
    """1 where this rank's routes count, 0 where another TP rank counts the same ones."""
    state = parallel_state(model)
    if state is None:
        return 1.0
    mesh: ParallelMesh = state.mesh
    own = (
        bool(state.plans.masked)
        or state.config.enable_sequence_parallel
        or mesh.coordinate("tp") == 0
    )
    return 1.0 if own else 0.0


def _expert_ids(args: Any, kwargs: Any) -> Tensor | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32):
            return value.long()
    return None


def _mean_over_world(value: float) -> float:
    return sum(values) / len(values) if (values := _gathered(value)) else value


def _gathered(value: float) -> list[float]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
