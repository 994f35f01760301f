"""`ParallelMesh` on several ranks: its groups are the layout's, each made once."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Self

import pytest
import torch
import torch.distributed as dist
from mesh_layouts import every_layout

from ep_mesh import AXES, Layout, ParallelMesh


class CountGroups:
    """Counts the calls that make a process group."""

    def __enter__(self) -> Self:
        self.made: list[tuple[int, ...]] = []
        self._new_group = dist.new_group

        def new_group(ranks, *args, **kwargs):
            self.made.append(tuple(ranks))
            return self._new_group(ranks, *args, **kwargs)

        dist.new_group = new_group
        return self

    def __exit__(self, *exc: object) -> None:
        dist.new_group = self._new_group


def check_against_layout(rank: int, layouts: list[Layout]) -> None:
    for layout in layouts:
        mesh = ParallelMesh(layout)
        assert (mesh.rank, mesh.device, mesh.device_type) == (rank, torch.device("cpu"), "cpu")
        for axis in AXES:
            expected = layout.group(axis, rank)
            group = mesh.group(axis)
            assert dist.get_process_group_ranks(group) == list(expected)
            assert mesh.mesh(axis).mesh.tolist() == list(expected)
            assert mesh.mesh(axis).get_local_rank() == mesh.coordinate(axis)
            assert mesh.size(axis) == len(expected) == group.size()
            assert expected[mesh.coordinate(axis)] == rank


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_every_axis_has_the_group_that_the_layout_says(ranks, world):
    ranks.run(check_against_layout, list(every_layout(world, world)), world=world)


def test_the_groups_communicate(ranks):
    layout = Layout(tp=2, fsdp=2, dp_replicate=2, ep=4)

    def sums(rank):
        mesh = ParallelMesh(layout)
        found = {}
        for axis in AXES:
            value = torch.tensor(float(rank))
            dist.all_reduce(value, group=mesh.group(axis))
            found[axis] = value.item()
        return found

    for rank, found in enumerate(ranks.run(sums)):
        assert found == {axis: float(sum(layout.group(axis, rank))) for axis in AXES}


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, fsdp=4, ep=2), Layout(tp=2, fsdp=2, dp_replicate=2, ep=4), Layout(fsdp=8, ep=8)],
    ids=str,
)
def test_equal_ranks_share_one_group_and_a_second_mesh_makes_none(ranks, layout, tmp_path):
    def count(rank):
        # Other tests use this world too: this one starts on a default group of its own.
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), 8)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=8)
        with CountGroups() as first:
            mesh = ParallelMesh(layout)
        with CountGroups() as second:
            again = ParallelMesh(layout)
        groups = {axis: mesh.group(axis) for axis in AXES}
        for axis, group in groups.items():
            assert group is again.group(axis)
            for other in AXES:
                same = layout.group(axis, rank) == layout.group(other, rank)
                assert (group is groups[other]) == same
        assert groups["world"] is dist.group.WORLD
        return first.made, second.made

    results = ranks.run(count)
    partitions = {
        tuple(layout.groups(axis)) for axis in AXES if layout.size(axis) < layout.world_size
    }
    for first, second in results:
        assert sorted(first) == sorted(ranks for groups in partitions for ranks in groups)
        assert second == []


def test_meshes_of_several_axes(ranks):
    layout = Layout(tp=2, fsdp=2, dp_replicate=2, ep=4)

    def shapes(rank):
        mesh = ParallelMesh(layout)
        hsdp = mesh.mesh("dp_replicate", "fsdp")
        assert hsdp.mesh_dim_names == ("dp_replicate", "fsdp")
        assert mesh.mesh("dp_replicate", "efsdp").shape == (2, 1)
        assert mesh.mesh("dp_replicate", "fsdp_tp").shape == (2, 4)
        assert mesh.mesh("fsdp", "tp").mesh.flatten().tolist() == mesh.mesh("fsdp_tp").mesh.tolist()
        assert mesh.mesh("tp") == mesh.mesh("fsdp", "tp")["tp"], "slices of one axis are equal"
        return hsdp.mesh.tolist()

    assert ranks.run(shapes)[0] == [[0, 2], [4, 6]]
    assert ranks.run(shapes)[5] == [[1, 3], [5, 7]]


def test_axes_that_no_view_has_together(ranks):
    def refuse(rank):
        mesh = ParallelMesh(Layout(tp=2, fsdp=1))
        for axes in (("fsdp", "ep"), ("tp", "fsdp"), ("cp",), ()):
            with pytest.raises(
                ValueError, match=r"no mesh has the axes.*pp, dp_replicate, fsdp, tp"
            ):
                mesh.mesh(*axes)

    ranks.run(refuse, world=2)


def test_split_tp(ranks):
    """Consecutive ranks of a TP group are copies of one shard."""

    def split(rank, shards):
        mesh = ParallelMesh(Layout(tp=4, fsdp=2, ep=4))
        both = mesh.split_tp(shards)
        assert both is mesh.split_tp(shards)
        assert both.mesh_dim_names == ("tp_shard", "tp_copy")
        return both.mesh.tolist(), both.get_coordinate()

    assert ranks.run(split, 2)[5] == ([[4, 5], [6, 7]], (0, 1))
    assert ranks.run(split, 4)[6] == ([[4], [5], [6], [7]], (2, 0))
    assert ranks.run(split, 1)[3] == ([[0, 1, 2, 3]], (0, 3))

    def refuse(rank):
        for shards in (3, 0, 8):
            with pytest.raises(
                ValueError, match=rf"{shards} shards .*tp_size=4; these do: 1, 2, 4"
            ):
                ParallelMesh(Layout(tp=4, fsdp=2)).split_tp(shards)

    ranks.run(refuse)


def test_a_wrong_world_is_refused_before_any_group_is_made(ranks):
    def refuse(rank):
        with CountGroups() as groups, pytest.raises(ValueError, match="= 16 processes, but 4 are"):
            ParallelMesh(Layout(tp=4, fsdp=4))
        assert groups.made == []

    ranks.run(refuse, world=4)


def python(code: str, **environment: str) -> str:
    """Run a program of its own, and return what it prints."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_single_process_needs_no_launcher():
    code = """
from ep_mesh import Layout, ParallelMesh
import torch.distributed as dist
mesh = ParallelMesh(Layout(), device_type="cpu")
print(mesh, dist.get_backend(), mesh.group("ep").size())
try:
    ParallelMesh(Layout(tp=2))
except ValueError as error:
    print(error)
"""
    printed = python(code)
    assert "device=cpu, rank=0) gloo 1" in printed
    assert "but 1 is running. Start 2 (torchrun --nproc-per-node 2" in printed


def test_a_launcher_s_environment_starts_the_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from ep_mesh import Layout, ParallelMesh\n"
        "import torch, torch.distributed as dist\n"
        "mesh = ParallelMesh(Layout(tp=2), device_type='cpu')\n"
        "total = torch.ones(())\n"
        "dist.all_reduce(total, group=mesh.group('tp'))\n"
        "print(f'rank {mesh.rank}: {total.item():g}', flush=True)\n"
    )
    code = (
        "from torch.distributed.run import main\n"
        f"main(['--standalone', '--nproc-per-node', '2', {str(script)!r}])"
    )
    printed = python(code, OMP_NUM_THREADS="1")
    assert "rank 0: 2" in printed
    assert "rank 1: 2" in printed


@pytest.mark.parametrize(
    ("local_rank", "devices", "expected"), [("3", 8, 3), ("3", 1, 0), (None, 8, 5)]
)
def test_the_device_is_bound_by_local_rank(monkeypatch, local_rank, devices, expected):
    """A launcher may show all devices of the machine to each process, or each its own."""
    from ep_mesh.mesh import _bind_device

    current = [5]
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda i: current.append(i))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[-1])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert _bind_device("cuda") == torch.device("cuda", expected)


def test_more_processes_than_devices_are_refused(monkeypatch):
    from ep_mesh.mesh import _bind_device

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK=2, but this machine has 2 cuda devices"):
        _bind_device("cuda")
