"""The optimizer's step inside backward: a gradient is used and freed as soon as it is there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ep_plans import GradNorm


class StepInBackward:
    """Steps each parameter when backward has its gradient, reduced over all ranks, and frees that.

    A rank then holds the gradients of one FSDP unit at a time (and of parameters outside of FSDP one
    by one), not of the whole model. The optimizer, its groups and its state stay as they are, so
    checkpoints and learning rate schedules see nothing of it. The idea is that of LOMO (Lv et al.
    2023) and of PyTorch's tutorial on optimizer steps in backward.

    Args:
        optimizer: of parameters that each get one gradient per step, whose update of a parameter
            depends on that parameter's gradient alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._norm = GradNorm()
        self._group_of = {
            parameter: place
            for place, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad
        }
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._step) for parameter in self._group_of
        ]

    @torch.no_grad()
    def _step(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._norm.add(parameter.grad, of=parameter)
        groups = self.optimizer.param_groups
        # The groups as they are now: a schedule, or a loaded state, has changed them.
        group = groups[self._group_of[parameter]]
        self.optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        parameter.grad = None

    def norm(self, witness: Tensor | None = None) -> Tensor:
        """The norm of the gradients since the last call. One all-reduce of a number."""
        return self._norm.total(witness).float()

    def remove(self) -> None:
        """Let backward leave the gradients alone again."""
        for handle in self._handles:
            handle.remove()
