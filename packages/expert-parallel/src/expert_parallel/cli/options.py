"""Options that several commands share, and how they make a `DistributedConfig`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ep_mesh import DistributedConfig

_SIZES = "Layout"

Tp = Annotated[
    int | None, typer.Option("--tp", help="Ranks for tensor parallelism.", rich_help_panel=_SIZES)
]
Fsdp = Annotated[int | None, typer.Option("--fsdp", help="Ranks for FSDP.", rich_help_panel=_SIZES)]
Ep = Annotated[
    int | None,
    typer.Option("--ep", help="Ranks that own distinct experts.", rich_help_panel=_SIZES),
]
DpReplicate = Annotated[
    int | None,
    typer.Option("--dp-replicate", help="FSDP replicas (HSDP).", rich_help_panel=_SIZES),
]
Pp = Annotated[int | None, typer.Option("--pp", help="Pipeline stages.", rich_help_panel=_SIZES)]
SequenceParallel = Annotated[
    bool | None,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        help="Shard the sequence between TP regions.",
        rich_help_panel=_SIZES,
        show_default=False,
    ),
]
Implementation = Annotated[
    str | None,
    typer.Option(
        "--ep-implementation",
        help="How tokens reach the experts: auto, all_to_all, all_reduce, ...",
        rich_help_panel=_SIZES,
    ),
]
LayoutFile = Annotated[
    Path | None,
    typer.Option(
        "--layout",
        help="JSON or YAML file of DistributedConfig's fields (plans too); the flags win over it.",
        rich_help_panel=_SIZES,
    ),
]

Processes = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Processes on this machine; default: the product of the sizes.",
        rich_help_panel=_SIZES,
    ),
]

Traceback = Annotated[
    bool, typer.Option("--traceback", help="Show where an error comes from, on every rank.")
]


@contextmanager
def world_of(processes: int | None) -> Iterator[None]:
    """Let a tp_size that is not given be derived from `--nproc`, as torchrun's ranks would."""
    if processes is None or "WORLD_SIZE" in os.environ:
        yield
        return
    os.environ["WORLD_SIZE"] = str(processes)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]


def value_of(text: str) -> Any:
    """A value from the command line, as YAML reads it."""
    return yaml.safe_load(text)


def read_text(path: Path) -> str:
    """The text of a file, in UTF-8.

    Raises:
        ValueError: the file is missing, or no text.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}.") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """The object in a JSON or YAML file.

    Raises:
        ValueError: the file is missing, is neither, or holds something else.
    """
    text = read_text(path)
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path} can't be read as {'JSON' if path.suffix == '.json' else 'YAML'}: {error}"
        ) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold names and values, got a {type(values).__name__}.")
    return values


def layout_fields(file: Path | None, **flags: Any) -> dict[str, Any]:
    """The fields of `DistributedConfig` from a file and from flags; flags win, None is not given."""
    given = {name: value for name, value in flags.items() if value is not None}
    return {**(read_mapping(file) if file else {}), **given}


def distributed_config(file: Path | None, **flags: Any) -> DistributedConfig:
    """The configuration that a file and flags make.

    Raises:
        ValueError: a rule is broken.
    """
    return DistributedConfig.from_dict(layout_fields(file, **flags))
