"""How `EPTrainer` steps: what is not finite, scaled gradients, the step in backward, optimizers."""

from __future__ import annotations

import importlib.util
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatching import dispatching
from test_trainer import FOUR, GLOBAL_BATCH, Curve, arguments, build, check_same, curve, data
from torch import Tensor, nn

from ep_mesh import DistributedConfig
from ep_plans import local
from ep_testing import RankPool
from ep_trainer import EPTrainer, Muon, WorldGradScaler
from ep_trainer.low_bit import is_low_bit, low_bit_parameters, narrowed, widened
from expert_parallel import parallelize

EXPERTS = "model.layers.0.mlp.experts"


def trainer_of(
    folder: str, options: dict[str, Any], model: nn.Module | None = None, **changes: Any
) -> EPTrainer:
    config = DistributedConfig(**dispatching(**FOUR))
    model = parallelize(build(), config) if model is None else model
    few = {"max_steps": 3, **changes}
    return EPTrainer(model, arguments(folder, GLOBAL_BATCH // 2, **few), **data(), **options)


def parts(model: nn.Module) -> list[Tensor]:
    return [local(p.detach()).clone() for p in model.parameters()]


# -- what is not finite


def spoiled(rank: int, on_nonfinite: str, what: str) -> tuple[Any, ...]:
    """In the second step a gradient of rank 1 is not finite, or a weight and so the loss."""
    steps: list[list[Tensor]] = []
    text, kinds = "", []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = trainer_of(folder, {"on_nonfinite": on_nonfinite})
        model = trainer.model
        micro = 0
        weight = model.get_parameter(f"{EXPERTS}.down_proj")

        def spoil(p: Tensor) -> None:
            if rank == 1 and what == "gradient" and trainer.state.global_step == 1:
                local(p.grad).view(-1)[:1].fill_(math.nan)

        weight.register_post_accumulate_grad_hook(spoil)
        run = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal micro
            micro += 1
            if micro == 4 and what == "loss":  # the second micro-batch of the second step
                poisoned = model.get_parameter("model.layers.1.self_attn.o_proj.weight")
                local(poisoned.detach())[:1].fill_(math.nan)
            steps.append(parts(model))
            return run(*args, **kwargs)

        trainer.training_step = training_step
        try:
            trainer.train()
        except RuntimeError as error:
            text = str(error)
        kinds = [str(w.message) for w in told if "skipped step" in str(w.message)]
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        skipped = [entry.get("skipped_steps") for entry in logged]
        rates = [entry["learning_rate"] for entry in logged]
        same = all(torch.equal(a, b) for a, b in zip(steps[-1], parts(model), strict=True))
        finite = all(bool(part.isfinite().all()) for part in parts(model))
    return text, kinds, skipped, rates, same, finite


def test_a_bad_gradient_stops_all_ranks_and_is_told(ranks: RankPool) -> None:
    for text, _, _, _, same, _ in ranks.run(spoiled, "stop", "gradient", world=4, timeout=120):
        assert "step 2" in text
        assert f"{EXPERTS}.down_proj, on rank 1)" in text
        assert "1 of " in text
        assert same, "the parameters are as they were before the step"


def test_a_bad_loss_is_told_with_the_first_bad_output(ranks: RankPool) -> None:
    for text, *_ in ranks.run(spoiled, "stop", "loss", world=4, timeout=120):
        assert "the loss of micro-batch 2 of 2 is not finite" in text
        assert "first in the output of model.layers.1.self_attn.o_proj" in text


def test_a_bad_step_is_skipped_by_all_ranks(ranks: RankPool) -> None:
    found = ranks.run(spoiled, "skip", "gradient", world=4, timeout=120)
    for rank, (text, told, skipped, rates, _, finite) in enumerate(found):
        assert (text, skipped, finite) == ("", [None, 1, 1], True)
        assert len(told) == (rank == 0)
        assert rates[1] == rates[2], "the schedule waits"
        assert rates[0] != rates[1]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="stop, skip, ignore"):
        EPTrainer(build(), on_nonfinite="retry")
    with pytest.raises(ValueError, match="sharded models"):
        EPTrainer(build(), on_nonfinite="skip")


# -- float16's scaler, in the trainer


def scaled(rank: int, scale: float | None) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, {})
        if scale is not None:  # accelerate has no float16 on CPU ranks
            trainer.accelerator.scaler = WorldGradScaler(init_scale=scale)
        return curve(trainer)


def test_a_scaled_run_is_the_unscaled_one(ranks: RankPool) -> None:
    expected = ranks.run(scaled, None, world=4, timeout=120)[0]
    for found in ranks.run(scaled, 2.0**12, world=4, timeout=120):
        check_same(found, expected)


# -- the step in backward


def in_backward(rank: int, early: bool) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        changes = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
        trainer = trainer_of(folder, {"optim_in_backward": early}, **changes)
        return curve(trainer)


def test_stepping_in_backward_is_the_same_run(ranks: RankPool) -> None:
    expected = ranks.run(in_backward, False, world=4, timeout=120)[0]
    for found in ranks.run(in_backward, True, world=4, timeout=120):
        check_same(found, expected)


def refused(rank: int) -> list[str]:
    texts = []
    model = parallelize(build(), DistributedConfig(**dispatching(**FOUR)))
    with tempfile.TemporaryDirectory() as folder:
        for options, changes in (
            ({"optim_in_backward": True, "on_nonfinite": "skip"}, {}),
            ({}, {"fp16": True}),
        ):
            with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is given back)
                trainer_of(folder, options, model, **changes)
            texts.append(str(error.value))
        changes = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
        options = {"optim_in_backward": True, "optimizers": (Muon(model), None)}
        with pytest.raises(ValueError, match="does not go with Muon"):
            trainer_of(folder, options, model, **changes).train()
    return texts


def test_what_cannot_go_together_is_refused(ranks: RankPool) -> None:
    for in_backward_text, fp16 in ranks.run(refused, world=4, timeout=120):
        for word in ("max_grad_norm=0.5", "gradient_accumulation_steps=2", 'on_nonfinite="skip"'):
            assert word in in_backward_text
        assert "CPU ranks" in fp16


# -- optimizers


def with_muon(rank: int) -> list[float]:
    model = parallelize(build(), DistributedConfig(**dispatching(**FOUR)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, {"optimizers": (Muon(model, lr=1e-2), None)}, model)
        return curve(trainer).loss


def test_a_trainer_takes_muon(ranks: RankPool) -> None:
    found = ranks.run(with_muon, world=4, timeout=120)
    assert found[0][-1] < found[0][0]
    assert all(losses == found[0] for losses in found)


def low_bit(rank: int, optim: str) -> tuple[list[float], list[str], int]:
    torch.compiler.set_stance("force_eager")  # torchao compiles a step per shape of parameter
    try:
        model = parallelize(
            build(hidden_size=64, moe_intermediate_size=64),
            DistributedConfig(**dispatching(**FOUR)),
        )
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(folder, {}, model, optim=optim)
            losses = curve(trainer).loss
    finally:
        torch.compiler.set_stance("default")
    optimizer = trainer.optimizer.optimizer
    for parameter, state in optimizer.state.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            wide = widened(state[kind])
            assert not is_low_bit(wide)
            assert wide.shape == parameter.shape
            assert getattr(wide, "placements", None) == getattr(parameter, "placements", None)
            again = narrowed(optimizer, parameter, kind, wide)
            assert is_low_bit(again) == is_low_bit(state[kind])
            # Rounded once more, in steps of the block's greatest number: 8 bits, or 4.
            error = (local(widened(again)) - local(wide)).norm() / local(wide).norm()
            assert float(error) < (0.02 if optim.endswith("8bit") else 0.2)
    return losses, low_bit_parameters(model, optimizer), len(list(model.parameters()))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_low_bit_adamw_learns_as_adamw(ranks: RankPool) -> None:
    losses, quantized, _ = ranks.run(low_bit, "adamw_torch", world=4, timeout=200)[0]
    assert quantized == []
    for optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
        for found, names, count in ranks.run(low_bit, optim, world=4, timeout=200):
            assert found == pytest.approx(losses, rel=2e-2)
            assert found != losses
            assert f"{EXPERTS}.gate_up_proj" in names
            assert len(names) < count, "small parts are not quantized"


def resumed(rank: int, folder: str) -> tuple[list[float], list[float], dict[str, float], list[str]]:
    """Losses of a run, and of one that goes on from its second step; the scaler and the moments then."""
    torch.compiler.set_stance("force_eager")
    losses = []
    try:
        for checkpoint in (None, f"{folder}/checkpoint-2"):
            model = parallelize(
                build(hidden_size=64, moe_intermediate_size=64),
                DistributedConfig(**dispatching(**FOUR)),
            )
            changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
            trainer = trainer_of(folder, {}, model, optim="adamw_torch_8bit", **changes)
            # The scale rises after the third step: a run that forgets its count is another one.
            scale = 2.0**12 if checkpoint is None else 2.0**3
            trainer.accelerator.scaler = WorldGradScaler(init_scale=scale, growth_interval=3)
            trainer.train(resume_from_checkpoint=checkpoint)
            logs = [entry for entry in trainer.state.log_history if "loss" in entry]
            losses.append([entry["loss"] for entry in logs])
    finally:
        torch.compiler.set_stance("default")
    names = low_bit_parameters(model, trainer.optimizer.optimizer)
    return losses[0], losses[1], trainer.accelerator.scaler.state_dict(), names


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_the_scaler_and_low_bit_moments_resume(ranks: RankPool, tmp_path: Path) -> None:
    for whole, again, scaler, names in ranks.run(resumed, str(tmp_path), world=4, timeout=200):
        assert again == pytest.approx(whole, rel=1e-3)  # the moments are rounded once more
        assert (scaler["scale"], scaler["_growth_tracker"]) == (2.0**13, 1)
        assert f"{EXPERTS}.gate_up_proj" in names
