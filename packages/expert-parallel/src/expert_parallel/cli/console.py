"""How the command speaks: rich output on one rank, and errors as one line."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

P = ParamSpec("P")
T = TypeVar("T")

_WIDTH = 160  # of output that no terminal limits, such as a file's
# These say what is wrong and what to do; anything else is a fault of ours and is named by its kind.
_TOLD = (ValueError, OSError, ImportError, NotImplementedError, RuntimeError)


def is_first_rank() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def console() -> Console:
    """A console; quiet on all ranks but the first."""
    stream = sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH
    return Console(file=stream, width=width, quiet=not is_first_rank(), highlight=False)


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks."""
    told = "; ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    text = " ".join(told.split())
    return text if isinstance(error, _TOLD) else f"{type(error).__name__}: {text}"


def fail(message: str) -> NoReturn:
    """Print an error, on whichever rank it is, and end the command with exit code 1."""
    who = "" if is_first_rank() else f" rank {os.environ['RANK']}:"
    errors = Console(file=sys.stderr, highlight=False)
    errors.print(f"[bold red]error:[/]{who} {escape(message)}", soft_wrap=True)
    raise typer.Exit(1)


def tells_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Let a command's errors be one clear line, unless its argument `traceback` is true."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            if kwargs.get("traceback"):
                raise
            fail(one_line(error))

    return run
