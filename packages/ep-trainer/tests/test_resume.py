"""A run that is stopped, by itself or by a signal, goes on as if it weren't. The matrix of layouts is
in `integration_tests`; here a model with buffers and dropout on two ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.trainer_callback import ExportableState

from ep_mesh import DistributedConfig, Layout, ParallelMesh
from ep_plans import parallelize
from ep_testing import RankPool
from ep_trainer import CheckpointError, CheckpointOptions, EPTrainer
from ep_trainer.checkpoint import check_checkpoint, checkpoints
from ep_trainer.checkpoint.position import Position
from ep_trainer.checkpoint.preemption import StopSignals

TWO = DistributedConfig(fsdp_size=2, ep_size=2)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Row i begins with the token i + 1, others follow; the labels are the tokens."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.size:
            raise IndexError(index)  # what ends `for row in rows`
        ids = (index + 7 * index * torch.arange(6) + 11 * torch.arange(6)) % 63 + 1
        return {"input_ids": ids, "labels": ids}


class Counter(transformers.TrainerCallback, ExportableState):
    """A callback with state of its own."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"steps": self.steps}, "attributes": {}}


class Load:
    """Something that is registered: tensors and a plain value."""

    def __init__(self) -> None:
        self.counts, self.name = torch.zeros(3), "fresh"

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "name": self.name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts, self.name = state_dict["counts"], state_dict["name"]


def model(fill: int = 0) -> nn.Module:
    torch.manual_seed(0)
    made = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=4,
            num_experts=8,
            num_experts_per_tok=2,
            attention_dropout=0.1,
        )
    )
    # As a balancing bias: a buffer that training changes.
    made.model.layers[0].mlp.gate.register_buffer("e_score_correction_bias", torch.zeros(8))
    parallelize(made, ParallelMesh(TWO.layout), TWO)
    if fill:
        with torch.no_grad():
            for tensor in made.state_dict().values():
                tensor.fill_(fill)
    return made


class Biased(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].model.layers[0].mlp.gate.e_score_correction_bias.add_(1)


def make(folder: str, fill: int = 0, *calls: Any, **changes: Any) -> EPTrainer:
    options, kind = changes.pop("checkpoint_options", None), changes.pop("kind", EPTrainer)
    values: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": False,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-2,
        "restore_callback_states_from_checkpoint": True,
    }
    args = transformers.TrainingArguments(folder, **values | changes)
    return kind(
        model(fill),
        args,
        train_dataset=Rows(16),
        eval_dataset=Rows(8),
        callbacks=[Counter(), Biased(), *calls],
        checkpoint_options=options,
    )


def outcome(trainer: EPTrainer) -> dict[str, Any]:
    assert trainer.model is not None
    state = trainer.model.state_dict()
    return {
        "loss": {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e},
        "weights": {name: _local(tensor) for name, tensor in state.items()},
        "steps": [c.steps for c in trainer.callback_handler.callbacks if isinstance(c, Counter)],
        "stalls": trainer.save_stalls,
    }


def _local(tensor: Tensor) -> list[float]:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).flatten().tolist()


def whole_and_resumed(rank: int, folder: str, options: CheckpointOptions) -> tuple[Any, ...]:
    whole = make(folder, checkpoint_options=options)
    load = Load()
    load.counts += 3
    load.name = "trained"
    whole.register_for_checkpoint("load", load)
    whole.train()
    expected = outcome(whole)
    kept = sorted(path.name for path in Path(folder).iterdir())
    resumed = make(folder, 7, save_strategy="no")
    resumed.register_for_checkpoint("load", fresh := Load())
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return expected, outcome(resumed), (fresh.counts.tolist(), fresh.name), kept


@pytest.mark.parametrize("in_background", [True, False])
def test_a_resumed_run_is_bitwise_the_same(
    ranks: RankPool, tmp_path: Path, in_background: bool
) -> None:
    options = CheckpointOptions(async_save=in_background)
    for expected, found, load, kept in ranks.run(
        whole_and_resumed, str(tmp_path), options, world=2, timeout=120
    ):
        assert kept == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
        assert found["loss"] == expected["loss"]
        assert found["weights"] == expected["weights"]
        (bias,) = (v for k, v in found["weights"].items() if "e_score_correction_bias" in k)
        assert bias == [6.0] * 8
        assert found["steps"] == [6]
        assert load == ([3.0] * 3, "trained")
        assert len(expected["stalls"]) == 3
    for _, folder in checkpoints(tmp_path):
        manifest = check_checkpoint(folder, values=True)
        assert Layout(**manifest.layout) == Layout(fsdp=2, ep=2)
        assert set(manifest.sections) == {"model", "optimizer", "extra"}


def finished(rank: int, folder: str) -> tuple[Any, ...]:
    make(folder).train()  # six steps, which end within the second epoch
    ends = []
    for steps in (6, 5):
        again = make(folder, 7, max_steps=steps)
        again.train(resume_from_checkpoint="auto")
        ends.append((again.state.global_step, outcome(again)["steps"]))
    return ends, sorted(path.name for path in Path(folder).iterdir())


def test_a_finished_run_that_is_resumed_does_nothing(ranks: RankPool, tmp_path: Path) -> None:
    for ends, kept in ranks.run(finished, str(tmp_path), world=2, timeout=60):
        assert ends == [(6, [6]), (6, [6])]
        assert kept == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


class Seen(EPTrainer):
    """Notes the rows of each batch."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.rows = [*getattr(self, "rows", []), (inputs["input_ids"][:, 0] - 1).tolist()]
        return super().training_step(model, inputs, *args, **kwargs)


def orders(rank: int, folder: str, changes: dict[str, Any], batch: int) -> list[list[int]]:
    """The rows by batch, from the second epoch's second step on: whole, resumed, other batches."""
    found = []
    whole = make(folder, kind=Seen, max_steps=10, save_steps=6, **changes)
    whole.train()
    found.append([row for rows in whole.rows[6:] for row in rows])
    for size in (2, batch):
        resumed = make(
            folder,
            kind=Seen,
            max_steps=6 + 4 * 2 // size,
            save_strategy="no",
            per_device_train_batch_size=size,
            **changes,
        )
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-6")
        found.append([row for rows in resumed.rows for row in rows])
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"train_sampling_strategy": "group_by_length"},
        {"train_sampling_strategy": "batch_rebalance", "dataloader_drop_last": True},
    ],
    ids=str,
)
def test_the_samples_go_on_in_the_same_order(
    ranks: RankPool, tmp_path: Path, changes: dict[str, Any]
) -> None:
    found = ranks.run(orders, str(tmp_path), changes, 1, world=2, timeout=120)
    for whole, resumed, _ in found:
        assert resumed == whole
    # Half the batch: the same samples in the same order, over both ranks.
    first, other = ([rank[which] for rank in found] for which in (0, 2))
    if "train_sampling_strategy" not in changes:  # which orders whole batches
        assert _joined(other, 1)[:8] == _joined(first, 2)[:8]


def _joined(ranks: list[list[int]], size: int) -> list[int]:
    starts = range(0, len(ranks[0]), size)
    return [row for start in starts for rows in ranks for row in rows[start : start + size]]


class Signal(transformers.TrainerCallback):
    """Rank 1 alone is asked to stop, in its third step."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.rank == 1 and state.global_step == 2:
            os.kill(os.getpid(), self.number)


def preempted(rank: int, folder: str) -> tuple[Any, ...]:
    # An evaluation decides about saving at each step, and finds nothing good enough.
    best = {
        "save_strategy": "best",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "nothing",
        "greater_is_better": True,
    }
    at = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        before = signal.getsignal(number)
        stopped = make(f"{folder}/{number}", 0, Signal(rank, number), **best)
        stopped.compute_metrics = lambda output: {"nothing": 0.0}
        stopped.train()
        assert signal.getsignal(number) is before
        at.append(stopped.state.global_step)
    resumed = make(f"{folder}/{number}", 7, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    whole = make(folder, save_strategy="no")
    whole.train()
    return at, outcome(resumed), outcome(whole)


def test_a_signal_to_one_rank_saves_and_stops_all(ranks: RankPool, tmp_path: Path) -> None:
    for at, resumed, whole in ranks.run(preempted, str(tmp_path), world=2, timeout=120):
        assert at == [4, 4], "the step after the one in which the signal came"
        assert resumed["loss"] == whole["loss"]
        assert resumed["weights"] == whole["weights"]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        check_checkpoint(tmp_path / str(number) / "checkpoint-4", values=True)


def test_signals_are_names() -> None:
    with pytest.raises(ValueError, match="SIGNONE"):
        CheckpointOptions(stop_signals=("SIGNONE",))
    with pytest.raises(ValueError, match=r"SIGKILL .* use SIGTERM"):
        CheckpointOptions(stop_signals=("SIGKILL",))
    assert StopSignals((), None).agreed() is False


def best(rank: int, folder: str, only_model: bool) -> tuple[Any, ...]:
    changes: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "save_total_limit": 1,
        "save_only_model": only_model,
        # Later steps only make it worse.
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
    }
    with pytest.MonkeyPatch.context() as patch:
        # Writing for plain use is `expert_parallel`'s.
        patch.setattr(transformers.PreTrainedModel, "save_pretrained", lambda *args: None)
        patch.setattr("ep_trainer.trainer.check_saves", lambda model: None)
        trainer = make(folder, 0, Worsening(), **changes)
        trainer.train()
    best_loss = trainer.state.best_metric
    found = best_loss, trainer.evaluate()["eval_loss"], trainer.state.best_global_step
    if only_model:
        resumed = make(folder, 7, save_strategy="no")
        with pytest.raises(CheckpointError, match="checkpoint-2 holds the model only"):
            resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return found


class Worsening(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 2:
            with torch.no_grad():
                for parameter in kwargs["model"].parameters():
                    parameter.mul_(30)


@pytest.mark.parametrize("only_model", [False, True])
def test_the_best_model_is_loaded_at_the_end(
    ranks: RankPool, tmp_path: Path, only_model: bool
) -> None:
    for metric, found, step in ranks.run(best, str(tmp_path), only_model, world=2, timeout=120):
        assert step == 2
        assert found == metric
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def refused(rank: int, folder: str) -> list[str]:
    make(folder, max_steps=2).train()
    said = []

    def tell(**given: Any) -> None:
        trainer = make(folder, 7, save_strategy="no", **given)
        with pytest.raises(CheckpointError) as caught:
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        said.append(str(caught.value))
        assert trainer.model is not None
        if "optim" in given:  # known only when the optimizer is made, after the model
            return
        assert all(bool((p == 7).all()) for p in map(_tensor, trainer.model.parameters()))

    def _tensor(tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    tell(per_device_train_batch_size=3)
    tell(seed=5)
    tell(optim="sgd")
    if rank == 0:
        path = next(Path(f"{folder}/checkpoint-2/sharded/optimizer").glob("*-00001.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    torch.distributed.barrier()
    tell()
    with pytest.raises(CheckpointError) as caught:
        make(f"{folder}/empty", 7).train(resume_from_checkpoint=True)
    said.append(str(caught.value))
    return said


def test_what_cannot_be_resumed_is_refused_by_all_before_anything_changes(
    ranks: RankPool, tmp_path: Path
) -> None:
    for batch, seed, optimizer, damage, none in ranks.run(
        refused, str(tmp_path), world=2, timeout=120
    ):
        assert "after 8 samples of an epoch, which is inside a step of 6 samples" in batch
        assert "drawn from the seed 42, here it is 5: set data_seed=42" in seed
        assert "of another kind than SGD: it has the options amsgrad, betas, " in optimizer
        assert "rank-00001.safetensors is damaged: the values of " in damage
        assert "holds no complete checkpoint" in none


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "expected"), [(8, 2, (1, 4)), (4, 1, (1, 8)), (32, 1, (1, 1))]
)
def test_a_position_is_told_in_the_batches_of_the_resuming_run(
    micro_batch: int, accumulation: int, expected: tuple[int, int]
) -> None:
    start = Position(0, 0, 100, 3)
    assert Position(1, 32, 100, 3).steps(micro_batch, accumulation, start) == expected
