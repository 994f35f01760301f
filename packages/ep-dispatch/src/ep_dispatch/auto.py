"""`auto`: the implementation that fits the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .all_reduce import AllReduce
from .all_to_all import AllToAll
from .implementation import EPImplementation, ExpertsForward, uses_megamoe
from .megamoe import DeepGemmMegaMoe

__all__ = ["Auto"]


class Auto(EPImplementation):
    """The default. `deepgemm_megamoe` for experts configured for it; else `all_reduce` where the EP
    group shares one batch and grad mode is off (inference); else `all_to_all`.

    It takes the settings of `AllToAll`. The choice depends on the layout and on grad mode alone, which
    are the same on all ranks.

    Attributes:
        all_to_all, all_reduce, megamoe: the implementations it chooses from; None where one cannot run.
    """  # noqa: D205

    runs_megamoe_experts: ClassVar[bool] = True

    @classmethod
    def options(cls) -> list[str]:
        """Those of `AllToAll`, for the calls that it runs."""
        return AllToAll.options()

    def __init__(self, experts_forward: ExpertsForward, **settings: Any) -> None:
        options = {name: settings.pop(name) for name in self.options() if name in settings}
        super().__init__(experts_forward, **settings)
        self.megamoe: DeepGemmMegaMoe | None = None
        self.all_to_all: AllToAll | None = None
        self.all_reduce: AllReduce | None = None
        if uses_megamoe(self.experts):
            if options:
                raise ValueError(
                    f"{', '.join(options)} cannot be set for experts configured for deepgemm_megamoe, "
                    "whose kernel moves the tokens."
                )
            self.megamoe = DeepGemmMegaMoe(experts_forward, **settings)
            return
        self.all_to_all = AllToAll(experts_forward, **options, **settings)
        if self.shares_batch:
            self.all_reduce = AllReduce(experts_forward, **settings)

    def chosen(self) -> EPImplementation:
        """The implementation that a call made now would run."""
        if self.megamoe is not None:
            return self.megamoe
        if self.all_reduce is not None and not torch.is_grad_enabled():
            return self.all_reduce
        assert self.all_to_all is not None
        return self.all_to_all

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        shared_experts: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run the chosen one."""
        chosen = self.chosen()
        chosen.layer = self.layer
        return chosen(hidden_states, top_k_index, top_k_weights, shared_experts=shared_experts)
