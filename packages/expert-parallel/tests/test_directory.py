"""A checkpoint directory is replaced whole or not at all."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from expert_parallel.directory import is_weights, replaced_directory


def files(path: Path) -> dict[str, str]:
    return {
        str(found.relative_to(path)): found.read_text()
        for found in path.rglob("*")
        if found.is_file()
    }


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint with weights in two files, a tokenizer, and a sub-directory."""
    path = tmp_path / "checkpoint"
    (path / "runs").mkdir(parents=True)
    for name in (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "runs/events",
    ):
        (path / name).write_text("old")
    return path


def write_new(path: Path) -> None:
    with replaced_directory(path) as folder:
        (folder / "config.json").write_text("new")
        (folder / "model.safetensors").write_text("new")


KEPT = {"tokenizer.json": "old", "runs/events": "old"}
NEW = {"config.json": "new", "model.safetensors": "new"}


def test_new_weights_replace_old_ones_and_other_files_stay(old: Path) -> None:
    write_new(old)
    assert files(old) == NEW | KEPT
    assert [entry.name for entry in old.parent.iterdir()] == ["checkpoint"]


def test_the_same_without_an_exchange_in_one_step(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    write_new(old)
    assert files(old) == NEW | KEPT
    assert [entry.name for entry in old.parent.iterdir()] == ["checkpoint"]


def test_the_same_without_hard_links(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    write_new(old)
    assert files(old) == NEW | KEPT


def write_half(path: Path) -> None:
    with replaced_directory(path) as folder:
        (folder / "model.safetensors").write_text("half")
        raise RuntimeError("broken")


def test_an_error_leaves_the_old_checkpoint(old: Path) -> None:
    before = files(old)
    with pytest.raises(RuntimeError, match="broken"):
        write_half(old)
    assert files(old) == before
    assert [entry.name for entry in old.parent.iterdir()] == ["checkpoint"]


def _killed(path: Path) -> None:
    with replaced_directory(path) as folder:
        (folder / "model.safetensors").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_the_old_checkpoint(old: Path) -> None:
    before = files(old)
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(old,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert files(old) == before
    write_new(old)
    assert files(old) == NEW | KEPT


def test_a_first_checkpoint_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with replaced_directory(path) as folder:
        (folder / "config.json").write_text("new")
        assert not path.exists()
    assert files(path) == {"config.json": "new"}


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with (
        pytest.raises(NotADirectoryError, match="give a directory"),
        replaced_directory(tmp_path / "model"),
    ):
        pass


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model.fp16.safetensors",
        "model-00001-of-00002.safetensors",
        "model.fp16-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "model.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "pytorch_model.bin.index.json",
    ],
)
def test_weights_are_known_by_name(name: str) -> None:
    assert is_weights(name)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.model", "adapter_model.safetensors", "optimizer.bin"]
)
def test_other_files_are_not_weights(name: str) -> None:
    assert not is_weights(name)
