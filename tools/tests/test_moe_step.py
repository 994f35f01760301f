from __future__ import annotations

import moe_step
import torch
from torch import nn


def test_what_a_forward_keeps_is_counted_once_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    x = torch.randn(100, 64)

    def loss() -> torch.Tensor:
        return model(x).square().sum()

    # Both layers' inputs (that of the second is what ReLU keeps too), and what is squared.
    kept = moe_step.kept_bytes(moe_step.Run(model, loss, lambda: None))
    assert kept == 4 * 100 * (64 + 32 + 16)
    assert all(parameter.grad is None for parameter in model.parameters())
