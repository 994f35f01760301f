"""Small files, written so that they survive a crash: flushed to the disk, then renamed."""

from __future__ import annotations

import io
import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch

from ep_trainer.checkpoint.errors import CheckpointError


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(value, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        CheckpointError: it is missing or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: no JSON ({error}).") from error


def save_object(path: Path, value: Any) -> None:
    """Write what `torch.load` reads. A full disk is an OSError; torch's own writer doesn't say why."""
    content = io.BytesIO()
    torch.save(value, content)
    path.write_bytes(content.getbuffer())


def crc32_of_file(path: Path) -> int:
    """Of all bytes of a small file."""
    return zlib.crc32(path.read_bytes())
