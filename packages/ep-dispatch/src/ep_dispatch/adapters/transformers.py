"""Our implementations in transformers' own expert parallelism: a script changes one name.

    from ep_dispatch.adapters import transformers as adapter

    adapter.register()
    config = DistributedConfig(tp_size=4, fsdp_size=2, ep_size=4, ep_implementation="ep_all_to_all")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)

Native transformers then builds one object of ours for each experts module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ep_dispatch import _compat
from ep_dispatch.all_reduce import AllReduce
from ep_dispatch.all_to_all import AllToAll
from ep_dispatch.auto import Auto
from ep_dispatch.hierarchical import HierarchicalAllToAll
from ep_dispatch.implementation import EPImplementation, ExpertsForward
from ep_dispatch.symmetric_memory import SymmetricMemory

__all__ = ["NAMES", "register"]

NAMES: dict[str, type[EPImplementation]] = {
    "ep_all_to_all": AllToAll,
    "ep_all_to_all_hierarchical": HierarchicalAllToAll,
    "ep_all_reduce": AllReduce,
    "ep_symmetric_memory": SymmetricMemory,
    "ep_auto": Auto,
}
"""What `register` adds: the values of transformers' `ep_implementation`, and what they run."""


def register(experts_forward: Callable[[nn.Module], ExpertsForward] | None = None) -> list[str]:
    """Add our implementations to transformers' registry, under `NAMES`.

    Args:
        experts_forward: makes the function that runs an experts module, for example
            `ep_kernels.module_experts_forward`. None: the module's own forward.

    Returns:
        the names.

    Raises:
        ImportError: the installed transformers has no such registry (5.24 has).
    """
    try:
        theirs = _compat.transformers_expert_parallel()
    except ImportError as error:
        raise ImportError(
            "the installed transformers has no registry of expert-parallel implementations; "
            "install transformers 5.24 or newer."
        ) from error
    for name, ours in NAMES.items():
        theirs.EPImplementationInterface.register(name, _adapted(theirs, ours, experts_forward))
    return list(NAMES)


def _adapted(
    theirs: Any,
    ours: type[EPImplementation],
    experts_forward: Callable[[nn.Module], ExpertsForward] | None,
) -> type[Any]:
    """A class with the constructor that transformers calls, which runs `ours`."""

    class Adapted(theirs.EPImplementation):  # type: ignore[misc]
        needs_shared_batch = ours.needs_shared_batch

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.implementation = ours(
                self.experts_forward if experts_forward is None else experts_forward(experts),
                num_local_experts=self.num_local_experts,
                ep_group=ep_mesh.get_group(),
                tp_group=tp_mesh.get_group(),
                experts=experts,
            )

        def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return self.implementation(hidden, top_k_index, top_k_weights)

    Adapted.__name__ = Adapted.__qualname__ = ours.__name__
    return Adapted
