"""Boxes of DTensors against what sharding them left on each rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ep_mesh import Layout, ParallelMesh
from ep_plans.boxes import Box, lengths
from ep_plans.sharding import Cut, shard_tensor
from ep_plans.shards import box_of, holders
from ep_testing import RankPool
from expert_parallel.gathering import GatheredTensor, gathered


def taken(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, intervals in enumerate(box):
        parts = [tensor.narrow(dim, low, high - low) for low, high in intervals]
        tensor = torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)
    return tensor


CASES = {
    "whole": (Layout(tp=2, fsdp=2), None, None, (6, 4)),
    "tp": (Layout(tp=4), Cut("tp", 1), None, (3, 10)),
    "tp with empty parts": (Layout(tp=4), Cut("tp", 0), None, (5, 2)),
    "another batch's group has no root": (Layout(tp=2, fsdp=2), Cut("tp", 0), None, (6, 2)),
    "packed": (Layout(tp=4), Cut("tp", 0, packs=2), None, (24, 2)),
    "packed experts": (Layout(tp=2, fsdp=2), Cut("tp", 1, packs=2), "fsdp", (5, 8, 3)),
    "copied heads": (Layout(tp=4), Cut("tp", 0, copies=2), None, (8, 3)),
    "fsdp": (Layout(fsdp=4), None, "fsdp", (7, 3)),
    "fsdp over the same uneven dimension": (Layout(tp=2, fsdp=2), Cut("tp", 0), "fsdp", (7, 3)),
    "fsdp over packed": (Layout(tp=2, fsdp=2), Cut("tp", 0, packs=2), "fsdp", (12, 3)),
    "fsdp over the other dimension": (Layout(tp=2, fsdp=2), Cut("tp", 1), "fsdp", (5, 6)),
    "experts": (Layout(tp=1, fsdp=4, ep=2), Cut("ep", 0), "efsdp", (6, 5)),
    "replicas": (Layout(tp=2, dp_replicate=2), Cut("tp", 0), "fsdp", (5, 3)),
    "replicated whole over the group": (Layout(tp=2, fsdp=2), None, "fsdp_tp", (6, 3)),
}


class One(nn.Module):
    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(parameter)


def sharded(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor and what a rank has of it in the way of a case."""
    layout, cut, data_axis, shape = CASES[name]
    mesh = ParallelMesh(layout, "cpu")
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    made: torch.Tensor = whole.clone()
    if cut is not None:
        over = mesh.split_tp(layout.tp // cut.copies) if cut.copies > 1 else mesh.mesh(cut.axis)
        made = shard_tensor(whole.clone(), cut, over)
    if data_axis is None:
        return whole, made
    module = One(made)
    axes = (data_axis,) if layout.dp_replicate == 1 else ("dp_replicate", data_axis)
    fully_shard(module, mesh=mesh.mesh(*axes))
    return whole, module.weight.detach()


def check_boxes(rank: int, name: str) -> None:
    whole, made = sharded(name)
    box = box_of(made)
    local = made.to_local() if isinstance(made, DTensor) else made
    assert lengths(box) == tuple(local.shape)
    assert torch.equal(taken(whole, box), local)
    if isinstance(made, DTensor):
        assert holders(made)[rank] == box


def check_gathering(rank: int, name: str) -> int:
    whole, made = sharded(name)
    out = torch.empty(whole.shape, device="cpu" if rank == 0 else "meta")
    lazy = gathered({"weight": made}, nn.Module())["weight"]
    lazy.read(tuple(((0, size),) for size in whole.shape), out)
    box = tuple(((0, 1), (size - 1, size)) for size in whole.shape)
    corners = torch.empty(lengths(box), device=out.device)
    lazy.read(box, corners)
    if rank == 0:
        assert torch.equal(out, whole)
        assert torch.equal(corners, taken(whole, box))
    node = lazy.node
    assert isinstance(node, GatheredTensor)
    return sum(torch.Size(lengths(part)).numel() for part in node.parts.values())


@pytest.mark.parametrize("name", CASES)
def test_a_box_is_the_local_tensor(ranks: RankPool, name: str) -> None:
    ranks.run(check_boxes, name, world=4)


@pytest.mark.parametrize("name", CASES)
def test_the_first_rank_gathers_each_element_once(ranks: RankPool, name: str) -> None:
    told = ranks.run(check_gathering, name, world=4)
    layout, cut, data_axis, shape = CASES[name]
    assert told[0] == torch.Size(shape).numel()
    if cut is not None and data_axis is None and layout.world_size > layout.tp:
        assert told[layout.tp :] == [0] * (layout.world_size - layout.tp), "they would send too"
