"""Texts for training: files become one row of token ids, cut into blocks of equal length."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

SUFFIXES = (".txt", ".md", ".jsonl")


def text_files(paths: Sequence[str]) -> list[Path]:
    """The files of a list of files and folders, in order.

    Raises:
        ValueError: one does not exist, or is of a kind that is not read.
    """
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
            if not inside:
                raise ValueError(f"the folder {name} holds no {', '.join(SUFFIXES)} file.")
            found += inside
        elif not path.is_file():
            raise ValueError(f"there is no file or folder {name}.")
        elif path.suffix not in SUFFIXES:
            raise ValueError(f"{name} must be a {', '.join(SUFFIXES)} file or a folder of them.")
        else:
            found.append(path)
    return found


def texts(file: Path, key: str) -> Iterator[str]:
    """The documents of a file: a text file is one, each line of a `.jsonl` is one.

    Raises:
        ValueError: it is no UTF-8, or a line is no JSON object with a text under `key`.
    """
    try:
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8-sig")
            return
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, key, f"{file}, line {number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error}.") from error


def _text_of(line: str, key: str, where: str) -> str:
    try:
        text = json.loads(line)[key]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: expected a JSON object with {key!r}.") from error
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected a text as {key!r}, got {text!s:.80}.")
    return text


def token_ids(files: Sequence[Path], tokenizer: Any, key: str = "text") -> Tensor:
    """The ids of all documents in one row, int32, each ended by the end-of-text token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for file in files:
        for text in texts(file, key):
            ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
    return torch.tensor(ids, dtype=torch.int32)


def save_ids(ids: Tensor, path: Path) -> None:
    """Write ids as they lie in memory."""
    path.write_bytes(bytes(ids.clone(memory_format=torch.contiguous_format).untyped_storage()))


def load_ids(path: Path) -> Tensor:
    """Map what `save_ids` wrote; ranks of a machine share the memory."""
    size = path.stat().st_size // torch.int32.itemsize
    return torch.from_file(str(path), size=size, dtype=torch.int32)


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks of `length` ids, each a sample whose labels are the ids; a shorter rest is left out.

    Raises:
        ValueError: there are fewer ids than one block has.
    """

    def __init__(self, ids: Tensor, length: int) -> None:
        count = len(ids) // length
        if count == 0:
            raise ValueError(
                f"the data has {len(ids)} tokens, less than one sequence of {length}: give more "
                "data or a smaller sequence_length."
            )
        self.blocks = ids[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.blocks[index].long()
        return {"input_ids": ids, "labels": ids.clone()}
