"""Gradient scaling for float16, over several meshes.

torch's `GradScaler` looks at this rank's gradients alone, or at those of one mesh: where an overflow
shows on some ranks only, those would skip a step that the others take. Here the ranks decide
together, in the all-reduce that the gradient norm costs anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ep_plans import grad_norm, local


class WorldGradScaler:
    """A `torch.amp.GradScaler` whose verdict is that of the world; used in the same way.

    The loss is scaled so that small gradients survive float16. A step whose gradients overflow on
    any rank is skipped on all, and the scale falls; after `growth_interval` steps without it rises.

    Cost of a step: one all-reduce of a number (`unscale_`, which gives the norm back) and one host
    sync. The scale itself is a number on the host.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1):
            raise ValueError(
                "a scaler needs init_scale > 0, growth_factor > 1 and 0 < backoff_factor < 1, got "
                f"{init_scale}, {growth_factor} and {backoff_factor}."
            )
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {growth_interval}.")
        self._scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0
        self._norms: dict[int, Tensor] = {}
        self._overflowed: dict[int, bool] = {}

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss times the scale."""
        return outputs * self._scale

    def unscale_(self, optimizer: Optimizer, *, witness: Tensor | None = None) -> Tensor:
        """Divide the gradients by the scale; give back their norm, not finite after an overflow.

        Args:
            optimizer: has all parameters whose gradients were scaled, of any meshes.
            witness: as in `ep_plans.grad_norm`.

        Raises:
            RuntimeError: called twice for a step.
            ValueError: gradients in float16, which lose what the scaling saved.
        """
        if id(optimizer) in self._norms:
            raise RuntimeError("unscale_ was called already since the last update().")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        if any(grad.dtype is torch.float16 for grad in grads):
            raise ValueError(
                "gradients in float16 can't be unscaled: keep the parameters in float32 and let "
                "autocast compute in float16."
            )
        factor = 1.0 / self._scale
        for grad in grads:
            grad.mul_(factor)
        norm = grad_norm(parameters, witness=witness)
        self._norms[id(optimizer)] = norm
        return norm

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, if no rank's gradients overflowed. Unscales if nobody did.

        Raises:
            RuntimeError: called twice for a step.
        """
        if id(optimizer) in self._overflowed:
            raise RuntimeError("step() was called already since the last update().")
        if id(optimizer) not in self._norms:
            self.unscale_(optimizer)
        overflowed = not bool(torch.isfinite(self._norms[id(optimizer)]))
        self._overflowed[id(optimizer)] = overflowed
        return None if overflowed else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | None = None) -> None:
        """Let the scale fall after an overflow, rise after enough steps without; or set it.

        Raises:
            RuntimeError: nothing was stepped.
        """
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._overflowed:
            raise RuntimeError("update() without a step() before it.")
        elif any(self._overflowed.values()):
            self._scale *= self._backoff_factor
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._growth_interval:
                self._scale *= self._growth_factor
                self._good_steps = 0
        self._norms.clear()
        self._overflowed.clear()

    def get_scale(self) -> float:
        """The scale."""
        return self._scale

    def is_enabled(self) -> bool:
        """True."""
        return True

    def state_dict(self) -> dict[str, float]:
        """Numbers, the same on every rank, under the names of torch's scaler."""
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Go on from a state of this scaler or of torch's.

        Raises:
            ValueError: the state is that of a run without fp16.
        """
        if not state_dict:
            raise ValueError("the scaler's state is empty: it was saved by a run without fp16.")
        self._scale = float(state_dict["scale"])
        self._growth_factor = float(state_dict["growth_factor"])
        self._backoff_factor = float(state_dict["backoff_factor"])
        self._growth_interval = int(state_dict["growth_interval"])
        self._good_steps = int(state_dict["_growth_tracker"])
