"""Ranks that were given different things, or ask for different things: one verdict, and nobody waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import parallelize
from ep_testing import RankPool
from ep_trainer import EPTrainer
from ep_trainer.checkpoint import checkpoints

TWO = DistributedConfig(fsdp_size=2, ep_size=2)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (index + 11 * torch.arange(4)) % 31
        return {"input_ids": ids, "labels": ids}


def make(folder: str, *calls: Any, rows: int = 16, held_out: int = 4, **changes: Any) -> EPTrainer:
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=32,
            hidden_size=8,
            moe_intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )
    parallelize(model, ParallelMesh(TWO.layout), TWO)
    values: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": False,
        "save_strategy": "no",
    }
    args = transformers.TrainingArguments(folder, **values | changes)
    return EPTrainer(
        model, args, train_dataset=Rows(rows), eval_dataset=Rows(held_out), callbacks=[*calls]
    )


def said(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a call raises."""
    try:
        call(*args, **kwargs)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


SAVING = {"save_strategy": "steps", "save_steps": 2}


def given(rank: int, folder: str) -> dict[str, str]:
    Path(folder, str(rank)).mkdir()
    make(folder, **SAVING).train()
    other = f"{folder}/other"
    make(other, max_steps=2, rows=12, **SAVING).train()
    resume = make(folder).train
    os.chdir(f"{folder}/{rank}")
    found = {
        "rows": said(make(folder, rows=16 if rank else 12).train),
        "held out": said(make(folder, held_out=24 if rank else 4).evaluate),
        "step": said(resume, resume_from_checkpoint=f"{folder}/checkpoint-{4 if rank else 2}"),
        "one alone": said(resume, resume_from_checkpoint=True if rank else None),
        "run": said(resume, resume_from_checkpoint=f"{other if rank else folder}/checkpoint-2"),
        "directory": said(make("here", max_steps=2, **SAVING).train),
    }
    dist.barrier()
    os.chdir(folder)
    return found


def test_what_ranks_are_given_is_compared(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(given, str(tmp_path), world=2, timeout=60):
        assert "number of batches of train_dataset: on rank 0 3, on rank 1 4" in found["rows"]
        assert "the dataset to evaluate on: on rank 0 1, on rank 1 2" in found["held out"]
        assert "on rank 0 checkpoint-2, on rank 1 checkpoint-4" in found["step"]
        assert "on rank 0 None, on rank 1 True" in found["one alone"]
        assert "rank 1 that of step 2 in" in found["run"]
        assert "rank 0 does not see" in found["directory"]
        assert "all ranks must see one file system" in found["directory"]
    assert not list(checkpoints(tmp_path / "0" / "here"))


def at_construction(rank: int, folder: str) -> tuple[str, str]:
    def no_hub(self: Any, *args: Any) -> None:
        if rank == 0:
            raise OSError("no such repository")

    trainer = make(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.Trainer, "init_hf_repo", no_hub)
        hub = said(make, folder, push_to_hub=True)
    return hub, said(EPTrainer, None, trainer.args, model_init=lambda: trainer.model)


def test_what_fails_on_the_first_rank_alone(ranks: RankPool, tmp_path: Path) -> None:
    for hub, model_init in ranks.run(at_construction, str(tmp_path), world=2, timeout=60):
        assert "no such repository" in hub
        assert "model_init (and so hyperparameter_search) does not work" in model_init


class Asks(transformers.TrainerCallback):
    """Rank 1 alone asks for something, as one that looks at the clock would."""

    def __init__(self, rank: int, when: str, asked: str) -> None:
        self.rank, self.asked = rank, asked
        setattr(self, when, self.ask)

    def ask(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.rank == 1 and state.global_step == 2:
            setattr(control, self.asked, True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replaced, or nothing."""


def asked(rank: int, folder: str) -> list[tuple[int, list[int]]]:
    ends = []
    for number, (when, what) in enumerate(
        [
            ("on_step_end", "should_save"),
            ("on_log", "should_training_stop"),
            ("on_substep_end", "should_training_stop"),
            ("on_step_begin", "should_epoch_stop"),
        ]
    ):
        run = f"{folder}/{number}"
        trainer = make(run, Asks(rank, when, what), logging_steps=1, gradient_accumulation_steps=2)
        trainer.train()
        ends.append((trainer.state.global_step, [step for step, _ in checkpoints(Path(run))]))
    return ends


def test_what_one_rank_asks_for_is_done_by_all(ranks: RankPool, tmp_path: Path) -> None:
    for ends in ranks.run(asked, str(tmp_path), world=2, timeout=60):
        assert ends == [(4, [2]), (2, []), (2, []), (2, [])]
