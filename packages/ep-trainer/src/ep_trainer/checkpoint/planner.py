"""Planners for `torch.distributed.checkpoint` that know which box of a tensor each rank holds.

torch's own planners read a DTensor's placements, which don't tell of packed weights (cut inside each
of their blocks) and of FSDP over TP on one dimension. Here every tensor becomes a box
(`ep_plans.boxes`), and each contiguous block of it a chunk with global offsets, from which DCP
reads any other box. A chunk that several ranks hold (replicas, copied heads) is written by one of
them, the one with the least to write so far.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from ep_plans.boxes import Interval, pieces
from ep_plans.shards import box_of
from ep_trainer._compat import copy_all_
from ep_trainer.checkpoint.errors import CheckpointError


class Chunk(NamedTuple):
    """A contiguous block of a tensor that this rank holds.

    Attributes:
        offsets: where it begins in the tensor.
        sizes: its shape.
        local: where it lies in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[Interval, ...]


def chunks_of(tensor: Tensor) -> list[Chunk]:
    """The chunks of what this rank holds of a tensor; none if that is empty."""
    if not tensor.ndim:
        return [Chunk((), (), ())]
    return [
        Chunk(tuple(start for start, _ in place), tuple(end - start for start, end in place), local)
        for place, local in pieces(box_of(tensor))
    ]


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """What the chunks of a tensor depend on: equal forms are planned alike."""
    if isinstance(tensor, DTensor):
        return tensor.dtype, tensor.shape, tensor.device_mesh, tensor.placements
    return tensor.dtype, tensor.shape


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def block(tensor: Tensor, place: Sequence[Interval]) -> Tensor:
    """A view of part of a tensor."""
    for dim, ((start, end), size) in enumerate(zip(place, tensor.shape, strict=True)):
        if end - start != size:
            tensor = tensor.narrow(dim, start, end - start)
    return tensor


class BoxSavePlanner(SavePlanner):
    """Plans the writing of a flat dict of tensors, plain ones and DTensors; see the module.

    Ranks may hold different names. `stage` copies what this rank writes to host memory, so that
    the tensors may change before they are written. `renew` takes other tensors of the same
    `form_of` without planning anew.
    """

    def __init__(self) -> None:
        self._state: Mapping[str, Any] = {}
        self._local: dict[MetadataIndex, tuple[str, tuple[Interval, ...]]] = {}
        self._buffers: dict[MetadataIndex, Tensor] = {}
        self._places: list[tuple[str, tuple[Interval, ...]]] | None = None
        self._is_staged = False

    def set_up_planner(
        self, state_dict: Mapping[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Begin with these tensors."""
        self.renew(state_dict)
        self._local, self._buffers, self._places = {}, {}, None

    def renew(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with these tensors, which have the names and forms of those before."""
        self._state, self._is_staged = state_dict, False

    def create_local_plan(self) -> SavePlan:
        """All that this rank could write."""
        items = []
        for name, tensor in self._state.items():
            properties = TensorProperties(dtype=tensor.dtype)
            for chunk in chunks_of(tensor):
                index = MetadataIndex(name, chunk.offsets)
                self._local[index] = (name, chunk.local)
                written = TensorWriteData(
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
                    properties,
                    tensor.shape,
                )
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """One writer per chunk, and what there is; the same on every rank that calls.

        Raises:
            CheckpointError: ranks disagree about a tensor, or the chunks are not the whole of it.
        """
        holders: dict[MetadataIndex, list[int]] = {}
        items: dict[MetadataIndex, WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                first = items.setdefault(item.index, item)
                if first.tensor_data != item.tensor_data:
                    raise CheckpointError(
                        f"{item.index.fqn}: rank {holders[item.index][0]} holds "
                        f"{first.tensor_data}, rank {rank} {item.tensor_data}."
                    )
                holders.setdefault(item.index, []).append(rank)
        load = [0] * len(all_plans)
        kept: list[list[WriteItem]] = [[] for _ in all_plans]
        sizes = {index: _nbytes(item) for index, item in items.items()}
        for index in sorted(items, key=lambda i: (-sizes[i], i.fqn, i.offset)):
            rank = min(holders[index], key=lambda r: (load[r], r))
            load[rank] += sizes[index]
            kept[rank].append(items[index])
        metadata = Metadata(_tensors(items.values()))
        for name, held in metadata.state_dict_metadata.items():
            assert isinstance(held, TensorStorageMetadata)
            check_covered(name, held, "no rank holds")
        plans = [replace(plan, items=mine) for plan, mine in zip(all_plans, kept, strict=True)]
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keep the plan."""
        return new_plan

    def stage(self, plan: SavePlan) -> None:
        """Copy what the plan writes to host memory, pinned if it comes from an accelerator.

        The memory is kept for the next time: fresh pages cost more than the copy. So is where each
        part lies: of one `set_up_planner` all plans are the same.
        """
        with torch.no_grad():
            if self._places is None:
                self._places = [self._local[item.index] for item in plan.items]
            values = [block(local_of(self._state[name]), place) for name, place in self._places]
            on_device = any(data.device.type == "cuda" for data in values)
            if not self._buffers:
                self._buffers = {
                    item.index: torch.empty(
                        data.shape, dtype=data.dtype, pin_memory=data.device.type == "cuda"
                    )
                    for item, data in zip(plan.items, values, strict=True)
                }
            copy_all_(list(self._buffers.values()), values, non_blocking=on_device)
        if on_device:
            torch.cuda.current_stream().synchronize()
        self._state, self._is_staged = {}, True

    def free(self) -> None:
        """Give the memory of `stage` back."""
        self._buffers, self._is_staged = {}, False

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a chunk: the staged ones, else a view of the tensor's."""
        return (
            self._buffers[write_item.index] if self._is_staged else self._values(write_item.index)
        )

    def _values(self, index: MetadataIndex) -> Tensor:
        name, place = self._local[index]
        return block(local_of(self._state[name]), place)


class BoxLoadPlanner(LoadPlanner):
    """Plans the reading of this rank's boxes into a flat dict of tensors, in place.

    Names of the checkpoint that this rank does not ask for are left alone.
    """

    def __init__(self, what: str = "the checkpoint") -> None:
        self.what = what
        self._state: Mapping[str, Any] = {}
        self._metadata: Metadata | None = None
        self._local: dict[MetadataIndex, tuple[str, tuple[Interval, ...]]] = {}

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Begin with these tensors to fill."""
        self._state, self._metadata = state_dict, metadata
        self._local = {}

    def create_local_plan(self) -> LoadPlan:
        """What to read into this rank's parts. Nothing is changed.

        Raises:
            CheckpointError: a tensor is missing in the checkpoint, incomplete, or of another shape
                or dtype; all of them are named.
        """
        assert self._metadata is not None, "set_up_planner comes first"
        items: list[ReadItem] = []
        problems = []
        for name, tensor in self._state.items():
            try:
                items += self._reads(name, tensor, self._metadata.state_dict_metadata.get(name))
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            more = f"\n  - and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(
                f"{self.what} does not fit this model:\n  - " + "\n  - ".join(problems[:10]) + more
            )
        return LoadPlan(items)

    def _reads(self, name: str, tensor: Tensor, stored: Any) -> list[ReadItem]:
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{name} is not in it")
        if stored.size != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(stored.size)} in it, {tuple(tensor.shape)} here"
            )
        if stored.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{name} is {stored.properties.dtype} in it, {tensor.dtype} here; load the model "
                f"with dtype={stored.properties.dtype}"
            )
        check_covered(name, stored, "no file holds")
        wanted = []
        for chunk in chunks_of(tensor):
            self._local[MetadataIndex(name, chunk.offsets)] = (name, chunk.local)
            wanted.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        reads: list[ReadItem] = create_read_items_for_chunk_list(name, stored, wanted)
        return [read for read in reads if math.prod(read.lengths)]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read by themselves."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Keep the plan."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Checkpoints of boxes hold tensors only."""
        raise CheckpointError(f"{read_item.dest_index.fqn} holds no tensor.")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a tensor that a read fills."""
        assert read_item.type == LoadItemType.TENSOR
        name, place = self._local[read_item.dest_index]
        target = block(local_of(self._state[name]), place)
        within = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return block(target, [(start, start + size) for start, size in within])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: `resolve_tensor` gives views."""


def check_covered(name: str, stored: TensorStorageMetadata, problem: str) -> None:
    """Check that the chunks are the whole tensor, each element once.

    Raises:
        CheckpointError: names the tensor and the first place that is missing or there twice.
    """
    held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    total = math.prod(stored.size)
    parts = tuple((chunk.offsets, chunk.sizes) for chunk in stored.chunks)
    if held == total and (len(parts) < 2 or _tile(parts, stored.size)):
        return
    if held > total:
        raise CheckpointError(f"{name}: parts overlap, {held} elements are held of {total}")
    for dim, size in enumerate(stored.size):
        seen: set[int] = set()
        for chunk in stored.chunks:
            seen.update(range(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]))
        missing = sorted(set(range(size)) - seen)
        if missing:
            places = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise CheckpointError(f"{name}: {problem} the indices {places} of dimension {dim}")
    if held == total:
        raise CheckpointError(f"{name}: parts overlap, and {problem} as many elements elsewhere")
    raise CheckpointError(f"{name}: {problem} {total - held} of its {total} elements")


@functools.lru_cache(maxsize=256)  # layers are alike, and moments are like their parameters
def _tile(places: tuple[tuple[torch.Size, torch.Size], ...], size: torch.Size) -> bool:
    """Whether chunks, by offsets and sizes, hold each element once.

    How often an element is held is the sum of the corners of chunks before it, with alternating signs. So
    all that is needed is that their corners add up to those of the whole.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    ends = list(itertools.product((0, 1), repeat=len(size)))
    whole = torch.Size([0] * len(size)), size
    for (offsets, sizes), sign in (*((place, 1) for place in places), (whole, -1)):
        for end in ends:
            corner = zip(offsets, sizes, end, strict=True)
            corners[tuple(at + length * e for at, length, e in corner)] += (
                -sign if sum(end) % 2 else sign
            )
    return not any(corners.values())


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    dtype = item.tensor_data.properties.dtype
    return int(math.prod(item.tensor_data.chunk.sizes) * dtype.itemsize)


def _tensors(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in sorted(items, key=lambda item: (item.index.fqn, item.index.offset)):
        data = item.tensor_data
        stored = found.setdefault(
            item.index.fqn, TensorStorageMetadata(data.properties, data.size, [])
        )
        if stored.size != data.size or stored.properties != data.properties:
            raise CheckpointError(
                f"{item.index.fqn}: ranks hold it as {tuple(stored.size)} "
                f"{stored.properties.dtype} and as {tuple(data.size)} {data.properties.dtype}."
            )
        stored.chunks.append(data.chunk)
    return found
