from __future__ import annotations

import moe_step
import torch
from torch import nn

from ep_testing import RankPool


def kept(rank: int = 0, sharded: bool = False) -> int:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    x = torch.randn(100, 64)
    run = moe_step.Run(model, lambda: model(x).square().sum(), lambda: None)
    found = moe_step.kept_bytes(run)
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


def test_what_a_forward_keeps_is_counted_once_without_parameters(ranks: RankPool) -> None:
    """Both layers' inputs, of which the second is what ReLU keeps too, and what is squared.

    FSDP2 gathers parameters and frees them, so that what comes later may lie where they lay.
    """
    assert kept() == 4 * 100 * (64 + 32 + 16)
    assert ranks.run(kept, True, world=1) == [4 * 100 * (64 + 32 + 16)]
