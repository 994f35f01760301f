"""The law of every layout: the sharded model equals one process on the same global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from toy_decoder import ToyConfig, build, loss_of

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import clip_grad_norm_, full_tensor, no_sync, parallelize

MAX_NORM = 0.05  # below the gradients' norm, so that clipping acts


def token_ids(config: DistributedConfig, vocab: int, size: int, length: int, micro: int) -> Tensor:
    """`[micro-batches, data shards, size, length]`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab, (micro, config.dp_size, size, length), generator=generator)


def relative_error(value: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """||value - expected|| / ||expected||, where `scale` keeps tiny ones from being divided by."""
    assert value.shape == expected.shape, (value.shape, expected.shape)
    error = (value.double() - expected.double()).norm().item()
    return error / max(expected.double().norm().item(), scale, 1e-300)


def check_equal(
    toy: ToyConfig,
    config: DistributedConfig,
    *,
    tolerance: float = 1e-12,
    size: int = 2,
    length: int = 7,
    micro: int = 1,
    deferred: bool = False,
    make: Callable[[ToyConfig], nn.Module] = build,
    prepare: Callable[[nn.Module], Any] | None = None,
    run: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    **options: Any,
) -> nn.Module:
    """Loss, every gathered gradient, the norm and a clipped AdamW step equal one process'.

    Args:
        toy, config: the model and its layout.
        tolerance: of relative errors; the default leaves float64 the order of its sums.
        size, length: of a rank's micro-batch.
        micro: micro-batches whose gradients are accumulated; with `deferred`, FSDP reduces at the
            last one only.
        make: builds the model. prepare: called on both models. run: gives the loss.
        options: to `parallelize`.
    """
    ids = token_ids(config, toy.vocab_size, size, length, micro)
    expected = make(toy)
    if prepare is not None:
        prepare(expected)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, eps=1e-6)
    losses = torch.stack([torch.stack([run(expected, part) for part in step]) for step in ids])
    (losses.mean(1).sum() / micro).backward()
    grads = {n: p.grad.clone() for n, p in expected.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), MAX_NORM)
    optimizer.step()

    mesh = ParallelMesh(config.layout)
    model = make(toy)
    if prepare is not None:
        prepare(model)
    parallelize(model, mesh, config, **options)
    optimizer = torch.optim.AdamW(by_mesh(model), lr=1e-2, eps=1e-6, foreach=False)
    shard = mesh.layout.batch_of(mesh.rank)
    for step in range(micro):
        kept = deferred and step < micro - 1
        with no_sync(model) if kept else contextlib.nullcontext():
            loss = run(model, ids[step, shard])
            assert relative_error(loss.detach(), losses[step, shard].detach()) < tolerance, "loss"
            (loss / micro).backward()
    compare_gradients(model, grads, tolerance)
    found = clip_grad_norm_(model.parameters(), MAX_NORM)
    assert relative_error(found, norm) < tolerance, "gradient norm"
    optimizer.step()
    for name, parameter in expected.named_parameters():
        stepped = full_tensor(model.get_parameter(name))
        assert relative_error(stepped, parameter.detach()) < tolerance, f"{name} after a step"
    return model


def compare_gradients(model: nn.Module, expected: dict[str, Tensor], tolerance: float) -> None:
    """Each gathered gradient is the expected one; where none is expected, there is none."""
    scale = 1e-4 * max(grad.norm().item() for grad in expected.values())
    errors = {}
    for name, parameter in model.named_parameters():
        if name not in expected:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, f"no gradient of {name}"
        assert parameter.grad.dtype == parameter.dtype, name
        errors[name] = relative_error(full_tensor(parameter.grad), expected[name], scale)
    wrong = {name: error for name, error in errors.items() if not error < tolerance}
    assert not wrong, f"gradients differ: {wrong}"


def by_mesh(model: nn.Module) -> list[dict[str, Sequence[nn.Parameter]]]:
    """Optimizer parameter groups, one per mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            key = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(key, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]
