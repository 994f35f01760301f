"""Work on checkpoints without the run: one process, one tensor's part in memory at a time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ep_plans.boxes import Box, intersection, lengths, numel, pieces, positions
from ep_plans.safetensors_file import flush
from ep_trainer.checkpoint.files import write_json
from ep_trainer.checkpoint.manifest import (
    SECTIONS,
    Manifest,
    check_checkpoint,
    is_for_plain_use,
    put_in_place,
    read_manifest,
    saving_folder,
    section,
    small_files,
    write_manifest,
)
from ep_trainer.checkpoint.planner import BoxSavePlanner, block, check_covered
from ep_trainer.checkpoint.storage import INDEX, SafetensorsReader, SafetensorsWriter, index_of


class StoredTensors:
    """The tensors of a section, of which any box can be read.

    Raises:
        CheckpointError: the index is damaged, a file is missing or too short, or a tensor isn't whole.
    """

    def __init__(self, folder: Path, name: str = "model") -> None:
        self._reader = SafetensorsReader(section(folder, name))
        self._reader.check_files()
        self._maps: dict[str, Tensor] = {}
        self.tensors: Mapping[str, TensorStorageMetadata] = {
            key: stored
            for key, stored in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        for key, stored in self.tensors.items():
            check_covered(f"{section(folder, name)}: {key}", stored, "no file holds")

    @property
    def files(self) -> Mapping[str, int]:
        """The files and their sizes."""
        return self._reader.files

    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(chunk.nbytes for chunk in self._reader.chunks.values())

    def check_values(self, workers: int) -> None:
        """Compare every checksum.

        Raises:
            CheckpointError: names the file and the key.
        """
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(self._reader.check_values, range(workers), [workers] * workers))

    def check_headers(self) -> None:
        """Compare the heads of the files with the index.

        Raises:
            CheckpointError: names the file.
        """
        self._reader.check_headers()

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Fill `out`, whose shape is `lengths(box)`; casts to its dtype."""
        for chunk in self.tensors[name].chunks:
            held: Box = tuple(
                ((start, start + size),)
                for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            part = intersection(box, held)
            if not numel(part):
                continue
            data = self._reader.chunk(MetadataIndex(name, chunk.offsets), self._maps)
            sources = pieces(positions(part, held))
            targets = pieces(positions(part, box))
            for (source, _), (target, _) in zip(sources, targets, strict=True):
                block(out, target).copy_(block(data, source))


def verify(folder: Path, *, workers: int = 4, heads: bool = True) -> Manifest:
    """Compare everything with what was written, a checksum per tensor and rank.

    Args:
        folder: of the checkpoint.
        workers: threads that read.
        heads: those of the files too, which other readers go by; ours does not.

    Raises:
        CheckpointError: names the file and the key.
    """
    manifest = check_checkpoint(folder, values=False)
    sections = [StoredTensors(folder, name) for name in manifest.sections]
    for stored in sections:
        stored.check_values(workers)
    if heads:
        for stored in sections:
            stored.check_headers()
    return manifest


def reshard(source: Path, target: Path, files: int) -> Manifest:
    """Write a checkpoint again, the tensors of each section in `files` files of like size.

    Any layout loads any checkpoint, so this is about files: fewer large ones, or as many as there
    will be ranks, each of which then reads one. All else is copied; the layout that is told, and the
    random states, stay those of the run.

    Raises:
        ValueError: fewer than one file.
        FileExistsError: `target` exists.
        CheckpointError: `source` is no whole checkpoint.
    """
    if files < 1:
        raise ValueError(f"files={files}: give at least 1.")
    if target.exists():
        raise FileExistsError(f"{target} exists; give a new directory.")
    manifest = verify(source, heads=False)  # they are written anew
    new = saving_folder(target)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        plain = (path.name for path in source.iterdir() if is_for_plain_use(path))
        for name in dict.fromkeys((*manifest.files, *plain)):
            if Path(name).parts[0] == SECTIONS:
                continue
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, new / name)
            flush(new / name)
        for name in manifest.sections:
            _rewrite(StoredTensors(source, name), section(new, name), files)
        written = replace(manifest, files=small_files(new))
        write_manifest(new, written)
        put_in_place(target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return written


class _Reading(BoxSavePlanner):
    """Values that come from files."""

    def __init__(self, stored: StoredTensors) -> None:
        super().__init__()
        self._stored = stored

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        box: Box = tuple(
            ((start, start + size),) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        out = torch.empty(lengths(box), dtype=write_item.tensor_data.properties.dtype)
        self._stored.read(write_item.index.fqn, box, out)
        return out


def _rewrite(stored: StoredTensors, folder: Path, files: int) -> None:
    folder.mkdir(parents=True)
    items: list[list[WriteItem]] = [[] for _ in range(files)]
    load = [0] * files
    for name, tensor in stored.tensors.items():
        for offsets, sizes in _parts(tensor.size, files):
            data = TensorWriteData(
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                tensor.properties,
                tensor.size,
            )
            file = min(range(files), key=load.__getitem__)
            load[file] += math.prod(sizes) * tensor.properties.dtype.itemsize
            index = MetadataIndex(name, offsets)
            items[file].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    planner = _Reading(stored)
    plans, metadata = planner.create_global_plan([SavePlan(each) for each in items])
    results = [
        SafetensorsWriter(folder, number).write_data(plan, planner).value()
        for number, plan in enumerate(plans)
    ]
    write_json(folder / INDEX, index_of(metadata, results))


def _parts(shape: torch.Size, files: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the parts of a tensor: rows, as many parts as there are files."""
    rest = tuple(shape[1:])
    if not shape or shape[0] < files:
        yield (0,) * len(shape), tuple(shape)
        return
    for number in range(files):
        start, end = shape[0] * number // files, shape[0] * (number + 1) // files
        yield (start, *(0,) * len(rest)), (end - start, *rest)


__all__ = [
    "StoredTensors",
    "read_manifest",
    "reshard",
    "verify",
]
