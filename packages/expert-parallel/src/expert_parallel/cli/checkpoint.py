"""`ep checkpoint`: look at, check, rewrite and export sharded training checkpoints, in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ep_trainer.checkpoint import offline
from expert_parallel.cli.console import console, tells_errors

app = typer.Typer(
    name="checkpoint",
    help="Sharded training checkpoints, without the run that wrote them.",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Argument(help="A checkpoint-N directory.", show_default=False)]
Workers = Annotated[int, typer.Option(min=1, help="Threads.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")]
_WORKERS = min(8, os.cpu_count() or 1)


@app.command()
@tells_errors
def inspect(
    folder: Folder,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As one line of JSON.")] = False,
    traceback: Traceback = False,
) -> None:
    """Tell what a checkpoint is: step, layout, tensors, files."""
    manifest = offline.read_manifest(folder)
    sections = {name: offline.StoredTensors(folder, name) for name in manifest.sections}
    if as_json:
        told = {
            "step": manifest.step,
            "layout": dict(manifest.layout),
            "world_size": manifest.world_size,
            "versions": dict(manifest.versions),
            "sections": {
                name: {
                    "tensors": len(stored.tensors),
                    "bytes": stored.nbytes(),
                    "files": len(stored.files),
                }
                for name, stored in sections.items()
            },
        }
        typer.echo(json.dumps(told))
        return
    out = console()
    sizes = ", ".join(f"{axis}={size}" for axis, size in manifest.layout.items() if size > 1)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    out.print(f"step {manifest.step}, {manifest.world_size} ranks ({sizes or 'one process'})")
    out.print(f"written with {versions}")
    table = Table("section", "tensors", "bytes", "files")
    for name, stored in sections.items():
        table.add_row(
            name, str(len(stored.tensors)), f"{stored.nbytes():,}", str(len(stored.files))
        )
    out.print(table)
    if tensors:
        listed = Table("tensor", "dtype", "shape", "parts")
        for stored in sections.values():
            for name, tensor in stored.tensors.items():
                dtype = str(tensor.properties.dtype).removeprefix("torch.")
                listed.add_row(name, dtype, str(tuple(tensor.size)), str(len(tensor.chunks)))
        out.print(listed)


@app.command()
@tells_errors
def verify(folder: Folder, workers: Workers = _WORKERS, traceback: Traceback = False) -> None:
    """Compare every file and tensor with what was written; exit code 1 names what differs."""
    manifest = offline.verify(folder, workers=workers)
    console().print(f"{folder} is whole: step {manifest.step}, {', '.join(manifest.sections)}")


@app.command()
@tells_errors
def export(
    folder: Folder,
    output: Annotated[
        Path | None,
        typer.Argument(help="A new directory; the checkpoint itself if left out."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a file, such as 5GB.")] = "5GB",
    original: Annotated[
        bool, typer.Option(help="Tensors as the family's checkpoints have them.")
    ] = True,
    workers: Workers = _WORKERS,
    traceback: Traceback = False,
) -> None:
    """Write the model as a checkpoint that plain transformers loads."""
    from expert_parallel.exporting import export as write

    written = write(
        folder,
        output,
        max_shard_size=max_shard_size,
        save_original_format=original,
        workers=workers,
    )
    console().print(f"{written} can be loaded with from_pretrained")


@app.command()
@tells_errors
def reshard(
    folder: Folder,
    output: Annotated[Path, typer.Argument(help="A new directory.", show_default=False)],
    files: Annotated[int, typer.Option(min=1, help="Files per section.")] = 1,
    traceback: Traceback = False,
) -> None:
    """Write a checkpoint again in another number of files. Any layout loads it before and after."""
    offline.reshard(folder, output, files)
    console().print(f"{output}: {files} files per section")
