"""Storage for `torch.distributed.checkpoint`: a directory of safetensors files and an index.

Each rank writes its chunks to files of its own, in the form of torch's `HuggingFaceStorageWriter`:
a tensor's name is the key, and the file's metadata tells the chunk's offsets
(`DCP_SHARDING_INFO`), so torch's `HuggingFaceStorageReader` and `consolidate_hf_safetensors_files`
read them too. That writer itself is not used: it holds one chunk of a name per rank only (a packed
weight has several), builds a file whole in memory, and computes no checksum. Here a file is
streamed chunk by chunk, and a rank's further chunks of a name go to further files.

`index.json` names every tensor with its dtype and shape, and every chunk with its file and CRC-32.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ep_plans.safetensors_file import FileWriter, header, layout
from ep_trainer.checkpoint.errors import CheckpointError
from ep_trainer.checkpoint.files import read_json, write_json
from ep_trainer.checkpoint.planner import block

INDEX = "index.json"
_PIECE = 8 << 20


@dataclass(frozen=True)
class StoredChunk:
    """Where the values of a chunk are.

    Attributes:
        file: the file's name.
        begin: of its first byte in the file.
        nbytes: how many bytes.
        crc32: of these bytes.
    """

    file: str
    begin: int
    nbytes: int
    crc32: int


class SafetensorsWriter(StorageWriter):
    """Writes a rank's chunks to `path`; see the module. Files are flushed to the disk."""

    def __init__(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        self.path = Path(path)
        self.rank = rank or 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write somewhere else."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this rank from `torch.distributed.checkpoint.save`."""
        self.rank = kwargs.get("rank", self.rank)
        self.path.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Keep the plans."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; done when the future is given back."""
        future: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        for number, items in enumerate(_files(plan.items)):
            name = f"rank-{self.rank:05d}{f'-{number}' if number else ''}.safetensors"
            results += self._write_file(name, items, planner)
        future.set_result(results)
        return future

    def _write_file(
        self, name: str, items: Mapping[str, WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        shapes = {key: _shape(item) for key, item in items.items()}
        metadata = _file_metadata(item.index for item in items.values())
        results = []
        at = len(header(shapes, metadata))
        with FileWriter(self.path / name, shapes, metadata) as file:
            for key in layout(shapes):
                data = planner.resolve_data(items[key])
                assert isinstance(data, Tensor)
                values = data.cpu().contiguous()
                file.write(values)
                stored = StoredChunk(name, at, values.nbytes, crc32_of(values))
                results.append(WriteResult(items[key].index, values.nbytes, stored))
                at += values.nbytes
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; by one rank, when all have written."""
        write_json(self.path / INDEX, index_of(metadata, results))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Where it is written."""
        return StorageMeta(checkpoint_id=self.path)


class SafetensorsReader(StorageReader):
    """Reads boxes out of what `SafetensorsWriter` wrote; just the bytes that are asked for.

    Attributes:
        files: bytes of each file; known when the metadata is read.
        bytes_read: of values, into the targets of `read_data`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self._chunks: dict[MetadataIndex, StoredChunk] = {}
        self._sizes: dict[MetadataIndex, torch.Size] = {}
        self._metadata: Metadata | None = None
        self.files: dict[str, int] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from somewhere else."""
        if checkpoint_id is not None:
            self.__init__(checkpoint_id)  # type: ignore[misc]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is.

        Raises:
            CheckpointError: the index can't be read, or is none.
        """
        if self._metadata is None:
            path = self.path / INDEX
            try:
                self._metadata = self._parsed(read_json(path))
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise CheckpointError(f"{path} is no index of tensors: {error!r}.") from error
        return self._metadata

    def _parsed(self, index: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, entry in index["tensors"].items():
            stored = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, entry["dtype"])),
                torch.Size(entry["shape"]),
                [],
            )
            for offsets, sizes, *where in entry["chunks"]:
                stored.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self._chunks[MetadataIndex(name, offsets)] = StoredChunk(*where)
                self._sizes[MetadataIndex(name, offsets)] = torch.Size(sizes)
            tensors[name] = stored
        self.files = dict(index["files"])
        return Metadata(tensors, storage_data=self._chunks)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing more to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keep the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read; files are mapped, so nothing but the targets takes memory."""
        maps: dict[str, Tensor] = {}
        for item in sorted(plan.items, key=lambda item: self._chunks[item.storage_index].begin):
            place = zip(item.storage_offsets, item.lengths, strict=True)
            source = block(
                self.chunk(item.storage_index, maps),
                [(start, start + size) for start, size in place],
            )
            target = planner.resolve_tensor(item)
            target.copy_(source)
            self.bytes_read += source.nbytes
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def chunk(self, index: MetadataIndex, maps: dict[str, Tensor]) -> Tensor:
        """The values of a chunk, mapped; `maps` keeps files open between calls."""
        metadata = self.read_metadata()
        stored = self._chunks[index]
        tensor = metadata.state_dict_metadata[index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        sizes = self._sizes[index]
        dtype = tensor.properties.dtype
        if not stored.nbytes:
            return torch.empty(sizes, dtype=dtype)
        data = maps.get(stored.file)
        if data is None:
            size = self.files[stored.file]
            data = torch.from_file(str(self.path / stored.file), size=size, dtype=torch.uint8)
            maps[stored.file] = data
        return data[stored.begin : stored.begin + stored.nbytes].view(dtype).view(sizes)

    @property
    def chunks(self) -> Mapping[MetadataIndex, StoredChunk]:
        """Every chunk and where it is."""
        self.read_metadata()
        return self._chunks

    def check_files(self) -> None:
        """Check that every file is there with its size.

        Raises:
            CheckpointError: names the file, and a tensor that is in it.
        """
        self.read_metadata()
        for name, size in self.files.items():
            path = self.path / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; it holds {self._key_at(name, 0)}.")
            found = path.stat().st_size
            if found != size:
                key = self._key_at(name, found)
                raise CheckpointError(
                    f"{path} has {found} bytes, {size} were written: it is damaged from {key} on."
                )

    def _key_at(self, name: str, position: int) -> str:
        """The tensor of a file that the position is in or before."""
        held = sorted((s.begin, i.fqn) for i, s in self._chunks.items() if s.file == name)
        before = [key for begin, key in held if begin <= position]
        return before[-1] if before else held[0][1]

    def check_values(self, part: int = 0, parts: int = 1) -> None:
        """Read every `parts`-th chunk and compare checksums.

        Raises:
            CheckpointError: names the file and the key.
        """
        for index, stored in list(self.chunks.items())[part::parts]:
            if _crc32_in(self.path / stored.file, stored.begin, stored.nbytes) != stored.crc32:
                raise CheckpointError(
                    f"{self.path / stored.file} is damaged: the values of {index.fqn} are not those "
                    "that were written (their checksum differs)."
                )

    def check_headers(self) -> None:
        """Compare the head of every file with the index; other readers go by it, this one does not.

        Raises:
            CheckpointError: names the file.
        """
        metadata = self.read_metadata()
        held: dict[str, list[MetadataIndex]] = {name: [] for name in self.files}
        for index, stored in self._chunks.items():
            held[stored.file].append(index)
        for name, indices in held.items():
            shapes: dict[str, Tensor] = {}
            for index in indices:
                tensor = metadata.state_dict_metadata[index.fqn]
                assert isinstance(tensor, TensorStorageMetadata)
                dtype = tensor.properties.dtype
                shapes[index.fqn] = torch.empty(self._sizes[index], dtype=dtype, device="meta")
            written = header(shapes, _file_metadata(indices))
            with (self.path / name).open("rb") as file:
                found = file.read(len(written))
            if _parsed_header(found) != _parsed_header(written):
                raise CheckpointError(
                    f"{self.path / name} is damaged: its head is not what was written. The values "
                    f"are whole and are loaded by {INDEX}; other readers of safetensors go by the head. "
                    "ep checkpoint reshard writes the files again."
                )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A directory with an index."""
        return (Path(checkpoint_id) / INDEX).is_file()


def index_of(metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, Any]:
    """What `index.json` holds."""
    where = {each.index: each.storage_data for result in results for each in result}
    tensors: dict[str, Any] = {}
    files: dict[str, int] = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = []
        for chunk in stored.chunks:
            at: StoredChunk = where[MetadataIndex(name, chunk.offsets)]
            place = (at.file, at.begin, at.nbytes, at.crc32)
            chunks.append([list(chunk.offsets), list(chunk.sizes), *place])
            files[at.file] = max(files.get(at.file, 0), at.begin + at.nbytes)
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
    return {"files": dict(sorted(files.items())), "tensors": tensors}


def _file_metadata(indices: Iterable[MetadataIndex]) -> dict[str, str]:
    """The metadata of a file, as torch's `HuggingFaceStorageReader` reads it."""
    offsets = {index.fqn: {"saved_offsets": list(index.offset or ())} for index in indices}
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":")),
    }


def _parsed_header(data: bytes) -> Any:
    """The first bytes of a file as plain values; the bytes themselves if they are no header."""
    try:
        entries = json.loads(data[8:])
        offsets = json.loads(entries["__metadata__"].pop("DCP_SHARDING_INFO"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return data
    return data[:8], entries, offsets


def crc32_of(tensor: Tensor) -> int:
    """Of the bytes of a tensor in host memory."""
    if not tensor.numel():
        return 0
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _crc32_in(path: Path, begin: int, size: int) -> int:
    value = 0
    with path.open("rb") as file:
        file.seek(begin)
        while size:
            data = file.read(min(size, _PIECE))
            if not data:
                return -1
            value = zlib.crc32(data, value)
            size -= len(data)
    return value


def _files(items: list[WriteItem]) -> list[dict[str, WriteItem]]:
    """The items of each file: a file holds a name once."""
    files: list[dict[str, WriteItem]] = []
    for item in items:
        file = next((file for file in files if item.index.fqn not in file), None)
        if file is None:
            file = {}
            files.append(file)
        file[item.index.fqn] = item
    return files


def _shape(item: WriteItem) -> Tensor:
    assert item.tensor_data is not None
    data = item.tensor_data
    return torch.empty(data.chunk.sizes, dtype=data.properties.dtype, device="meta")
