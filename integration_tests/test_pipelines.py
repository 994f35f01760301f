"""A training step over pipeline stages equals the step of one process, for each schedule and layout.

A sample runs by default, everything with `--all-layouts`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pipelines import Case, cases, compare, global_batch, world_of
from tiny_models import build, qwen3_moe

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import parallelize
from ep_testing import RankPool
from ep_testing.pool import RankError
from ep_trainer import PipelineRunner, WorldGradScaler


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A sample of layouts, schedules and ways to train; with `--all-layouts` all."""
    if "case" in metafunc.fixturenames:
        chosen = cases(metafunc.config.getoption("--all-layouts"))
        metafunc.parametrize("case", chosen, ids=[" ".join(case) for case in chosen])


def test_a_step_equals_one_process(ranks: RankPool, case: Case) -> None:
    errors = ranks.run(compare, case, world=world_of(case), timeout=120)
    print(case, {key: f"{max(error[key] for error in errors):.1e}" for key in errors[0]})


def runner_of(**options: Any) -> PipelineRunner:
    config = DistributedConfig(**options)
    model = build(qwen3_moe(num_hidden_layers=4), torch.float32)
    return PipelineRunner(parallelize(model, ParallelMesh(config.layout), config))


def in_float16(rank: int) -> tuple[list[float], list[float], list[float]]:
    """Losses and norms of two steps, in float32 and in float16; scales of the gradients of the latter."""
    losses, norms, scales = [], [], []
    for narrow in (False, True):
        runner = runner_of(pp_size=2)
        if narrow:
            runner._context = lambda: torch.autocast("cpu", torch.float16)
        optimizer = torch.optim.SGD(runner.model.parameters(), lr=0.1)
        # So that a gradient overflows float16 in the first step.
        scaler = WorldGradScaler(init_scale=2.0**24 if narrow else 1.0, backoff_factor=2.0**-12)
        while len(losses) < 2 * (1 + narrow):
            loss = runner.step(
                global_batch(1) | {"use_cache": False}, loss_scale=scaler.get_scale()
            )
            norm = float(scaler.unscale_(optimizer))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            if math.isfinite(norm):
                losses.append(loss.item())
                norms.append(norm)
    return losses, norms, scales


def test_float16_over_stages(ranks: RankPool) -> None:
    for losses, norms, scales in ranks.run(in_float16, world=2, timeout=60):
        assert scales == [1.0, 1.0, 2.0**12, 2.0**12, 2.0**12]
        # float16 keeps 11 bits of each factor.
        assert losses[2:] == pytest.approx(losses[:2], rel=2e-3)
        assert norms[2:] == pytest.approx(norms[:2], rel=1e-2)
        assert losses[2:] != losses[:2]


def refuse(rank: int) -> None:
    batch = global_batch(1)
    odd = runner_of(pp_size=2, fsdp_size=2, ep_size=2, pp_micro_batches=3)
    with pytest.raises(ValueError, match=r"pp_micro_batches=3 .* 4 rows .* these fit: 2, 4\."):
        odd.step(batch)
    runner = runner_of(pp_size=2, fsdp_size=2, ep_size=2)
    shard = runner.mesh.layout.batch_of(rank)
    with pytest.raises(ValueError, match="different sizes, 7 rows together"):
        runner.step({name: value[: 4 - shard] for name, value in batch.items()})
    with pytest.raises(ValueError, match="needs labels"):
        runner.step({"input_ids": batch["input_ids"]})
    with pytest.raises(ValueError, match="cu_seq_lens_q has the shape"):
        runner.step(batch | {"cu_seq_lens_q": torch.arange(3)})
    model = runner_of(pp_size=2, fsdp_size=2, pp_schedule="zero_bubble").model
    with pytest.raises(ValueError, match=r"reduce_each=True.*zero_bubble.*gpipe"):
        PipelineRunner(model, reduce_each=True)


def test_bad_batches_are_refused_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(refuse, world=4, timeout=60)


def fail_in_stage(rank: int) -> None:
    runner = runner_of(pp_size=2)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise LookupError("out of luck")

    if rank == 1:
        runner.model.get_submodule("model.layers.3").register_forward_pre_hook(fail)
    runner.step(global_batch(1) | {"use_cache": False})


def test_a_failing_stage_says_where(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"LookupError: out of luck\s+in stage 1 of the pipeline, micro-batch 1"
    ) as caught:
        ranks.run(fail_in_stage, world=2, timeout=60)
    assert "failed to run forward" not in str(caught.value)
