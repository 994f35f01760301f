"""Private parts of PyTorch and transformers that the simulation needs, in one place.

| what | why | seen in |
| --- | --- | --- |
| `FakeTensorMode`, `unset_fake_temporarily` | tensors without memory | torch 2.11 to 2.13 |
| `fake_pg.FakeStore`, `_tools.fake_collectives` | a process group whose collectives come back at once | torch 2.11 to 2.13 |
| `TorchDispatchMode` | sees each operator that runs | torch 2.11 to 2.13 |
| `torch._C._current_graph_task_id` | whether autograd runs backward now | torch 2.11 to 2.13 |
| `distributed_c10d._resolve_process_group` | the group of a functional collective | torch 2.11 to 2.13 |
| `FSDPParamGroup.post_backward` | where FSDP2 sets gradients | torch 2.11 to 2.13 |
| `ShardingPropagator` | where DTensor makes tensors of global shapes that never have memory | torch 2.11 to 2.13 |
| the logger of `torch._subclasses.fake_tensor` | logs what is raised | torch 2.13 |
| `masking_utils.is_tracing` | fake tensors count as traced: a mask would be built that a run has not | transformers 5.17, 5.24 |
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "after_reductions",
    "group_named",
    "in_backward",
    "quiet_propagation",
    "start_fake_group",
    "unlogged_errors",
    "unset_fake_temporarily",
    "without_tracing",
]


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a functional collective names."""
    find: Callable[[str], dist.ProcessGroup] = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009
    return find(name)


def start_fake_group(world_size: int, rank: int) -> None:
    """Start `torch.distributed` with ranks that are not there."""
    importlib.import_module("torch.distributed._tools.fake_collectives")  # for fake tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def in_backward() -> bool:
    """Whether autograd runs backward now."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def without_tracing() -> Iterator[None]:
    """Let transformers build the attention masks of a run."""
    with mock.patch.object(masking_utils, "is_tracing", return_value=False):
        yield


@contextmanager
def unlogged_errors() -> Iterator[None]:
    """Let an operator that can't run on fake tensors raise, without a traceback in the log as well."""
    with mock.patch.object(logging.getLogger(FakeTensor.__module__), "disabled", True):
        yield


@contextmanager
def quiet_propagation(quiet: Callable[[], Any]) -> Iterator[None]:
    """Run DTensor's propagation of shardings inside `quiet()`.

    The first time that it meets an operator it runs it on fake tensors of the global shapes.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    with ExitStack() as stack:
        for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
            inner = getattr(propagator, name, None)
            if inner is None:
                continue

            def run(*args: Any, _inner: Any = inner, **kwargs: Any) -> Any:
                with quiet():
                    return _inner(*args, **kwargs)

            stack.enter_context(mock.patch.object(propagator, name, run))
        yield


@contextmanager
def after_reductions(tell: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Tell the gradient of each parameter that FSDP2 has reduced."""
    reduce = FSDPParamGroup.post_backward

    def run(group: Any, *unused: Any) -> None:
        reduce(group, *unused)
        for parameter in group.fsdp_params:
            grad = parameter.sharded_param.grad
            if grad is not None:
                tell(grad)

    with mock.patch.object(FSDPParamGroup, "post_backward", run):
        yield
