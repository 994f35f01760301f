"""What `EPTrainer` does with gradients between backward and the optimizer's step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from ep_mesh.world import gathered
from ep_plans import grad_norm, parallel_state
from ep_trainer._compat import prepared
from ep_trainer.in_backward import StepInBackward
from ep_trainer.muon import Muon
from ep_trainer.nonfinite import SkippableOptimizer, check_policy, tell
from ep_trainer.scaler import WorldGradScaler


class Numerics:
    """The norm of a step's gradients and the verdict on it.

    Args:
        on_nonfinite, in_backward: as in `EPTrainer`.

    Attributes:
        skipped_steps: steps of this run that were not taken; training logs have it once there is one.
    """

    def __init__(self, on_nonfinite: str, *, in_backward: bool) -> None:
        check_policy(on_nonfinite)
        self.on_nonfinite = on_nonfinite
        self.in_backward = in_backward
        self.skipped_steps = 0
        self._stepper: StepInBackward | None = None
        self._seen: list[tuple[Any, Tensor]] = []

    def check(self, args: TrainingArguments, model: nn.Module) -> None:
        """Refuse what can't work together.

        Raises:
            ValueError: names each argument and why.
        """
        problems = list(self._problems(args, model))
        if problems:
            raise ValueError("this cannot work:\n  - " + "\n  - ".join(problems))

    def _problems(self, args: TrainingArguments, model: nn.Module) -> Iterator[str]:
        state = parallel_state(model)
        if args.fp16:
            narrow = any(p.dtype is torch.float16 and p.requires_grad for p in model.parameters())
            if state is not None and state.mesh.size("pp") > 1:
                narrow = any(gathered(narrow, state.mesh.group("pp")))
            if narrow:
                yield (
                    "fp16=True with parameters in float16: their gradients can't be unscaled without "
                    "loss; load the model with dtype=torch.float32, autocast computes in float16"
                )
            if state is not None and state.config.fsdp_mixed_precision:
                yield (
                    "fp16=True with fsdp_mixed_precision=True, which computes in bfloat16: leave one "
                    "of them out"
                )
            if state is not None and state.mesh.device_type == "cpu":
                yield (
                    "fp16=True on CPU ranks: accelerate has no float16 there; pass bf16=True, which "
                    "needs no scaling"
                )
        if self.in_backward:
            yield from self._problems_in_backward(args)
            if state is not None and state.mesh.size("pp") > 1:
                yield (
                    "optim_in_backward=True over pipeline stages, where a gradient is whole once the last "
                    "micro-batch has added to it, when those of all layers lie there: it would free "
                    "nothing; leave it out"
                )

    def _problems_in_backward(self, args: TrainingArguments) -> Iterator[str]:
        why = "optim_in_backward=True frees a gradient before the others are there, so"
        if args.max_grad_norm > 0:
            yield f"{why} max_grad_norm={args.max_grad_norm} can't clip by their norm; pass 0"
        if args.gradient_accumulation_steps > 1:
            yield (
                f"{why} gradient_accumulation_steps={args.gradient_accumulation_steps} has nothing to "
                "add to; pass 1 and a larger per_device_train_batch_size"
            )
        if args.fp16:
            yield f"{why} fp16=True can't skip a step that overflows; pass bf16=True"
        if self.on_nonfinite == "skip":
            yield f'{why} on_nonfinite="skip" comes too late; pass "stop" or "ignore"'

    def check_unsharded(self) -> None:
        """Refuse what only a sharded model has.

        Raises:
            ValueError: an option was given.
        """
        if self.in_backward or self.on_nonfinite != "stop":
            raise ValueError(
                "optim_in_backward and on_nonfinite are for sharded models, and this one is trained as "
                "by transformers.Trainer: leave them out, or shard the model (of one rank, too)."
            )

    def watch(self, optimizer: Optimizer) -> None:
        """Step in backward, if asked to.

        Raises:
            ValueError: the optimizer is `Muon`.
        """
        if not self.in_backward:
            return
        if isinstance(optimizer, Muon):
            raise ValueError(
                "optim_in_backward=True does not go with Muon, whose ranks share the work on several "
                "matrices: leave it out."
            )
        if self._stepper is not None:
            self._stepper.remove()
        self._stepper = StepInBackward(optimizer)

    def saw(self, inputs: Any, loss: Tensor) -> None:
        """Remember a micro-batch of the step until the verdict."""
        self._seen.append((inputs, loss.detach()))

    def judged_norm(self, trainer: Trainer, model: nn.Module) -> Tensor:
        """The norm of the step's gradients over all meshes; the same on every rank.

        One all-reduce of a number, with the losses in it; and a host sync, unless `"ignore"`.

        Raises:
            RuntimeError: the norm or a loss is not finite, and `"stop"`.
        """
        seen, self._seen = self._seen, []
        witness = torch.stack([loss for _, loss in seen]) if seen else None
        scaler, optimizer = trainer.accelerator.scaler, trainer.optimizer
        assert isinstance(optimizer, SkippableOptimizer)
        if isinstance(scaler, WorldGradScaler):
            norm = scaler.unscale_(optimizer.optimizer, witness=witness)
            if scaler.get_scale() > 1.0:
                return norm  # an overflow is the scaler's to mend
        elif self._stepper is not None:
            norm = self._stepper.norm(witness)
        else:
            norm = grad_norm(model, witness=witness)
        if self.on_nonfinite == "ignore" or bool(torch.isfinite(norm)):
            return norm

        def forward(micro: int) -> Any:
            with trainer.compute_loss_context_manager():
                return model(**prepared(trainer, seen[micro][0]))

        losses = [loss for _, loss in seen]
        text = tell(model, trainer.state.global_step + 1, norm, losses, forward)
        if self.on_nonfinite == "stop":
            raise RuntimeError(
                f'{text} Nothing was stepped; on_nonfinite="skip" goes on without such steps.'
                if self._stepper is None
                else f"{text} The parameters were stepped in backward: go on from a checkpoint."
            )
        if trainer.args.process_index == 0:
            warnings.warn(f"skipped {text}", stacklevel=2)
        self.skipped_steps += 1
        optimizer.skip_next = True
        return norm
