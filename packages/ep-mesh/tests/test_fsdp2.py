"""FSDP2 over our meshes, with parameters that are sharded on another of them, equals one process.

T tokens of a batch, H in features, O out features. A rank's batch is the one that
`Layout.batch_of` names; the loss is the mean over the batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from mesh_layouts import name
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from ep_mesh import Layout, ParallelMesh

T, H, O = 5, 8, 16  # FSDP2 takes no empty shard, so no size below 8
LAYOUTS = [
    Layout(tp=2, fsdp=4, ep=4),
    Layout(tp=2, fsdp=2, dp_replicate=2, ep=4),
    Layout(tp=8, ep=8),
    Layout(fsdp=8, ep=4),
    Layout(fsdp=8, ep=8),
    Layout(tp=4, dp_replicate=2, ep=4),
    Layout(tp=4, fsdp=2),
    Layout(dp_replicate=8),
    Layout(tp=2, fsdp=2, ep=2),
    Layout(),
]


@dataclass(frozen=True)
class Form:
    """The axes of the DTensor that a parameter is before FSDP2, and the axes of FSDP2."""

    shard: tuple[str, ...]
    fsdp: tuple[str, ...]
    placements: tuple[Placement, ...] = (Shard(0),)

    def __str__(self) -> str:
        return f"{'+'.join(self.shard) or 'plain'}-under-{'+'.join(self.fsdp)}"


FORMS = [
    Form(("tp",), ("fsdp",)),
    Form(("tp",), ("dp_replicate", "fsdp")),
    Form(("tp",), ("fsdp",), (Shard(1),)),
    Form(("ep",), ("efsdp",)),
    Form(("ep",), ("dp_replicate", "efsdp")),
    Form(("ep",), ("efsdp",), (Shard(1),)),
    Form((), ("fsdp",), ()),
    Form((), ("fsdp_tp",), ()),
    Form((), ("dp_replicate", "fsdp_tp"), ()),
    Form(("split",), ("fsdp",), (Shard(0), Replicate())),
    Form(("split",), ("dp_replicate", "fsdp"), (Shard(0), Replicate())),
]


class Product(nn.Module):
    """A product with a weight that may be sharded on a mesh, and is gathered to be used.

    Each rank of that mesh uses the whole weight, so the weight's gradient is the sum of what the
    ranks find: that is the mean over them once `1 / ranks` is in each.
    """

    def __init__(self, weight_OH: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_OH)

    def forward(self, x_TH: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            whole = weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)
            share = whole / mesh.size()
            weight = share + (whole - share).detach()
        return (x_TH @ weight.t()).square().mean()


def compare(rank: int, layout: Layout, form: Form) -> None:
    mesh = ParallelMesh(layout)
    generator = torch.Generator().manual_seed(0)
    weight_OH = torch.randn(O, H, dtype=torch.float64, generator=generator)
    batches = torch.randn(layout.data_parallel_size, T, H, dtype=torch.float64, generator=generator)
    single = Product(weight_OH.clone())
    loss = torch.stack([single(x_TH) for x_TH in batches]).mean()
    loss.backward()
    assert single.weight.grad is not None

    weight: Tensor = weight_OH.clone()
    if form.shard:
        split = form.shard == ("split",)
        inner = mesh.split_tp(max(layout.tp // 2, 1)) if split else mesh.mesh(*form.shard)
        weight = distribute_tensor(weight, inner, form.placements)
    block = Product(weight)
    fully_shard(block, mesh=mesh.mesh(*form.fsdp))
    local = block(batches[layout.batch_of(rank)])
    local.backward()

    mean = local.detach() / layout.data_parallel_size
    dist.all_reduce(mean, group=mesh.group("dp"))
    torch.testing.assert_close(mean, loss.detach())
    parameter = block.weight
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter.grad, DTensor)
    torch.testing.assert_close(parameter.full_tensor(), weight_OH)
    torch.testing.assert_close(parameter.grad.full_tensor(), single.weight.grad)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_fully_shard_equals_a_single_process(ranks, layout, form):
    if layout.dp_replicate > 1 and "dp_replicate" not in form.fsdp:
        form = Form(form.shard, ("dp_replicate", *form.fsdp), form.placements)
    ranks.run(compare, layout, form, world=layout.world_size)
