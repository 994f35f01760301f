"""The law of every layout: a parallel model equals the single-process one on the same global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import clip_grad_norm_, full_tensor, parallel_state, parallelize

MAX_NORM = 0.05  # below the gradients' norm, so that clipping acts


def batches(config: DistributedConfig, vocab: int, size: int = 2, length: int = 7) -> Tensor:
    """Token ids `[data shards, size, length]`; an odd length makes uneven slices."""
    generator = torch.Generator().manual_seed(1)
    shape = (config.dp_size, size, length)
    return torch.randint(3, vocab, shape, generator=generator)


def reference(
    build: Callable[[], nn.Module], ids: Tensor, *, steps: int = 1
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], float]:
    """One process on the whole batch: each shard's loss, gradients, stepped parameters, norm."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    losses = [model(input_ids=part, labels=part, use_cache=False).loss for part in ids]
    torch.stack(losses).mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    stepped = {name: p.detach().clone() for name, p in model.named_parameters()}
    return [loss.item() for loss in losses], grads, stepped, float(norm)


def relative_error(value: Tensor, expected: Tensor) -> float:
    """||value - expected|| / ||expected||; absolute where nothing is expected."""
    scale = expected.double().norm().item()
    error = (value.double() - expected.double()).norm().item()
    return error / scale if scale > 1e-12 else error


def check_equal(
    build: Callable[[], nn.Module],
    config: DistributedConfig,
    ids: Tensor,
    *,
    tolerance: float,
    **options: Any,
) -> dict[str, float]:
    """On each rank: loss, every gathered gradient, the norm and a clipped AdamW step.

    Returns the worst relative errors.
    """
    losses, grads, stepped, norm = reference(build, ids)
    mesh = ParallelMesh(config.layout)
    model = parallelize(build(), mesh, config, **options)
    assert parallel_state(model) is not None
    groups = by_mesh(model)
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-6, foreach=False)
    shard = mesh.layout.batch_of(mesh.rank)
    loss = model(input_ids=ids[shard], labels=ids[shard], use_cache=False).loss
    loss.backward()
    worst = {"loss": abs(loss.item() - losses[shard]) / abs(losses[shard])}
    bad = []
    parameters = dict(model.named_parameters())
    missing = {n for n, p in parameters.items() if p.grad is None and p.requires_grad} - (
        parameters.keys() - grads.keys()
    )
    assert not missing, f"no gradient for {sorted(missing)}"
    worst["grad"] = 0.0
    scale = max(g.norm().item() for g in grads.values())
    for name, expected in grads.items():
        found = full_tensor(parameters[name].grad)
        assert found.shape == expected.shape, name
        error = (found - expected).norm().item() / max(expected.norm().item(), 1e-4 * scale)
        worst["grad"] = max(worst["grad"], error)
        if not error < tolerance:
            bad.append((name, error))
    assert not bad, f"gradients differ: {bad}"
    worst["norm"] = abs(float(clip_grad_norm_(model.parameters(), MAX_NORM)) - norm) / norm
    optimizer.step()
    worst["step"] = max(
        relative_error(full_tensor(p), stepped[name]) for name, p in parameters.items()
    )
    late = {key: value for key, value in worst.items() if not value < tolerance}
    assert not late, f"{late} above {tolerance}"
    return worst


@contextlib.contextmanager
def all_float64() -> Iterator[None]:
    """Let model code that computes in float32 on purpose (norms, softmax, rotary) use float64.

    Without it a sum in another order flips a rounding to float32 here and there, and two equal
    computations differ by 1e-7.
    """
    names = {"float32": torch.float64, "float": torch.float64}
    before = {name: getattr(torch, name) for name in names}
    to_float = Tensor.float
    for name, dtype in names.items():
        setattr(torch, name, dtype)
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, dtype in before.items():
            setattr(torch, name, dtype)
        Tensor.float = to_float  # type: ignore[method-assign]


def by_mesh(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Optimizer parameter groups, one per mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        key = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]
