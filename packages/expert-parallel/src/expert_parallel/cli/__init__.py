"""The command `ep`."""

from __future__ import annotations

import typer

from expert_parallel.cli import checkpoint, doctor, generate, plan, train

app = typer.Typer(
    name="ep",
    help="Expert parallelism for Hugging Face MoE models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(plan.plan)
app.command()(train.train)
app.command()(generate.generate)
app.command()(doctor.doctor)
app.add_typer(checkpoint.app)


@app.callback()
def _root() -> None:
    """Expert parallelism for Hugging Face MoE models."""


def main() -> None:
    """Run the command."""
    app()
