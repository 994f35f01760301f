"""`with_layout`: a trainer that others derived from `transformers.Trainer`, for sharded models."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, cast

from torch import nn
from transformers import Trainer

from ep_trainer import _compat
from ep_trainer.trainer import EPTrainer

TrainerT = TypeVar("TrainerT", bound=Trainer)


def with_layout(trainer: type[TrainerT]) -> type[TrainerT]:
    """A class that does what `trainer` and `EPTrainer` do: `with_layout(trl.SFTTrainer)`.

    What `trainer` overrides (its data, its loss, its metrics) runs inside what the layout changes (data
    shards, counts, norms, optimizer groups, checkpoints). The model is sharded before it is given to
    the class; adapters are added before too (`expert_parallel.add_lora`), not by a `peft_config`.

    A trainer with a `compute_loss` of its own computes its auxiliary loss as it does in data parallel
    training: each data shard's own, averaged. Its evaluation loss is the global batch's, each label once.
    Over pipeline stages its `compute_loss` is called on the last stage, for each micro-batch; trainers
    that replace the model's forward (`SFTTrainer`) are refused there.

    Args:
        trainer: a subclass of `transformers.Trainer` that takes `(model, args, ...)`, and computes its
            loss by calls of the model. Seen with `SFTTrainer` of trl 1.16.

    Returns:
        The class, named `EP` and the trainer's name; `EPTrainer` itself for `transformers.Trainer`.

    Raises:
        TypeError: it is no trainer class.
    """
    kind: Any = trainer
    if not (isinstance(kind, type) and issubclass(kind, Trainer)):
        raise TypeError(f"with_layout takes a subclass of transformers.Trainer, got {kind!r}.")
    if issubclass(kind, EPTrainer):
        return trainer
    made: Any = EPTrainer if kind is Trainer else _with_layout(cast("Any", kind))
    return cast("type[TrainerT]", made)


@functools.cache
def _with_layout(trainer: Any) -> type[Trainer]:
    return type(f"EP{trainer.__name__}", (_Mixed, trainer), {"__doc__": _Mixed.__doc__})


class _Mixed(EPTrainer):
    """A trainer made by `with_layout`."""

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
        if self._computes_own_loss and isinstance(model, nn.Module):
            check_head(model)
        if named.get("peft_config") is not None and isinstance(model, nn.Module):
            raise ValueError(
                "peft_config would wrap the sharded model in adapters that are not sharded: call "
                "expert_parallel.add_lora(model, peft_config) and leave it out here."
            )
        before = vars(model).get("forward") if isinstance(model, nn.Module) else None
        super().__init__(model, args, *rest, **named)
        if self.layout.pp > 1 and vars(self.model).get("forward") is not before:
            raise ValueError(
                f"{type(self).__name__} replaces the model's forward by one that takes the model apart, and "
                f"a pipeline stage (pp_size={self.layout.pp}) holds only parts of it: use EPTrainer, or "
                "pp_size=1."
            )
        if self.is_sharded:
            _compat.count_gathered_once(self)


def check_head(model: nn.Module) -> None:
    """Refuse adapters on a head whose weight a trainer's fused loss reads past them.

    Raises:
        ValueError: there are some.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module) and next(head.children(), None) is not None:
        raise ValueError(
            "the output head has adapters, which a trainer with a loss of its own may skip: it multiplies "
            "with the head's weight itself. Leave the head out of target_modules."
        )
