"""What the ranks need of memory, and for what."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ep_mesh.world import world_size
from ep_plans import local
from ep_trainer.meters.base import Meter, own_place

_KINDS = ("peak", "parameters", "gradients", "optimizer")


class Memory(Meter):
    """What the ranks needed at most since the start, in GB of 1e9 bytes.

    - `peak_memory_gb`, `peak_memory_mean_gb`: of the rank that needed most, and on average.
    - `memory_parameters_gb`, `memory_gradients_gb`, `memory_optimizer_gb`: what that rank holds
      of them when the optimizer has stepped; `memory_rest_gb`: the rest of its peak, which is
      activations, gathered parameters and buffers of communication (on a CPU the program too).

    On CUDA what torch allocated, on the CPU the resident memory of the process. What lies on another
    device, as with offload, does not count. `per_rank` has all peaks, `kinds` by rank [world, 4] the
    peak, parameters, gradients and optimizer states.

    Cost: 4 numbers per rank in the all-reduce of a log.
    """

    def __init__(self) -> None:
        self.per_rank: list[float] = []
        self.kinds: Tensor | None = None
        self._held: list[int] | None = None

    def on_optimizer_step(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Count what is held, once per log: gradients are there now, and the optimizer's states."""
        if self._held is not None or model is None or optimizer is None:
            return
        parameters = list(model.parameters())
        states = (value for entry in optimizer.state.values() for value in _tensors(entry))
        self._held = [
            _bytes(parameters),
            _bytes(p.grad for p in parameters if p.grad is not None),
            _bytes(states),
        ]

    def sums(self) -> Tensor:
        """A place per rank: the peak and the kinds, in GB."""
        held, self._held = self._held or [0, 0, 0], None
        return own_place([number / 1e9 for number in (peak_memory(), *held)])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """The peak so far."""
        self.kinds = totals.view(world_size(), len(_KINDS))
        self.per_rank = self.kinds[:, 0].tolist()
        peak, *held = self.kinds[self.kinds[:, 0].argmax()].tolist()
        found = {"peak_memory_gb": peak, "peak_memory_mean_gb": self.kinds[:, 0].mean().item()}
        found |= {f"memory_{kind}_gb": value for kind, value in zip(_KINDS[1:], held, strict=True)}
        found["memory_rest_gb"] = max(peak - sum(held), 0.0)
        return {name: round(value, 3) for name, value in found.items()}

    def details(self) -> dict[str, Any]:
        """The peak of each rank."""
        return {"peak_memory_gb_by_rank": [round(peak, 3) for peak in self.per_rank]}


def peak_memory() -> int:
    """Bytes that this rank needed at most so far."""
    if _measured_device() == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _measured_device() -> str:
    return "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"


def _tensors(entry: Any) -> Iterable[Tensor]:
    values = entry.values() if isinstance(entry, dict) else ()
    return [value for value in values if isinstance(value, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of this rank's parts on the measured device; memory that two of them share counts once."""
    device = _measured_device()
    found: dict[int, int] = {}
    for tensor in tensors:
        here = local(tensor)
        if here.device.type == device and here.numel():
            storage = here.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
