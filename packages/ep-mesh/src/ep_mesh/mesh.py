"""`ParallelMesh`: the two `DeviceMesh` views of a layout, over one set of process groups.

[Note: one rank map]
FSDP2 joins the mesh that it shards over with the mesh of a parameter that is a DTensor already,
and refuses meshes whose maps from positions to ranks differ. So every view is built over all
ranks of the world in rank order, from process groups that were made before
(`DeviceMesh.from_group`), and `mesh` slices it: meshes of different views combine, and axes with
equal ranks share one process group.

[Note: gloo at exit]
A gloo thread lets go of a collective's tensors a moment after the collective returned, for which
it takes Python's lock. If the interpreter is shutting down by then, the thread is ended instead,
in a place where C++ answers with an abort ("terminate called without an active exception", torch
2.13). Groups outlive `destroy_process_group` as long as a model refers to them, so nobody waits
for their threads. A program that communicates until its last line therefore pauses at exit.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ep_mesh.config import launched_processes
from ep_mesh.layout import VIEWS, Layout

_TP_SPLIT = ("tp_shard", "tp_copy")


class ParallelMesh:
    """Device meshes and process groups of a layout; every rank of the world builds one.

    Starts `torch.distributed` if nobody did: from torchrun's environment, or as a world of one.

    Args:
        layout: the sizes; their product must equal the number of processes.
        device_type: where the parameters live. None: the accelerator, if there is one and
            `torch.distributed` isn't running on gloo already; else `"cpu"`.

    Raises:
        ValueError: the number of processes is not the layout's; checked before any group is made.

    Costs a few store barriers per distinct process group, on the first layout that needs it.
    """

    layout: Layout
    rank: int
    device: torch.device
    device_type: str

    def __init__(self, layout: Layout, device_type: str | None = None) -> None:
        self.layout = layout
        self.device_type = _choose_device_type(device_type)
        layout.check_world_size(_processes())
        self.device = _bind_device(self.device_type)
        _start(self.device_type)
        _pause_at_exit()
        self.rank = dist.get_rank()
        flattened = (("pp", "dp_replicate", "fsdp_tp"), ("pp", "dp", "tp"), ("world",))
        self._views = [
            self._view(axes, [layout.size(axis) for axis in axes])
            for axes in (*VIEWS.values(), *flattened)
        ]
        self._splits: dict[int, DeviceMesh] = {}
        self._slices: dict[tuple[str, ...], DeviceMesh] = {}  # slicing takes the host about 1 ms

    def __repr__(self) -> str:
        return f"ParallelMesh({self.layout}, device={self.device}, rank={self.rank})"

    def mesh(self, *axes: str) -> DeviceMesh:
        """The `DeviceMesh` of one axis or of several, outermost first.

        For example `"tp"`; `"dp_replicate", "fsdp"` (HSDP); `"ep"`;
        `"dp_replicate", "efsdp"`; and the flattened axes `"fsdp_tp"` (fsdp outer, tp inner: a replica) and
        `"dp"` (dp_replicate outer, fsdp inner: all batches). FSDP2 takes any of these, with
        parameters that are DTensors on another one that it doesn't overlap. No communication.

        Raises:
            ValueError: no view has these axes in this order.
        """
        if axes in self._slices:
            return self._slices[axes]
        for view in self._views:
            names = view.mesh_dim_names or ()
            if axes and axes == tuple(name for name in names if name in axes):
                return self._slices.setdefault(axes, view[axes])
        views = "; ".join(", ".join(view.mesh_dim_names or ()) for view in self._views)
        raise ValueError(
            f"no mesh has the axes {', '.join(axes) or '(none)'} in this order; "
            f"take axes of one view, outermost first: {views}."
        )

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank on `axis`."""
        return self.mesh(axis).get_group()

    def size(self, axis: str) -> int:
        """Number of ranks of a group on `axis`."""
        return self.layout.size(axis)

    def coordinate(self, axis: str) -> int:
        """The place of this rank in its group on `axis`."""
        return self.layout.coordinate(axis, self.rank)

    def split_tp(self, shards: int) -> DeviceMesh:
        """The TP axis as a mesh of two: `("tp_shard", "tp_copy")`, copies consecutive.

        For parameters with fewer pieces than TP ranks (key-value heads): rank `i` of a TP group
        holds piece `i // copies`. Every rank of the world must call it, the first time.

        Raises:
            ValueError: `shards` does not divide the TP size.
        """
        tp = self.layout.tp
        if shards < 1 or tp % shards:
            fits = ", ".join(str(n) for n in range(1, tp + 1) if tp % n == 0)
            raise ValueError(f"{shards} shards do not divide tp_size={tp}; these do: {fits}.")
        if shards not in self._splits:
            outer = ("pp", "dp_replicate", "fsdp")
            sizes = [self.layout.size(axis) for axis in outer]
            view = self._view((*outer, *_TP_SPLIT), [*sizes, shards, tp // shards])
            self._splits[shards] = view[_TP_SPLIT]
        return self._splits[shards]

    def _view(self, axes: Sequence[str], sizes: Sequence[int]) -> DeviceMesh:
        """A mesh over all ranks in rank order, with one process group per axis."""
        ranks = torch.arange(self.layout.world_size, dtype=torch.int).view(*sizes)
        groups = [
            _process_group(ranks.movedim(dim, -1).reshape(-1, size).tolist())
            for dim, size in enumerate(sizes)
        ]
        return DeviceMesh.from_group(
            groups, self.device_type, mesh=ranks, mesh_dim_names=tuple(axes)
        )


# Groups by their ranks, per default group: a second model in the same program communicates over
# the same groups. An entry goes when its default group is destroyed.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_groups = weakref.WeakKeyDictionary()


def _process_group(partition: list[list[int]]) -> dist.ProcessGroup:
    """This rank's group of a partition of the world, made on the first request.

    All ranks ask for the same partitions in the same order, so they agree on which exist.
    """
    world = dist.group.WORLD
    assert world is not None
    known = _groups.setdefault(world, {tuple(range(dist.get_world_size())): world})
    mine = next(tuple(ranks) for ranks in partition if dist.get_rank() in ranks)
    if mine not in known:
        known[mine] = _new_groups(partition)
    return known[mine]


def _new_groups(partition: list[list[int]]) -> dist.ProcessGroup:
    mine: dist.ProcessGroup | None = None
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        # A communicator that exists already is split for all groups at once.
        mine = dist.split_group(split_ranks=partition)
    else:
        for ranks in partition:
            made = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine = made
    assert mine is not None
    return mine


def _processes() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return launched_processes() or 1


def _choose_device_type(device_type: str | None) -> str:
    if device_type is not None:
        return device_type
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _bind_device(device_type: str) -> torch.device:
    """Make one device of this machine this process's own, by LOCAL_RANK."""
    if device_type == "cpu":
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        index, count = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
        if count == 1:
            index = 0  # the launcher shows each process its own device only
        elif index >= count:
            raise ValueError(
                f"LOCAL_RANK={index}, but this machine has {count} {device_type} devices: start "
                f"at most {count} processes here, or pass device_type='cpu'."
            )
        torch.accelerator.set_device_index(index)
    return torch.device(device_type, torch.accelerator.current_device_index())


def _own_store() -> dict[str, Any]:
    """After a restart by torchrun on one machine: a part of its store that no earlier start used.

    torch 2.13 takes the launcher's store as it is, where ranks may read the addresses of ranks that
    are gone, and wait for them. Over several machines the starts have no number that all know.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    world = os.environ["WORLD_SIZE"]
    if start == "0" or not shared or os.environ.get("LOCAL_WORLD_SIZE") != world:
        return {}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    own = dist.PrefixStore(f"start-{start}", store)  # type: ignore[attr-defined]
    return {"store": own, "rank": int(os.environ["RANK"]), "world_size": int(world)}


def _start(device_type: str) -> None:
    if dist.is_initialized():
        return
    # CPU tensors keep a backend beside the accelerator's: offloaded gradients are reduced there.
    backend = "gloo" if device_type == "cpu" else None
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, **_own_store())
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


@functools.cache
def _pause_at_exit() -> None:
    """See [Note: gloo at exit]."""
    atexit.register(time.sleep, 0.1)
