"""The last complete checkpoint survives whatever happens, and nothing half is taken for one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_testing import RankPool
from ep_trainer.checkpoint import (
    Checkpointer,
    CheckpointError,
    Contents,
    Manifest,
    check_checkpoint,
    checkpoints,
    read_manifest,
)
from ep_trainer.checkpoint import checkpointer as module
from ep_trainer.checkpoint.manifest import MANIFEST, is_complete, rotate, tidy


def manifest(step: int) -> Manifest:
    return Manifest(step, {"tp": 1}, 1, (), {}, {"torch": "2"})


def state(step: int) -> dict[str, Tensor]:
    return {"w": torch.full((5, 3), float(step)), "b": torch.full((7,), float(step))}


def write(run: Path, step: int, saver: Checkpointer | None = None, **changes: Any) -> Path:
    folder = run / f"checkpoint-{step}"
    saver = saver or Checkpointer()
    with saver.preparing(folder) as new:
        if saver.is_first:
            (new / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    tensors = state(step)
    contents = Contents({"model": tensors, "optimizer": {"w.exp_avg": tensors["w"]}})
    saver.save(folder, lambda: contents, manifest(step), in_background=False, **changes)
    return folder


def value_of(folder: Path) -> float:
    found = {name: torch.empty_like(tensor) for name, tensor in state(0).items()}
    Checkpointer().load(folder, {"model": found})
    (value,) = {*found["w"].flatten().tolist(), *found["b"].tolist()}
    return float(value)


def killed_at(call: int, run: Path, step: int) -> None:
    """Save, and die just before the given call that changes the disk for good."""
    calls = 0

    def counted(original: Any) -> Any:
        def run_it(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return run_it

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    write(run, step)
    os._exit(0)


@pytest.mark.parametrize("step", [2, 1], ids=["a further one", "the same one again"])
def test_a_run_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path, step: int) -> None:
    fork = multiprocessing.get_context("fork")
    ends = []
    for call in range(1, 200):
        run = tmp_path / str(call)
        write(run, 1)
        child = fork.Process(target=killed_at, args=(call, run, step))
        child.start()
        child.join()
        ends.append(child.exitcode)
        tidy(run)
        found = list(checkpoints(run))
        assert found, f"no complete checkpoint after call {call}"
        for number, folder in found:
            check_checkpoint(folder, values=True)
            assert value_of(folder) == number
        # No half one under a name that would be taken for a checkpoint.
        assert all(is_complete(path) for path in run.glob("checkpoint-*"))
        if child.exitcode == 0:
            assert [number for number, _ in found] == ([2, 1] if step == 2 else [1])
            break
    assert ends[-1] == 0
    assert len(ends) > 10, "it was killed at many moments"
    assert set(ends[:-1]) == {-signal.SIGKILL}


def test_a_directory_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    (folder / MANIFEST).unlink()
    assert not list(checkpoints(tmp_path))
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing, .* from_pretrained"):
        read_manifest(folder)
    with pytest.raises(CheckpointError, match="no directory"):
        read_manifest(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "another"}, "another program"),
        ({"version": 0}, "version 0 of the format, this package reads 1"),
        ({"crc32": 1}, "checksum differs"),
        ({"content": None}, "is damaged"),
    ],
)
def test_a_foreign_or_damaged_manifest_is_told(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = write(tmp_path, 3)
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=rf"manifest\.json .*{words}"):
        check_checkpoint(folder, values=False)
    assert not is_complete(folder)


def test_a_damaged_small_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is damaged"):
        check_checkpoint(folder, values=False)
    (folder / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is missing"):
        check_checkpoint(folder, values=False)


def test_rotation_keeps_the_newest_and_the_best_and_counts_complete_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write(tmp_path, step)
    foreign = tmp_path / "checkpoint-99"
    foreign.mkdir()
    best = str(tmp_path / "checkpoint-1")
    assert rotate(tmp_path, None, None) == []
    assert [path.name for path in rotate(tmp_path, 3, best)] == ["checkpoint-2"]
    assert [path.name for path in rotate(tmp_path, 1, best)] == ["checkpoint-3"]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-10",
        "checkpoint-99",
    ]
    assert [path.name for path in rotate(tmp_path, 1, None)] == ["checkpoint-1"]
    assert rotate(tmp_path, 1, None) == [], "never the only complete one"


# -- two ranks


def fails_in_background(rank: int, folder: str) -> list[str]:
    saver, run = Checkpointer(), Path(folder)
    write(run, 1, saver)
    original, said = module.SafetensorsWriter.write_data, []

    def full(self: Any, *args: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return original(self, *args)

    module.SafetensorsWriter.write_data = full  # type: ignore[method-assign, assignment]
    try:
        path = run / "checkpoint-2"
        with saver.preparing(path):
            pass
        contents = Contents({"model": state(2)})
        saver.save(path, lambda: contents, manifest(2), in_background=True)
        with pytest.raises((CheckpointError, OSError)) as caught, saver.preparing(path):
            pass
        said.append(str(caught.value))
    finally:
        module.SafetensorsWriter.write_data = original  # type: ignore[method-assign]
    write(run, 3, saver)
    return said


def test_a_failed_write_is_raised_on_all_ranks_by_the_next_save(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, second = ranks.run(fails_in_background, str(tmp_path), world=2)
    assert "failed on rank 1: OSError" in first[0]
    assert "No space left on device" in first[0]
    assert "No space left on device" in second[0]
    assert [step for step, _ in checkpoints(tmp_path)] == [3, 1]
    assert not list(tmp_path.glob(".checkpoint-*"))


def staged(rank: int, folder: str) -> None:
    saver, path = Checkpointer(), Path(folder) / "checkpoint-5"
    tensors = state(5)
    with saver.preparing(path):
        pass
    saver.save(path, lambda: Contents({"model": tensors}), manifest(5), in_background=True)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))  # training goes on
    saver.wait()


def test_what_is_written_later_is_the_state_of_the_save(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(staged, str(tmp_path), world=2)
    check_checkpoint(tmp_path / "checkpoint-5", values=True)
    assert value_of(tmp_path / "checkpoint-5") == 5
