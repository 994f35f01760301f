"""What the trainer has beside plain steps, over pipeline stages: as in one process, or refused."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dispatching import dispatching
from test_selective import CHECKPOINTING
from test_trainer import GLOBAL_BATCH, Sentences, arguments, build, data
from tiny_models import build as build_family
from tiny_models import deepseek_v3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ep_mesh import DistributedConfig
from ep_plans import parallel_state
from ep_testing import RankPool
from ep_trainer import (
    BiasBalancing,
    EPTrainer,
    ExpertLoad,
    Memory,
    Muon,
    Speed,
    WorldGradScaler,
    chunk_loss,
)
from expert_parallel import parallelize

SIZES = {"pp_size": 2, "fsdp_size": 2, "ep_size": 2, "pp_schedule": "interleaved_1f1b"}
FOUR_LAYERS = {"num_hidden_layers": 4}
FEW = {"max_steps": 3}
SMOOTHED = {"label_smoothing_factor": 0.1}
# In the last of three steps a micro-batch of 4 samples, the rest of which fills it up and counts nowhere.
FILLED_UP = Sentences(36)
SELECTIVE = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"selective": True}}


def losses(trainer: transformers.Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.named_buffers() if "correction_bias" in name}


def trainer_of(
    folder: str, options: dict[str, Any], changes: dict[str, Any], muon: bool = False
) -> EPTrainer:
    config = DistributedConfig(**dispatching(**SIZES))
    model = parallelize(build(**FOUR_LAYERS), config)
    args = arguments(folder, GLOBAL_BATCH // config.dp_size, **FEW | changes)
    if muon:
        options = {**options, "optimizers": (Muon(model, lr=1e-2, ns_dtype=torch.float32), None)}
    return EPTrainer(model, args, **data(), **options)


def in_one_process(changes: dict[str, Any], muon: bool = False) -> list[float]:
    model = build(**FOUR_LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, GLOBAL_BATCH, use_cpu=True, **FEW | changes)
        options: dict[str, Any] = {}
        if muon:
            options["optimizers"] = (Muon(model, lr=1e-2, ns_dtype=torch.float32), None)
        return losses(transformers.Trainer(model, args, **data(), **options))


def lean(rank: int, changes: dict[str, Any]) -> tuple[list[float], dict[str, Any], int]:
    """With a chunked loss, selective checkpointing and all meters."""
    load = ExpertLoad()
    options = {"loss_chunk_tokens": 5, "callbacks": [load, Memory(), Speed()]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, options, changes | SELECTIVE)
        made: list[int] = []
        trainer.model.lm_head.register_forward_hook(lambda *call: made.append(call[-1].numel()))
        found = losses(trainer)
    if parallel_state(trainer.model).pipeline.is_last:
        assert set(made) == {1}, "sums of losses, no logits"
    assert load.total_shares is not None
    torch.testing.assert_close(load.total_shares.sum(1), torch.ones(4, dtype=torch.float64))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return found, logs[-1], len(load.layers)


def test_a_chunked_loss_selective_checkpointing_and_meters(
    ranks: RankPool, all_layouts: bool
) -> None:
    for smoothing in (0.1, 0.0) if all_layouts else (0.1,):
        changes = {"label_smoothing_factor": smoothing}
        expected = in_one_process(changes)
        for found, log, layers in ranks.run(lean, changes, world=4, timeout=200):
            assert found == pytest.approx(expected, rel=1e-5)
            assert layers == 4
            assert {"expert_load_max", "peak_memory_gb", "tokens_per_second_per_rank"} <= log.keys()


def with_muon(rank: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return losses(trainer_of(folder, {}, {}, muon=True))


def test_muon_steps_as_one_process(ranks: RankPool) -> None:
    expected = in_one_process({}, muon=True)
    for found in ranks.run(with_muon, world=4, timeout=200):
        assert found == pytest.approx(expected, rel=1e-4)


def balancing() -> BiasBalancing:
    return BiasBalancing(1e-2, rule="proportional")


def balanced(rank: int, stages: tuple[int, ...]) -> tuple[list[float], dict[str, Tensor]]:
    config = DistributedConfig(**dispatching(pp_size=2, fsdp_size=2, ep_size=2), pp_stages=stages)
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, GLOBAL_BATCH // config.dp_size, **FEW)
        model = parallelize(deepseek(sum(stages)), config)
        trainer = EPTrainer(model, args, train_dataset=FILLED_UP, callbacks=[balancing()])
        return losses(trainer), biases(model)


def deepseek(layers: int) -> nn.Module:
    model = build_family(deepseek_v3(num_hidden_layers=layers), torch.float32)
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.zero_()
    return model


# The first layer has no experts: once no stage but the last has a bias, once both have.
@pytest.mark.parametrize("stages", [(1, 1), (2, 1)])
def test_a_bias_is_moved_on_the_stage_that_has_it(ranks: RankPool, stages: tuple[int, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, GLOBAL_BATCH, use_cpu=True, **FEW)
        model = deepseek(sum(stages))
        expected = losses(
            transformers.Trainer(model, args, train_dataset=FILLED_UP, callbacks=[balancing()])
        )
    moved = biases(model)
    seen: dict[str, Tensor] = {}
    for curve, own in ranks.run(balanced, stages, world=4, timeout=200):
        assert curve == pytest.approx(expected, rel=1e-5)
        seen |= own
        for name, bias in own.items():
            torch.testing.assert_close(bias, moved[name], rtol=0, atol=1e-6)
    assert seen.keys() == moved.keys()


def with_z_loss(rank: int, scale: float) -> tuple[list[float], list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, {"router_z_loss_coef": 0.3}, SMOOTHED)
        # As fp16=True has it: accelerate has no float16 on CPU ranks.
        trainer.accelerator.scaler = WorldGradScaler(init_scale=scale)
        return losses(trainer), norms(trainer)


def norms(trainer: transformers.Trainer) -> list[float]:
    return [float(entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def test_scaled_steps_with_the_z_loss_are_those_of_one_process(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, GLOBAL_BATCH, use_cpu=True, **FEW, **SMOOTHED)
        alone = EPTrainer(build(**FOUR_LAYERS), args, **data(), router_z_loss_coef=0.3)
        expected = losses(alone)
    for found, lengths in ranks.run(with_z_loss, 2.0**12, world=4, timeout=200):
        assert found == pytest.approx(expected, rel=1e-5)
        assert lengths == pytest.approx(norms(alone), rel=1e-3)


def overflowing(rank: int, folder: str) -> tuple[list[float], list[bool], dict[str, float]]:
    """In the second step a gradient of one rank overflows. Then resumed from the checkpoint of that step."""
    scales: list[float] = []
    before: list[list[Tensor]] = []
    changes = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 0}
    trainer = trainer_of(folder, {}, changes)
    trainer.accelerator.scaler = scaler = WorldGradScaler(init_scale=2.0**12, growth_interval=2)
    norm = trainer.gradient_norm

    def gradient_norm(model: Any) -> Tensor:
        scales.append(scaler.get_scale())
        before.append([_local(p.detach()).clone() for p in model.parameters()])
        if trainer.state.global_step == 1 and rank == 1:
            next(_local(p.grad) for p in model.parameters()).view(-1)[0] = math.inf
        return norm(model)

    trainer.gradient_norm = gradient_norm
    trainer.train()
    before.append([_local(p.detach()) for p in trainer.model.parameters()])
    moved = [not all(map(torch.equal, a, b)) for a, b in itertools.pairwise(before)]
    again = trainer_of(folder, {}, changes)
    again.accelerator.scaler = WorldGradScaler(growth_interval=2)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return scales, moved, again.accelerator.scaler.state_dict()


def test_stages_skip_an_overflowing_step_together(ranks: RankPool, tmp_path: Path) -> None:
    for scales, moved, resumed in ranks.run(overflowing, str(tmp_path), world=4, timeout=200):
        assert scales == [2.0**12, 2.0**12, 2.0**11]
        assert moved == [True, False, True]
        assert (resumed["scale"], resumed["_growth_tracker"]) == (2.0**11, 1)


def spoiled(rank: int, what: str) -> str:
    """In the second step a weight of the third layer, and so the loss, or its gradient is not finite."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, {}, {})
        if what == "gradient":  # a scale of 1 can't fall, so this is no overflow
            trainer.accelerator.scaler = WorldGradScaler(init_scale=1.0)
        name = "model.layers.2.self_attn.o_proj.weight"
        weight = dict(trainer.model.named_parameters()).get(name)
        run = trainer.training_step
        norm = trainer.gradient_norm

        def training_step(*args: Any, **kwargs: Any) -> Tensor:
            if trainer.state.global_step == 1 and weight is not None and what == "loss":
                _local(weight.detach()).fill_(math.nan)
            return run(*args, **kwargs)

        def gradient_norm(model: Any) -> Tensor:
            if trainer.state.global_step == 1 and weight is not None and what == "gradient":
                _local(weight.grad)[:1].fill_(math.nan)
            return norm(model)

        trainer.training_step, trainer.gradient_norm = training_step, gradient_norm
        with pytest.raises(RuntimeError) as error:
            trainer.train()
        return str(error.value)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_bad_stage_is_named(ranks: RankPool, what: str) -> None:
    texts = ranks.run(spoiled, what, world=4, timeout=200)
    assert len(set(texts)) == 1, "one verdict, and one text of it"
    assert "step 2" in texts[0]
    at = "model.layers.2.self_attn.o_proj"
    if what == "loss":
        assert f"first in the output of {at} (pipeline stage 2, on rank 0, 1)" in texts[0]
    else:
        assert f"first in {at} ({at}.weight, pipeline stage 2, on rank 0, 1)" in texts[0]


def refused(rank: int) -> list[str]:
    texts = []
    alone = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
    options: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"optim_in_backward": True}, alone),
        ({"loss_chunk_tokens": 0}, {}),
    ]
    for given, changes in options:
        with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError) as error:  # noqa: PT011 (the text is given back)
            trainer_of(folder, given, changes)
        texts.append(str(error.value))
    model = parallelize(build(), DistributedConfig(**dispatching(pp_size=2, fsdp_size=2)))
    model.loss_function = None
    with pytest.raises(ValueError, match="chunked loss") as error:
        chunk_loss(model)
    return [*texts, str(error.value)]


def test_what_stages_cannot_do_is_refused_on_all_ranks(ranks: RankPool) -> None:
    found = ranks.run(refused, world=4, timeout=200)
    assert all(texts == found[0] for texts in found)
    words = ("optim_in_backward=True", "at least 1")
    for word, text in zip(words, found[0], strict=False):
        assert word in text
