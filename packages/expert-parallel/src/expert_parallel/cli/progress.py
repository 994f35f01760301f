"""A training's progress: a bar on a terminal, a line per log elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

_SHOWN = (
    ("loss", "loss {:.4f}"),
    ("eval_loss", "eval loss {:.4f}"),
    ("grad_norm", "gradient norm {:.3g}"),
    ("learning_rate", "learning rate {:.2e}"),
    ("tokens_per_second_per_rank", "{:,.0f} tokens/s a rank"),
    ("mfu", "MFU {:.1%}"),
    ("peak_memory_gb", "{:.2f} GB"),
    ("expert_load_max", "busiest expert {:.2f} x"),
    ("expert_rank_load_max", "busiest rank {:.2f} x"),
    ("expert_imbalance_cost", "imbalance costs {:.1%}"),
)


class TrainProgress(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Shows steps and the newest logs on `console`, which is quiet on all ranks but one."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the bar; tell where a resumed run goes on."""
        if state.global_step:
            self.console.print(f"goes on from step {state.global_step} of {state.max_steps}")
        if not self.console.is_terminal or self.console.quiet:
            return
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[logs]}"),
            console=self.console,
        )
        self._task = self._bar.add_task(
            "training", total=state.max_steps, completed=state.global_step, logs=""
        )
        self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Show the numbers."""
        shown = [text.format(float(logs[name])) for name, text in _SHOWN if logs and name in logs]
        if not shown:
            return
        if self._bar is not None:
            self._bar.update(self._task, logs="  ".join(shown))
        else:
            step = f"step {state.global_step}/{state.max_steps}"
            self.console.print("  ".join([step, *shown]), markup=False, soft_wrap=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def without_printer(trainer: Trainer) -> None:
    """Remove the callbacks that print logs by themselves."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
