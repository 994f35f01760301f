"""The law of resuming: a run that is stopped and goes on, in any layout, is the run that isn't.

Each layout trains once and saves on the way; from there every layout goes on, and its losses are
those of the run that went on by itself. The model that resumes begins with other weights, so all
that it has comes out of the checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from dispatching import dispatching
from test_trainer import GLOBAL_BATCH, Sentences, arguments, build
from torch.distributed.tensor import DTensor

from ep_mesh import DistributedConfig
from ep_testing import RankPool
from ep_trainer import CheckpointError, EPTrainer
from ep_trainer.checkpoint import Contents, SafetensorsReader
from ep_trainer.checkpoint.manifest import section
from ep_trainer.checkpoint.planner import local_of
from ep_trainer.checkpoint.state import model_tensors, optimizer_state, tensor_names
from expert_parallel import parallelize

STEPS = 6
# Inside the first epoch; and inside the second one, whose order is another.
SAVED = (1, 4)
# Two steps of two micro-batches, and one of a micro-batch of 4 samples that is filled up.
SAMPLES = 36
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp8": dispatching(tp_size=8, ep_size=8),
    "tp4-fsdp2": dispatching(tp_size=4, fsdp_size=2, ep_size=4),
    "tp2-fsdp4": dispatching(tp_size=2, fsdp_size=4, ep_size=4),
    "fsdp8": dispatching(fsdp_size=8, ep_size=8),
    "hsdp": dispatching(tp_size=2, fsdp_size=2, dp_replicate_size=2, ep_size=4),
    "pp2-tp2-fsdp2": dispatching(pp_size=2, tp_size=2, fsdp_size=2, ep_size=4),
    "one": {},
}
# On fewer ranks, of a model with more layers, so that a rank has two stages, and tied embeddings.
DEEP = {"num_hidden_layers": 4, "tie_word_embeddings": True}
SMALL: dict[str, dict[str, Any]] = {
    "deep-interleaved": dispatching(
        pp_size=2, fsdp_size=2, ep_size=2, pp_schedule="interleaved_1f1b"
    ),
    "deep-tp2-fsdp2": dispatching(tp_size=2, fsdp_size=2, ep_size=4),
    "deep-pp2-tp2": dispatching(pp_size=2, tp_size=2, ep_size=2),
    "deep-zero-bubble": dispatching(pp_size=2, tp_size=2, ep_size=2, pp_schedule="zero_bubble"),
    "deep-one": {},
}
SAMPLE = [
    ("tp2-fsdp4", "tp2-fsdp4", 1),
    ("tp2-fsdp4", "tp8", 4),
    ("tp2-fsdp4", "one", 1),
    ("one", "hsdp", 1),
    ("one", "fsdp8", 4),
    ("deep-interleaved", "deep-interleaved", 1),
    ("deep-interleaved", "deep-tp2-fsdp2", 4),
    ("deep-tp2-fsdp2", "deep-interleaved", 1),
]


@dataclasses.dataclass(frozen=True)
class Run:
    """The losses and gradient norms by step, and a fingerprint of all weights on this rank.

    Also the bytes that it read to resume, and those of model and optimizer that it holds.
    """

    loss: dict[int, float]
    norm: dict[int, float]
    weights: tuple[bytes, ...]
    read: int
    held: int


class SaveAt(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step in SAVED


def train(
    rank: int,
    layout: str,
    folder: str,
    resume: str | None = None,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
) -> Run:
    config = DistributedConfig(**sizes_of(layout))
    model = build(**DEEP) if layout in SMALL else build()
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(seed))
    values = {"max_steps": STEPS, "logging_steps": 1, "use_cpu": True} | (changes or {})
    args = arguments(folder, GLOBAL_BATCH // config.dp_size, **values)
    trainer = EPTrainer(
        parallelize(model, config),
        args,
        train_dataset=Sentences(SAMPLES),
        callbacks=[] if resume else [SaveAt()],
    )
    with bytes_read() as readers:
        trainer.train(resume_from_checkpoint=resume)
    tensors = model_tensors(trainer.model)
    names = {id(tensor): name for name, tensor in tensors.items()}
    moments = optimizer_state(trainer.optimizer.optimizer, names).tensors
    first = int(resume.rpartition("-")[2]) if resume else 0
    logs = [e for e in trainer.state.log_history if "loss" in e and e["step"] > first]
    return Run(
        {entry["step"]: entry["loss"] for entry in logs},
        {entry["step"]: float(entry["grad_norm"]) for entry in logs},
        tuple(_bytes(parameter) for parameter in model.parameters()),
        read=sum(reader.bytes_read for reader in readers),
        held=sum(local_of(tensor).nbytes for tensor in (*tensors.values(), *moments.values())),
    )


@contextlib.contextmanager
def bytes_read() -> Iterator[list[SafetensorsReader]]:
    """The readers that read something meanwhile."""
    readers, read = [], SafetensorsReader.read_data

    def noted(self: SafetensorsReader, *args: Any) -> Any:
        readers.append(self)
        return read(self, *args)

    with mock.patch.object(SafetensorsReader, "read_data", noted):
        yield readers


def _bytes(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().numpy().tobytes()


def sizes_of(layout: str) -> dict[str, Any]:
    return (LAYOUTS | SMALL)[layout]


def world(layout: str) -> int:
    return DistributedConfig(**sizes_of(layout)).layout.world_size


def cases(whole: bool) -> list[tuple[str, str, int]]:
    if not whole:
        return SAMPLE
    return [(a, b, step) for of in (LAYOUTS, SMALL) for a in of for b in of for step in SAVED]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "source" in metafunc.fixturenames:
        chosen = cases(metafunc.config.getoption("--all-layouts"))
        metafunc.parametrize(("source", "target", "step"), chosen)


@pytest.fixture(scope="module")
def saved(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, list[Run]]]:
    """The directory and the runs of a layout that was trained once, without interruption."""

    @functools.cache
    def run(layout: str) -> tuple[Path, list[Run]]:
        folder = tmp_path_factory.mktemp(layout)
        return folder, ranks.run(train, layout, str(folder), world=world(layout), timeout=240)

    return run


def test_a_resumed_run_is_the_uninterrupted_one(
    ranks: RankPool,
    saved: Callable[[str], tuple[Path, list[Run]]],
    source: str,
    target: str,
    step: int,
) -> None:
    folder, expected = saved(source)
    checkpoint = str(folder / f"checkpoint-{step}")
    found = ranks.run(train, target, str(folder), checkpoint, 1, world=world(target), timeout=240)
    for rank, run in enumerate(found):
        after = {step: loss for step, loss in expected[0].loss.items() if step in run.loss}
        assert sorted(run.loss) == list(range(step + 1, STEPS + 1))
        if source == target:
            assert run.loss == {step: expected[rank].loss[step] for step in run.loss}
            assert run.weights == expected[rank].weights
        else:
            assert run.loss == pytest.approx(after, rel=1e-6)
        assert run.read == run.held, "a rank reads its own shards, each once"
    sections = [
        SafetensorsReader(section(Path(checkpoint), name)) for name in ("model", "optimizer")
    ]
    whole = sum(chunk.nbytes for each in sections for chunk in each.chunks.values())
    # Each replica reads once; what is more is what its ranks hold alike: norms, routers, copied heads.
    share = whole * sizes_of(target).get("dp_replicate_size", 1) / len(found)
    assert max(run.read for run in found) <= 1.1 * share


def stages(folder: str, layers: int, **changes: Any) -> EPTrainer:
    config = DistributedConfig(**dispatching(pp_size=2))
    model = parallelize(build(num_hidden_layers=layers, tie_word_embeddings=True), config)
    values = {"max_steps": 3, "logging_steps": 1, "save_steps": 1, "save_strategy": "steps"}
    return EPTrainer(
        model,
        arguments(folder, GLOBAL_BATCH, **values | changes),
        train_dataset=Sentences(SAMPLES),
        eval_dataset=Sentences(8, seed=9),
    )


def best_and_refused(rank: int, folder: str) -> tuple[dict[str, float], float, list[str]]:
    """The evaluations of a run that ends with its best model, that model's, and two errors."""
    # Such steps that the loss soon rises.
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    trainer = stages(folder, 4, learning_rate=0.5, **best)
    trainer.train()
    evaluated = {
        f"checkpoint-{entry['step']}": entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
    texts = []
    for layers in (2, 6):
        with pytest.raises(CheckpointError) as error:
            stages(folder, layers).train(resume_from_checkpoint=True)
        texts.append(str(error.value))
    whole = model_tensors(trainer.model)
    whole.pop(max(whole))  # as if a stage had forgotten it
    with (
        pytest.raises(CheckpointError) as error,
        trainer.checkpointer.preparing(Path(folder, "new")),
    ):
        trainer.checkpointer.save(
            Path(folder, "new"),
            lambda: Contents(
                {"model": whole}, expected={"model": tensor_names(trainer.model, whole)}
            ),
            trainer._manifest(),
            in_background=False,
        )
    return evaluated, trainer.evaluate()["eval_loss"], [*texts, str(error.value)]


def test_the_best_model_of_stages_and_what_is_not_whole(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(best_and_refused, str(tmp_path), world=2, timeout=120)
    for evaluated, at_end, (fewer, more, forgotten) in found:
        assert at_end == pytest.approx(min(evaluated.values()), rel=1e-6)
        assert at_end < list(evaluated.values())[-1], "another than the last"
        assert "model.layers.2." in fewer
        assert "that Qwen3MoeForCausalLM has not" in fewer
        assert "model.layers.4." in more
        assert "on no rank" in forgotten
