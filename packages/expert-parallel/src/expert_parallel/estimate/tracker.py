"""A dispatch mode that sees each operator of a step, on fake tensors or on real ones.

[Note: kinds]
Parameters, gradients and optimizer states are what they are. Gathered buffers: whole parameters that
FSDP2 gathers, and the buffers around its collectives. Exchange buffers: what collectives of the TP and EP
axes write, as long as it lives, so received rows that are kept for backward too. Activations: whatever else
a forward makes, the second forward of checkpointed layers included. Temporaries: whatever else backward,
clipping and the optimizer make, unsharded gradients included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as hooks

from ep_mesh import ParallelMesh

from ._compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    after_reductions,
    in_backward,
    quiet_propagation,
)
from .collectives import NAMESPACES, axis_of, call_of
from .memory import Kind, Memory
from .operators import Cost, cost_of, tensors_of
from .timeline import Carried, Timeline


class Tracker(TorchDispatchMode):
    """Follows memory and collectives; with a timeline FLOPs, kernels and time too.

    Args:
        mesh: whose axes are told.
        timeline: None: no time is told.
        fake: the mode of fake tensors; None: they are real.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        timeline: Timeline | None = None,
        fake: FakeTensorMode | None = None,
    ) -> None:
        super().__init__()
        self.mesh, self.timeline, self.fake = mesh, timeline, fake
        self.memory = Memory()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.sent: Counter[tuple[str, str]] = Counter()
        self.flops: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.host_reads = 0
        self._axes: dict[tuple[int, ...], str] = {}
        self._running = 0
        self._forward = 0
        self._next_is_fsdp = False
        self._sending_off = False
        self._done = 0.0

    def begin(self, timeline: Timeline | None) -> None:
        """Begin to count; memory that lives stays."""
        self.timeline = timeline
        for counter in (self.calls, self.sent, self.flops, self.kernels, self.moved, self.seconds):
            counter.clear()
        self.host_reads = 0
        self.memory.peaks.clear()
        self.memory.places.clear()

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Follow everything inside, and where in the model it runs."""
        names = {id(module): name for name, module in model.named_modules()}

        def enter(module: nn.Module, *_: Any) -> None:
            self._forward += 1
            name = names.get(id(module))
            if name:
                self.memory.place = name

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            self._forward -= 1
            name = names.get(id(module), "")
            if name.rpartition(".")[2].isdecimal():  # a layer: backward comes back to it
                for tensor in tensors_of(output):
                    if tensor.requires_grad:
                        tensor.register_hook(partial(self._reached, name))

        with ExitStack() as stack:
            for handle in (
                hooks.register_module_forward_pre_hook(enter),
                hooks.register_module_forward_hook(leave, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(after_reductions(self._reduced))
            stack.enter_context(self.memory.following_resizes())
            stack.enter_context(quiet_propagation(self.paused))
            stack.enter_context(self)
            yield

    def follow_gradients(self, model: nn.Module) -> None:
        """Know gradients that autograd accumulates, for as long as the model lives."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow nothing inside."""
        self._running -= 1
        try:
            yield
        finally:
            self._running += 1

    def run_kernel(self, read: float, written: float, kernels: int, dtype: torch.dtype) -> None:
        """Count kernels that torch does not see."""
        self._count("ep", Cost(0.0, read + written, kernels, dtype))

    @contextmanager
    def sending_off(self) -> Iterator[Callable[[], None]]:
        """Hold the device up by the collective inside only where what this gives is called."""
        self._done, self._sending_off = 0.0, True
        arrival: list[float] = []

        def wait() -> None:
            if self.timeline is not None and self._running >= 0:
                self.timeline.wait(*arrival)

        try:
            yield wait
        finally:
            self._sending_off = False
            arrival.append(self._done)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        if self._running < 0:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return self._read(func, args)
        result = func(*args, **kwargs)
        namespace = func.namespace
        if namespace in NAMESPACES:
            if name == "wait_tensor":
                return result
            if name == "recv_":
                self._mark(False, "recv", args, result)
                return result
            self._collect(func, args, result)
        else:
            self._follow(func, name, namespace, args, kwargs, result)
        return result

    def read(self) -> None:
        """The host waits for a number."""
        self.host_reads += 1
        if self.timeline is not None:
            self.timeline.read()

    def _read(self, func: Any, args: Any) -> Any:
        """A number that the host reads. Fake ones: true, one, as the masks of a plain batch."""
        self.read()
        if self.fake is None or not isinstance(args[0], FakeTensor):
            return func(*args)
        return 1.0 if args[0].is_floating_point() else 1

    def _follow(
        self, func: Any, name: str, namespace: str, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        kind = self._kind()
        if namespace == "fsdp":
            for tensor in tensors_of([result, kwargs.get("out"), *args]):
                if self._kind_of(tensor) in (None, "activations", "temporaries"):
                    self.memory.set_kind(tensor, "gathered_buffers")
            self._next_is_fsdp = name in ("all_gather_copy_in", "chunk_cat")
            if name == "split_with_sizes_copy" and self.timeline is not None:
                self.timeline.gathered()
        for tensor in tensors_of(result):
            self.memory.add(tensor.untyped_storage(), kind)
        if self.timeline is not None:
            out = kwargs.get("out")
            cost = cost_of(func, args, kwargs, result if out is None else out)
            if cost.kernels:
                self._count(name, cost)

    def _count(self, name: str, cost: Cost) -> None:
        if self.timeline is None or self._running < 0:
            return
        seconds = self.timeline.device.kernel_time(cost.flops, cost.moved, cost.kernels, cost.dtype)
        self.timeline.kernels(cost.kernels, seconds)
        self.kernels[self.memory.phase] += cost.kernels
        self.flops[name] += int(cost.flops)
        self.moved[name] += int(cost.moved)
        self.seconds[name] += seconds  # type: ignore[assignment]

    def _collect(self, func: Any, args: Any, result: Any) -> None:
        with self.paused():
            call = call_of(func, args, result, self._axis)
        if call is None:
            return
        fsdp, self._next_is_fsdp = self._next_is_fsdp, False
        own = call.ranks.index(self.mesh.rank)
        sent = sum(size for place, size in enumerate(call.sent) if place != own)
        key = call.axis, call.kind
        self.calls[key] += 1
        self.sent[key] += round(sent)
        self._mark(fsdp, call.kind, args, result)
        if self.timeline is not None:
            device = self.timeline.device
            seconds = device.link_time(*call.split(self.mesh.rank, device.devices_per_node))
            how: Carried = "waited_for"
            beside = call.kind == "all_reduce" and call.axis.startswith("dp_replicate")
            if fsdp or beside or call.kind == "send":
                how = "gather" if call.kind == "all_gather" else "reduce"
            elif self._sending_off:
                how = "sent_off"
            self._done = self.timeline.collective(seconds, how)

    def _axis(self, ranks: tuple[int, ...]) -> str:
        if ranks not in self._axes:
            self._axes[ranks] = axis_of(self.mesh, ranks)
        return self._axes[ranks]

    def _mark(self, fsdp: bool, call: str, args: Any, result: Any) -> None:
        """Say what the buffers of a collective are."""
        written = list(tensors_of(result)) or list(tensors_of(args))[:1]
        if fsdp:
            kind: Kind = "gradients" if call == "reduce_scatter" else "gathered_buffers"
        else:
            kind = "exchange_buffers"
        for tensor in written:
            if self._kind_of(tensor) in (None, "activations", "temporaries", "gathered_buffers"):
                self.memory.set_kind(tensor, kind)

    def _kind_of(self, tensor: Tensor) -> str | None:
        return self.memory.kind_of(tensor.untyped_storage())

    def _kind(self) -> Kind:
        if self.memory.phase in ("forward", "backward") and (self._forward or not in_backward()):
            return "activations"
        return "temporaries"

    def _reached(self, name: str, _: Tensor) -> None:
        self.memory.place = name

    def _reduced(self, gradient: Tensor) -> None:
        self.memory.set_kind(gradient, "gradients")

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.memory.set_kind(parameter.grad, "gradients")
