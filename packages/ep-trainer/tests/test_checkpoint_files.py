"""The last complete checkpoint survives whatever happens, and nothing half is taken for one."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_testing import RankPool
from ep_trainer.checkpoint import (
    BoxSavePlanner,
    Checkpointer,
    CheckpointError,
    Contents,
    Manifest,
    SafetensorsWriter,
    check_checkpoint,
    checkpoints,
    locking,
    offline,
    read_manifest,
)
from ep_trainer.checkpoint.locking import sole_run
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
    write(tmp_path / "before", 1)
    for call in range(1, 200):
        run = tmp_path / str(call)
        shutil.copytree(tmp_path / "before", run)
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
    held = write(tmp_path, 4)
    with pytest.raises(CheckpointError, match=f"holds some: give one of {held}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "another"}, "another program"),
        ({"version": 0}, "version 0 of the format, this package reads 1"),
        ({"version": 2, "content": None}, "version 2 of the format"),
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


def test_the_model_for_plain_use_is_copied_and_may_be_written_anew(tmp_path: Path) -> None:
    saver, folder = Checkpointer(), tmp_path / "checkpoint-1"
    plain = ("model.safetensors.index.json", "model-00001-of-00002.safetensors")
    with saver.preparing(folder) as new:
        for name in plain:
            (new / name).write_text("old")
    contents = Contents({"model": state(1)})
    saver.save(folder, lambda: contents, manifest(1), in_background=False)
    offline.reshard(folder, tmp_path / "checkpoint-2", files=2)
    for copy in (folder, tmp_path / "checkpoint-2"):
        for name in plain:
            assert (copy / name).read_text() == "old"
            (copy / name).unlink()
        (copy / plain[0]).write_text("by an export")
        check_checkpoint(copy, values=True)


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


def test_rotation_leaves_what_another_run_has_written(tmp_path: Path) -> None:
    for step in (2, 4, 500):
        write(tmp_path, step)
    assert [path.name for path in rotate(tmp_path, 1, None, until=4)] == ["checkpoint-2"]
    assert [step for step, _ in checkpoints(tmp_path)] == [500, 4]
    write(tmp_path, 2)
    best = str(tmp_path / "checkpoint-2")
    deleted = rotate(tmp_path, 1, best, until=4, keep_newest=False)
    assert [path.name for path in deleted] == ["checkpoint-4"]


def test_what_is_in_a_checkpoints_place_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.write_text("a file")
    write(tmp_path, 1)
    assert (tmp_path / "checkpoint-1.before").read_text() == "a file"
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes").write_text("a directory")
    write(tmp_path, 1)
    assert (tmp_path / "checkpoint-1.before1" / "notes").read_text() == "a directory"
    # Links: to a checkpoint that was moved, and to nothing.
    folder.rename(tmp_path / "moved")
    folder.symlink_to("moved")
    write(tmp_path, 1)
    assert not folder.is_symlink()
    check_checkpoint(tmp_path / "moved", values=True)
    (tmp_path / "checkpoint-0").symlink_to("moved")
    assert [path.name for path in rotate(tmp_path, 1, None)] == ["checkpoint-0"]
    (tmp_path / "checkpoint-2").symlink_to("nowhere")
    write(tmp_path, 2)
    check_checkpoint(tmp_path / "moved", values=True)
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 1]
    assert not list(tmp_path.glob(".checkpoint*"))


def test_what_others_write_beside_checkpoints_is_not_tidied_away(tmp_path: Path) -> None:
    for name in (".checkpoint-1-copy.saving", ".checkpoint-1.saving"):
        (tmp_path / name).mkdir()
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".checkpoint-1-copy.saving"]


def test_one_run_at_a_time_saves_in_a_directory(tmp_path: Path) -> None:
    with sole_run(tmp_path / "run"):
        with pytest.raises(CheckpointError, match="another run saves its checkpoints in"):
            sole_run(tmp_path / "run", patience=0).__enter__()
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()  # which shares the lock
    with sole_run(tmp_path / "run", patience=0):
        pass
    worker.kill()
    worker.join()


def test_a_save_in_the_background_holds_on_to_no_tensor(tmp_path: Path) -> None:
    """What is made for a save alone, such as wide copies of moments in few bits, goes at once."""
    saver, go_on = Checkpointer(), threading.Event()
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    contents = [Contents({"model": {"w": tensor}}, prepared=lambda _: wait_for(go_on))]
    del tensor
    saver.save(tmp_path / "checkpoint-1", contents.pop, manifest(1), in_background=True)
    assert gone() is None
    go_on.set()
    saver.wait()
    check_checkpoint(tmp_path / "checkpoint-1", values=True)


def wait_for(event: threading.Event) -> None:
    assert event.wait(20)


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_that_nobody_waits_for_is_over_before_another(tmp_path: Path, fails: bool) -> None:
    """An error of training gives it up, but it is still running when training begins anew."""
    saver, go_on = Checkpointer(), threading.Event()

    def prepared(folder: Path) -> None:
        wait_for(go_on)
        if fails:
            raise OSError("No space left on device")

    for step, first in ((1, prepared), (2, None)):
        contents = Contents({"model": state(step)}, prepared=first)
        path = tmp_path / f"checkpoint-{step}"
        saver.save(path, [contents].pop, manifest(step), in_background=True)
        saver.wait(timeout=0 if step == 1 else None)
        threading.Timer(0.2, go_on.set).start()
    assert [step for step, _ in checkpoints(tmp_path)] == ([2] if fails else [2, 1])


def test_what_is_still_being_written_is_not_tidied_away(tmp_path: Path) -> None:
    saver, go_on = Checkpointer(), threading.Event()
    contents = Contents({"model": state(1)}, prepared=lambda _: wait_for(go_on))
    saver.save(tmp_path / "checkpoint-1", lambda: contents, manifest(1), in_background=True)
    saver.wait(timeout=0)
    threading.Timer(0.2, go_on.set).start()
    assert saver.newest(tmp_path) == tmp_path / "checkpoint-1"


# -- locks


def test_a_run_that_fails_gives_its_lock_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, opened = list[int](), os.open

    def shares(*args: Any) -> int:
        descriptor = opened(*args)
        shared.append(os.dup(descriptor))  # as a child has it
        return descriptor

    monkeypatch.setattr(os, "open", shares)
    with pytest.raises(ZeroDivisionError), sole_run(tmp_path):
        1 / 0  # noqa: B018
    with sole_run(tmp_path, patience=0):
        pass
    for descriptor in shared:
        os.close(descriptor)


def test_where_nothing_can_be_locked_a_run_saves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with sole_run(tmp_path):
            pass
    monkeypatch.setitem(sys.modules, "fcntl", None)  # Windows has none
    monkeypatch.setattr(sys, "platform", "win32")
    with runpy.run_path(locking.__file__)["sole_run"](tmp_path):
        pass


# -- two ranks


def fails_in_background(rank: int, folder: str) -> list[str]:
    saver, run = Checkpointer(), Path(folder)
    write(run, 1, saver)
    original, said = SafetensorsWriter.write_data, []

    def full(self: Any, *args: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return original(self, *args)

    SafetensorsWriter.write_data = full  # type: ignore[method-assign, assignment]
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
        SafetensorsWriter.write_data = original  # type: ignore[method-assign]
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


def saved_while_training(rank: int, folder: str) -> dict[str, list[Any]]:
    """Save in the background again and again; tell how many plans were made by each save."""
    saver, run = Checkpointer(), Path(folder)
    plans, made, places = [], BoxSavePlanner.create_global_plan, set()

    def counted(self: Any, all_plans: Any) -> Any:
        plans[-1] += 1
        return made(self, all_plans)

    def save(step: int, **more: Tensor) -> None:
        tensors = {**state(step), **more}
        plans.append(0)
        contents = Contents({"model": tensors})
        saver.save(run / f"checkpoint-{step}", lambda: contents, manifest(step), in_background=True)
        for tensor in tensors.values():
            tensor.fill_(float("nan"))  # training goes on
        assert saver._known is not None
        buffers = saver._known[1]["model"].planner._buffers
        places.add(tuple(each.data_ptr() for each in buffers.values()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoxSavePlanner, "create_global_plan", counted)
        for step in (1, 2, 3):
            save(step)
        kept = len(places)
        # A form or a name that changes on one rank alone; it comes again.
        for step in (4, 5):
            save(step, **({"own": torch.full((3,), float(step))} if rank else {}))
        save(6)
        said = []
        for staging in (True, False):
            with pytest.raises((CheckpointError, RuntimeError)) as caught:
                _fail_on_rank_1(saver, run / "checkpoint-7", rank, staging=staging)
            said.append(str(caught.value))
        save(8)
        saver.wait()
    return {"plans": plans, "kept": [kept], "said": said}


def _fail_on_rank_1(saver: Checkpointer, path: Path, rank: int, *, staging: bool) -> None:
    def collected() -> Contents:
        if rank == 1 and not staging:
            raise RuntimeError("no state here")
        return Contents({"model": state(7)})

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and staging:

            def full(self: Any, plan: Any) -> None:
                raise RuntimeError("no memory here")

            patch.setattr(BoxSavePlanner, "stage", full)
        saver.save(path, collected, manifest(7), in_background=True)
        saver.wait()


def test_later_saves_plan_nothing_and_copy_into_the_same_memory(
    ranks: RankPool, tmp_path: Path
) -> None:
    for rank, found in enumerate(ranks.run(saved_while_training, str(tmp_path), world=2)):
        # What fails is planned anew, if a rank could not say what it holds.
        assert found["plans"] == [1, 0, 0, 1, 0, 1, 1]
        assert found["kept"] == [1]
        where = "" if rank else "failed on rank 1: RuntimeError: "
        assert f"{where}no memory here" in found["said"][0]
        assert f"{where}no state here" in found["said"][1]
    assert [step for step, _ in checkpoints(tmp_path)] == [8, 6, 5, 4, 3, 2, 1]
    for step, folder in checkpoints(tmp_path):
        check_checkpoint(folder, values=True)
        assert value_of(folder) == step, "of the moment of the save"
    own = {"own": torch.zeros(3)}
    Checkpointer().load(tmp_path / "checkpoint-5", {"model": own})
    assert own["own"].tolist() == [5.0] * 3
