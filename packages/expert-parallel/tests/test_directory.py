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


@pytest.fixture(
    params=[
        "mount point",
        "holds a mount point",
        "bind mount",
        "parent",
        "sticky",
        "working directory",
    ]
)
def staying(request: pytest.FixtureRequest, old: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint directory that can't be exchanged for another one."""
    from expert_parallel import directory

    access, mounts = os.access, {"mount point": old, "holds a mount point": old / "runs"}
    if request.param in mounts:
        monkeypatch.setattr(os.path, "ismount", lambda path: path == mounts[request.param])
    elif request.param == "bind mount":
        monkeypatch.setattr(directory, "_mount_points", lambda: {str(old)})
    elif request.param == "parent":
        monkeypatch.setattr(
            os, "access", lambda path, mode: path != old.parent and access(path, mode)
        )
    elif request.param == "sticky":
        old.parent.chmod(0o1777)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        monkeypatch.chdir(old)
    return old


def test_a_directory_that_must_stay_is_filled_by_file(staying: Path) -> None:
    before = staying.stat().st_ino
    write_new(staying)
    assert files(staying) == NEW | KEPT
    assert staying.stat().st_ino == before
    assert {entry.name for entry in staying.iterdir()} == {*NEW, "tokenizer.json", "runs"}
    assert [entry.name for entry in staying.parent.iterdir()] == ["checkpoint"]


def test_an_error_leaves_the_old_checkpoint_in_a_directory_that_must_stay(staying: Path) -> None:
    before = files(staying)
    with pytest.raises(RuntimeError, match="broken"):
        write_half(staying)
    assert files(staying) == before
    assert {entry.name for entry in staying.iterdir()} == {name.split("/")[0] for name in before}


def test_the_working_directory_can_be_named_by_a_dot(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(old)
    write_new(Path())
    assert Path.cwd() == old
    assert files(Path()) == NEW | KEPT


def write_all(path: Path, names: list[str]) -> None:
    with replaced_directory(path) as folder:
        for name in names:
            (folder / name).write_text("new")


@pytest.mark.parametrize("moved", range(4))
def test_an_interrupted_move_loses_no_new_file(
    old: Path, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [
        "model-00001-of-00001.safetensors",
        "generation_config.json",
        "model.safetensors.index.json",
        "config.json",
    ]
    replace, called = os.replace, 0

    def interrupted(source: Path, target: Path) -> None:
        nonlocal called
        if called == moved:
            raise OSError("no more")
        called += 1
        replace(source, target)

    monkeypatch.chdir(old)
    monkeypatch.setattr(os, "replace", interrupted)
    before = files(old)
    with pytest.raises(OSError, match="no more"):
        write_all(old, sorted(order))
    (rest,) = old.glob(".saving-*")
    assert files(rest) == dict.fromkeys(order[moved:], "new")
    found = {name: text for name, text in files(old).items() if not name.startswith(".")}
    assert found == before | dict.fromkeys(order[:moved], "new")


def test_a_mount_point_of_the_same_file_system_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from expert_parallel.directory import _mount_points

    line = rb"36 35 98:0 /some /mnt/a\040b\134c rw,noatime master:1 - ext3 /dev/root rw"
    monkeypatch.setattr(Path, "read_bytes", lambda _: line + b"\n")
    assert _mount_points() == {"/mnt/a b\\c"}


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
