"""Tokens per second and how much of the device's peak that is.

S tokens of a row
"""

from __future__ import annotations

import time
import warnings
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ep_mesh.world import gathered
from ep_plans import ModelFlops, model_flops, parallel_state
from ep_trainer.meters.base import Meter

# Dense bf16 operations a second, from NVIDIA's data sheets (half of what they give "with sparsity"). By
# what the device's name contains; the first that fits.
_PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("A100", 312e12),
)


def peak_flops(device_name: str) -> float | None:
    """Operations that a device does in a second at most, dense bf16; None if it is not known."""
    return next((peak for name, peak in _PEAKS if name in device_name), None)


class Speed(Meter):
    """How fast the training is, from one log to the next, evaluation and saving left out.

    - `tokens_per_second_per_rank`: input tokens of all batches, each once, by time and by ranks.
    - `batch_tokens_per_second`: tokens of the batch that a rank holds, by time: what a count on
      one rank tells. A TP group shares a batch, so it is `tp_size` times the first.
    - `tflops_per_rank`: model FLOPs (`ep_plans.model_flops`, forward and backward, nothing twice).
    - `mfu`, `hfu`: shares of the device's peak, of model FLOPs, and with what activation
      checkpointing computes again; only where the peak is known, `hfu` only with checkpointing.

    Padding counts, and a row counts as one sequence. The first log since training began has no
    rate: the steps before it also allocate and compile.

    Args:
        peak: operations a second of a rank's device at most; None: what `peak_flops` knows of a
            CUDA device, on a CPU nothing.
        recomputed: how much of the forward runs again in backward; None: all of it but the head
            with `gradient_checkpointing=True`, else nothing.

    Raises:
        ValueError: `peak` is not above 0, or `recomputed` not from 0 to 1.

    Cost: a gather of objects when training begins, 4 numbers in the all-reduce of a log.
    """

    def __init__(self, peak: float | None = None, *, recomputed: float | None = None) -> None:
        if peak is not None and not peak > 0:
            raise ValueError(f"peak must be FLOP/s above 0 (989e12 for an H100), got {peak!r}.")
        if recomputed is not None and not 0 <= recomputed <= 1:
            raise ValueError(f"recomputed must be a share from 0 to 1, got {recomputed!r}.")
        self.peak = peak
        self._recomputed = recomputed
        self._again = 0.0
        self._copies = 1.0
        self._model: ModelFlops | None = None
        self._by_length: dict[int, tuple[float, float]] = {}
        self._forget()

    def _forget(self) -> None:
        self._tokens = self._flops = self._more_flops = 0.0
        self._since: float | None = None
        self._mark = self._away = 0.0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Forget what was before; know what the model computes, over all pipeline stages."""
        self._forget()
        parallel = parallel_state(model)
        if parallel is not None:
            layout = parallel.mesh.layout
            self._copies = layout.world_size / layout.data_parallel_size
        checkpointing = bool(getattr(args, "gradient_checkpointing", False))
        self._again = (
            (1.0 if checkpointing else 0.0) if self._recomputed is None else (self._recomputed)
        )
        if self.peak is None and args.device.type == "cuda":
            self.peak = peak_flops(torch.cuda.get_device_name())
        self._model = flops_of_all_stages(model)
        self._by_length.clear()

    def count(self, tokens: float, sequence_length: int) -> None:
        """Add a micro-batch."""
        self._tokens += tokens
        if self._model is None:
            return
        if sequence_length not in self._by_length:
            parts = self._model.at(sequence_length)
            self._by_length[sequence_length] = parts.training, parts.forward - parts.head
        training, again = self._by_length[sequence_length]
        self._flops += tokens * training
        self._more_flops += tokens * again * self._again

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """What comes now, until the next batch, may be no training."""
        self._mark = time.perf_counter()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Leave the time of the evaluation out."""
        now = time.perf_counter()
        self._away += now - self._mark
        self._mark = now

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Leave the time of a checkpoint out."""
        self.on_evaluate()

    def sums(self) -> Tensor:
        """Tokens, operations, those that run again, seconds."""
        now = time.perf_counter()
        seconds = 0.0 if self._since is None else now - self._since - self._away
        numbers = [self._tokens, self._flops, self._more_flops, seconds]
        self._forget()
        self._since = self._mark = now
        return torch.tensor(numbers, dtype=torch.float64)

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """The rates since the last log."""
        tokens, flops, more_flops, seconds = totals.tolist()
        if seconds <= 0:
            return {}
        rate = tokens / seconds
        found = {
            "tokens_per_second_per_rank": round(rate, 1),
            "batch_tokens_per_second": round(rate * self._copies, 1),
        }
        if self._model is not None:
            found["tflops_per_rank"] = round(flops / seconds / 1e12, 4)
            if self.peak is not None:
                found["mfu"] = round(flops / seconds / self.peak, 4)
                if more_flops:
                    found["hfu"] = round((flops + more_flops) / seconds / self.peak, 4)
        return found


def flops_of_all_stages(model: Any) -> ModelFlops | None:
    """What the whole model computes for a token; None, with a warning, if that is not known.

    One gather of objects, the same verdict on all ranks.
    """
    here: ModelFlops | str
    try:
        here = model_flops(model)
    except ValueError as error:
        here = str(error)
    stages = gathered(here)
    told = next((stage for stage in stages if isinstance(stage, str)), None)
    if told is not None:
        warnings.warn(f"FLOPs are not counted: {told}", stacklevel=2)
        return None
    return reduce(or_, (stage for stage in stages if isinstance(stage, ModelFlops)))
