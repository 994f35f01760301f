"""Write a safetensors file piece by piece, so that it is never whole in memory.

The format is the public one: eight bytes with the header's length, the header as JSON, the data.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


def header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file of tensors, which are laid out in `layout` order.

    Raises:
        TypeError: the format has no name for a dtype.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name in layout(tensors):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: safetensors files cannot hold {tensor.dtype}.")
        size = tensor.numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def layout(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Wide dtypes first, so that all are aligned; then by name."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def row_pieces(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of the first dimension of at most `limit` bytes (at least one row each)."""
    row = itemsize
    for size in shape[1:]:
        row *= size
    step = max(limit // max(row, 1), 1)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _reserve(descriptor: int, size: int) -> None:
    """Take disk space at once, where the file system can; a full disk is told before gathering."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except AttributeError:
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


class FileWriter:
    """A file that is filled from front to back; disk space is taken when it is opened."""

    def __init__(
        self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> None:
        first = header(tensors, metadata)
        data = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        self._file = path.open("wb")
        try:
            _reserve(self._file.fileno(), len(first) + data)
            self._file.write(first)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def write(self, tensor: torch.Tensor) -> None:
        """Append the bytes of a tensor on the CPU."""
        if tensor.numel():
            self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def flush(path: Path) -> None:
    """Ask the file system to keep a file, or a directory's names; nothing where it can't be asked.

    Raises:
        OSError: the disk failed, or is full: what was written may be lost.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _LOST:
            raise
