"""Mixed precision, float16's scaler and other ways to step, against one process in float64."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from equality import all_float64
from numerics import (
    LAYOUTS,
    backward,
    batches,
    build,
    errors,
    gradients,
    name,
    parameters,
    sharded,
    world_of,
)
from torch import Tensor, nn

from ep_plans import clip_grad_norm_, local, no_sync, parallel_state
from ep_testing import RankPool
from ep_trainer import StepInBackward, WorldGradScaler
from ep_trainer.optim import split_by_mesh

# bfloat16 keeps 8 bits of a number, so one product is off by up to 2^-9; through two layers forward
# and backward, and over the few tokens of this batch, the errors of a gradient add up to some percent.
BF16 = 0.08


@pytest.fixture(scope="module")
def exact() -> dict[str, Tensor]:
    """One process' gradients, in float64."""
    with all_float64():
        model = build()
        for ids in batches():
            backward(model, ids, 0.5)
    return gradients(model)


# -- accumulation


def accumulate(
    rank: int, sizes: dict[str, Any], exact: dict[str, Tensor], deferred: bool
) -> dict[str, float]:
    """The same batch three times, with weights that add up to one."""
    with all_float64():
        model = sharded(sizes)
        for step, weight in enumerate((0.5, 0.2, 0.3)):
            with no_sync(model) if deferred and step < 2 else contextlib.nullcontext():
                backward(model, batches(), weight)
    return errors(model, exact, grads=True)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=name)
def test_no_gradient_is_reduced_twice(
    ranks: RankPool, sizes: dict[str, Any], exact: dict[str, Tensor], deferred: bool
) -> None:
    for found in ranks.run(accumulate, sizes, exact, deferred, world=world_of(sizes)):
        assert {at for at, error in found.items() if not error < 1e-12} == set()


# -- bfloat16


def in_bf16(
    rank: int, sizes: dict[str, Any], exact: dict[str, Tensor], how: str
) -> dict[str, float]:
    mixed = {"fsdp_mixed_precision": True} if how == "fsdp_mixed_precision" else {}
    dtype = torch.bfloat16 if how == "parameters" else torch.float32
    model = sharded(sizes | mixed, dtype)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast")
    with autocast:
        backward(model, batches())
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {p.grad.dtype for p in model.parameters()} == {dtype}
    return errors(model, exact, grads=True)


@pytest.mark.parametrize("how", ["autocast", "fsdp_mixed_precision", "parameters"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=name)
def test_gradients_in_bf16_are_those_of_float64_but_for_its_rounding(
    ranks: RankPool, sizes: dict[str, Any], exact: dict[str, Tensor], how: str
) -> None:
    for found in ranks.run(in_bf16, sizes, exact, how, world=world_of(sizes)):
        assert {at: error for at, error in found.items() if not error < BF16} == {}
        assert max(found.values()) > 1e-3, "computed in more than bfloat16"


# -- float16


def scaled_steps(rank: int, sizes: dict[str, Any], overflows: int) -> tuple[Any, ...]:
    """Four steps in float16; in the second the gradients of one rank are not finite."""
    model = sharded(sizes, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    split_by_mesh(optimizer)
    scaler = WorldGradScaler(init_scale=2.0**10, growth_interval=2)
    scales, moved, norms = [], [], []
    for step in range(4):
        with torch.autocast("cpu", torch.float16):
            ids = batches(step)
            state = parallel_state(model)
            assert state is not None
            rows = ids[state.mesh.layout.batch_of(rank)].reshape(-1, ids.shape[-1])
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        scaler.scale(loss).backward()
        if step == 1 and rank == overflows:
            grad = next(p.grad for at, p in model.named_parameters() if "experts" in at)
            local(grad).view(-1)[0] = torch.inf
        norms.append(float(scaler.unscale_(optimizer)))
        before = [local_sum(p) for p in model.parameters()]
        scaler.step(optimizer)
        moved.append(before != [local_sum(p) for p in model.parameters()])
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    copy = WorldGradScaler()
    copy.load_state_dict(scaler.state_dict())
    assert copy.state_dict() == scaler.state_dict()
    return scales, moved, norms


def local_sum(parameter: Tensor) -> float:
    return float(local(parameter).detach().double().sum())


def test_ranks_skip_an_overflowing_step_together(ranks: RankPool) -> None:
    found = ranks.run(scaled_steps, LAYOUTS[2], 2, world=4)
    for scales, moved, norms in found:
        assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10], "falls, and rises after two good steps"
        assert moved == [True, False, True, True]
        assert norms[1] == torch.inf
        assert norms == found[0][2]
        assert 0.01 < norms[0] < 100, "unscaled"


# -- the step in backward


def in_backward(rank: int, sizes: dict[str, Any]) -> tuple[float, Any, int, int]:
    """Steps in backward and after it: what differs, both norms, bytes of gradients at their peak."""
    found, norms, peaks = [], [], []
    for early in (False, True):
        with all_float64():
            model = sharded(sizes)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            split_by_mesh(optimizer)
            stepper = StepInBackward(optimizer) if early else None
            peak = 0

            def watch(_: Tensor, model: nn.Module = model) -> None:
                nonlocal peak
                held = [p.grad for p in model.parameters() if p.grad is not None]
                peak = max(peak, sum(local(grad).nbytes for grad in held))

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(watch)
            for step in range(3):
                backward(model, batches(step))
                if stepper is not None:
                    assert all(p.grad is None for p in model.parameters())
                    norms.append(float(stepper.norm()))
                else:
                    norms.append(float(clip_grad_norm_(model, torch.inf)))
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(parameters(model))
        peaks.append(peak)
    differ = max(largest_difference(a, found[1][at]) for at, a in found[0].items())
    return differ, norms, *peaks


def largest_difference(a: Tensor, b: Tensor) -> float:
    difference = (local(a) - local(b)).abs()
    return float(difference.amax()) if difference.numel() else 0.0


@pytest.mark.parametrize("sizes", LAYOUTS, ids=name)
def test_a_step_in_backward_is_the_step_after_it(ranks: RankPool, sizes: dict[str, Any]) -> None:
    for differ, norms, after, early in ranks.run(in_backward, sizes, world=world_of(sizes)):
        assert differ == 0.0
        assert norms[3:] == pytest.approx(norms[:3], rel=1e-6)
        assert early < after / 2, "the gradients of one unit at a time"


# -- offload on CPU ranks


def offloaded(rank: int, exact: dict[str, Tensor]) -> tuple[dict[str, float], list[str]]:
    with warnings.catch_warnings(record=True) as told, all_float64():
        warnings.simplefilter("always")
        model = sharded(LAYOUTS[2] | {"fsdp_cpu_offload": True})
        backward(model, batches())
        found = errors(model, exact, grads=True)
        clip_grad_norm_(model, 1.0)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        split_by_mesh(optimizer)
        optimizer.step()
    return found, [str(warning.message) for warning in told]


def test_cpu_offload_on_cpu_ranks_trains_and_says_that_it_does_nothing(
    ranks: RankPool, exact: dict[str, Tensor]
) -> None:
    for found, told in ranks.run(offloaded, exact, world=4):
        assert max(found.values()) < 1e-12
        assert any("nothing to do" in text for text in told)
