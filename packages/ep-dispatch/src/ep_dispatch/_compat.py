"""Private APIs of other systems, with the versions they were seen in."""

from __future__ import annotations

import importlib
import inspect
import weakref
from typing import Any

import torch
from torch._compile import _disable_dynamo as disable_compile  # torch 2.11 to 2.13
from torch.distributed import ProcessGroup


def transformers_expert_parallel() -> Any:
    """The module of EP implementations in transformers (5.24; 5.17 has none)."""
    from transformers.distributed import expert_parallel

    return expert_parallel


def torchtitan_token_dispatchers() -> tuple[Any, Any]:
    """The module of token dispatchers in torchtitan, and its `override` (0.3.0).

    Raises:
        ImportError: torchtitan, or what it needs (triton, also on CPUs), is not installed.
    """
    try:
        config = importlib.import_module("torchtitan.config")
        return importlib.import_module("torchtitan.models.common.token_dispatcher"), config.override
    except (ImportError, AttributeError) as error:
        raise ModuleNotFoundError(
            "ep_dispatch.adapters.torchtitan needs torchtitan 0.3.0 or newer and what it imports for its "
            f"MoE (spmd_types, triton, tyro): {error}.",
            name="torchtitan",
        ) from error


def checkpoint_frame() -> tuple[object | None, int | None]:
    """The checkpointed region that this code runs in, and the backward that recomputes it.

    torch 2.11 to 2.13: `torch.utils.checkpoint.checkpoint(use_reentrant=False)` puts hooks for saved
    tensors in place whose closure names the region, in forward and again in each recomputation. Where
    that is not found (other hooks on top, the reentrant variant), there is no region.

    Returns:
        an object that lives as long as the region's graph, the same in forward and recomputation, or
        None; and the number of the backward, or None in forward.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None, None
    pack = inspect.unwrap(hooks[0])
    cells = getattr(pack, "__closure__", None) or ()
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    found = {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}
    reference = found.get("target_frame_ref")
    if isinstance(reference, weakref.ref):
        return reference(), torch._C._current_graph_task_id()
    frame = found.get("frame")
    return (frame, None) if hasattr(frame, "weak_holders") else (None, None)


def group_of_name(name: str) -> ProcessGroup:
    """The process group with this `group_name` (torch 2.11 to 2.13)."""
    distributed: Any = torch.distributed.distributed_c10d
    group: ProcessGroup = distributed._resolve_process_group(name)
    return group


def symmetric_memory() -> Any:
    """CUDA symmetric memory (torch 2.11 to 2.13; seen, not run: `empty`, `rendezvous`, and of the handle
    `buffer_ptrs`, `barrier`).
    """  # noqa: D205
    return importlib.import_module("torch.distributed._symmetric_memory")


__all__ = [
    "checkpoint_frame",
    "disable_compile",
    "group_of_name",
    "symmetric_memory",
    "torchtitan_token_dispatchers",
    "transformers_expert_parallel",
]
