"""A tiny Qwen3-MoE, a batch of each data shard, and one process' gradients of them all."""

from __future__ import annotations

from typing import Any

import tiny_models
import torch
from torch import Tensor, nn

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import full_tensor, parallel_state, parallelize

# A sample: TP alone, FSDP with its experts, all three with whole experts on few ranks.
LAYOUTS: list[dict[str, Any]] = [
    {"tp_size": 2},
    {"fsdp_size": 2, "ep_size": 2},
    {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHARDS = 2  # micro-batches of the reference, whatever the layout


def name(sizes: dict[str, Any]) -> str:
    return ",".join(f"{key.removesuffix('_size')}={size}" for key, size in sizes.items())


def world_of(sizes: dict[str, Any]) -> int:
    return DistributedConfig(**sizes).layout.world_size


def build(dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    return tiny_models.build(tiny_models.qwen3_moe(**SIZES | changes), dtype)


def sharded(sizes: dict[str, Any], dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    config = DistributedConfig(**sizes)
    return parallelize(build(dtype, **changes), ParallelMesh(config.layout), config)


def batches(seed: int = 1) -> Tensor:
    """Token ids `[data shards, rows, length]`; an odd length makes uneven slices."""
    return torch.randint(1, 64, (SHARDS, 2, 7), generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, ids: Tensor, factor: float = 1.0) -> Tensor:
    """Backward of this rank's part of the global batch; its loss.

    Of a layout with one data shard, both batches at once: their rows count the same tokens.
    """
    state = parallel_state(model)
    shards = 1 if state is None else state.mesh.layout.data_parallel_size
    if shards == SHARDS:
        assert state is not None
        ids = ids[state.mesh.layout.batch_of(state.mesh.rank)]
    rows = ids.reshape(-1, ids.shape[-1])
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    (loss * factor).backward()
    return loss.detach()


def relative_error(value: Tensor, expected: Tensor, scale: float = 1e-300) -> float:
    value = full_tensor(value).double()
    expected = expected.double()
    return float((value - expected).norm() / expected.norm().clamp(min=scale))


def errors(
    model: nn.Module, expected: dict[str, Tensor], *, grads: bool = False
) -> dict[str, float]:
    """Relative errors of the whole parameters, or gradients, by name."""
    scale = 1e-4 * max(float(value.norm()) for value in expected.values())
    return {
        at: relative_error(p.grad if grads else p.detach(), expected[at], scale)
        for at, p in model.named_parameters()
    }


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {at: p.detach().clone() for at, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {at: p.grad.clone() for at, p in model.named_parameters() if p.grad is not None}
