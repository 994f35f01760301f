"""Figures of checkpoints: resuming across layouts, what a save costs and how long training waits.

A sample by default; `python tools/figures.py NAME --full` takes all pairs of layouts.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(_ROOT / "integration_tests"),
    str(_ROOT / "packages" / "expert-parallel" / "examples"),
]

SIZES = {"tp_size": 2, "fsdp_size": 4, "ep_size": 4}
LAYERS = 4  # 0.7 GB of weights in bf16, 2.1 GB with AdamW's moments
BOUND = 1e-6
STEPS, EVERY = 40, 5  # of the demo: 8 saves, of which the first one allocates


@functools.cache
def resume_matrix(full: bool) -> dict[str, Any]:
    """Resume from each layout into each: how many fail, and the worst relative error of a loss."""
    import test_resuming as law

    from ep_testing import RankPool

    pool = RankPool()
    cases = law.cases(full)
    failures, worst = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        whole: dict[str, Any] = {}
        for source, target, step in cases:
            run = Path(folder) / source
            if source not in whole:
                whole[source] = pool.run(
                    law.train, source, str(run), world=law.world(source), timeout=300
                )
            name = f"{source} -> {target} at step {step}"
            checkpoint = str(run / f"checkpoint-{step}")
            arguments = target, str(run), checkpoint, 1
            try:
                found = pool.run(law.train, *arguments, world=law.world(target), timeout=300)
            except Exception as error:  # noqa: BLE001 (counted)
                failures.append(f"{name}: {str(error)[:200]}")
                continue
            expected = whole[source][0].loss
            off = max(
                abs(loss / expected[at] - 1) for one in found for at, loss in one.loss.items()
            )
            worst = max(worst, off)
            same = source != target or all(
                one.weights == before.weights and one.loss.items() <= before.loss.items()
                for one, before in zip(found, whole[source], strict=True)
            )
            if off > BOUND or not same:
                failures.append(name)
    pool.close()
    return {"failures": failures, "worst": worst, "runs": len(cases), "full": full}


def _conditions(found: dict[str, Any]) -> str:
    which = "all" if found["full"] else "a sample of"
    return (
        f"{which} pairs of tp=8; tp=4,fsdp=2; tp=2,fsdp=4; fsdp=8; 2x(tp=2,fsdp=2); pp=2,tp=2,fsdp=2; one "
        f"process, and of stages on 4 ranks, EP on: {found['runs']} resumed runs; tiny Qwen3-MoE, AdamW, "
        "float32"
    )


def resume_matrix_failures(full: bool = False) -> dict[str, Any]:
    """Resumed runs that fail: a loss 1e-6 off the uninterrupted run's, or the same layout not bitwise."""
    found = resume_matrix(full)
    return {
        "value": len(found["failures"]),
        "unit": "runs",
        "reference": f"none of {found['runs']}",
        "conditions": _conditions(found),
        "failures": found["failures"],
    }


def resume_worst_relative_loss(full: bool = False) -> dict[str, Any]:
    """The worst relative error of a loss after resuming, over the uninterrupted run's."""
    found = resume_matrix(full)
    return {
        "value": float(f"{found['worst']:.2g}"),
        "unit": "relative error",
        "reference": "the uninterrupted run in the layout that saved",
        "conditions": _conditions(found),
    }


def state_on_rank(path: str, sizes: dict[str, int]) -> tuple[dict[str, Any], Any]:
    """What this rank holds of a model with AdamW's moments, by section and name; and its manifest."""
    import torch

    from ep_mesh import DistributedConfig
    from ep_trainer.checkpoint import Manifest
    from ep_trainer.checkpoint.state import model_tensors, optimizer_state
    from expert_parallel import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=sizes)
    tensors = model_tensors(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    state = optimizer_state(optimizer, {id(tensor): name for name, tensor in tensors.items()})
    layout = DistributedConfig(**sizes).layout
    manifest = Manifest(1, asdict(layout), layout.world_size, (), {}, {})
    return {"model": tensors, "optimizer": state.tensors}, manifest


def cost_on_rank(rank: int, path: str, folder: str) -> dict[str, float]:
    """Save and load a model with AdamW's moments on this rank."""
    import checkpoints as measuring
    import torch.distributed as dist

    from ep_trainer.checkpoint import Checkpointer, Contents

    sections, manifest = state_on_rank(path, SIZES)
    held = sum(t.to_local().nbytes for s in sections.values() for t in s.values() if t.ndim)
    saver = Checkpointer()
    found: dict[str, float] = {"shards": held}
    for name, in_background in (("sync", False), ("first", True), ("async", True)):
        target = Path(folder) / name / "checkpoint-1"
        dist.barrier()
        begin, cpu = time.perf_counter(), time.thread_time()
        with measuring._AnonymousMemory() as memory:
            saver.save(target, lambda: Contents(sections), manifest, in_background=in_background)
            found[f"{name}_stall"] = time.perf_counter() - begin
            found[f"{name}_cpu"] = time.thread_time() - cpu
            saver.wait()
        found[f"{name}_seconds"] = time.perf_counter() - begin
        found[f"{name}_memory"] = memory.peak
    dist.barrier()
    begin = time.perf_counter()
    with measuring._AnonymousMemory() as memory:
        saver.check(target, values=True)
        found["verify_seconds"] = time.perf_counter() - begin
        saver.load(target, sections)
    found["load_seconds"] = time.perf_counter() - begin - found["verify_seconds"]
    found["load_memory"] = memory.peak
    return found


def stalls_on_rank(rank: int, folder: str) -> dict[str, list[float]]:
    """Seconds of the demo's steps, and of its saves in the main thread, on this rank."""
    import demo
    import torch
    import transformers

    from expert_parallel import EPTrainer, parallelize

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = time.perf_counter()
            job = trainer.checkpointer._job
            self.writing = job is not None and job.done is not None and not job.done.is_set()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            found["writing" if self.writing else "free"].append(time.perf_counter() - self.begin)

    class Timed(EPTrainer):
        def save_training_state(self, run: str) -> None:
            begin = time.thread_time()
            super().save_training_state(run)
            found["cpu"].append(time.thread_time() - begin)

    found: dict[str, list[float]] = {"free": [], "writing": [], "cpu": []}
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.load(f"{folder}/ids.pt")
    rows = ids[: len(ids) // demo.LENGTH * demo.LENGTH].view(-1, demo.LENGTH)
    trainer = Timed(
        parallelize(model, demo.TRAIN),
        transformers.TrainingArguments(
            f"{folder}/run",
            max_steps=STEPS,
            per_device_train_batch_size=4,
            max_grad_norm=1.0,
            save_steps=EVERY,
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=transformers.default_data_collator,
        callbacks=[Clock()],
    )
    trainer.train()
    return {**found, "stalls": trainer.save_stalls}


@functools.cache
def _stalls() -> dict[str, Any]:
    import demo

    from ep_testing import RankPool

    with tempfile.TemporaryDirectory() as folder:
        demo.prepare(Path(folder))
        pool = RankPool()
        found = pool.run(stalls_on_rank, folder, timeout=450)
        pool.close()
    # A save is as long as the slowest rank's.
    stalls = [max(each) for each in zip(*(rank["stalls"] for rank in found), strict=True)]
    steps = {
        kind: statistics.median(time for rank in found for time in rank[kind])
        for kind in ("free", "writing")
        if any(rank[kind] for rank in found)
    }
    cpu = statistics.median(each for rank in found for each in rank["cpu"][1:])
    return {"first": stalls[0], "later": statistics.median(stalls[1:]), "cpu": cpu, **steps}


@functools.cache
def _cost() -> dict[str, Any]:
    import checkpoints as measuring

    from ep_testing import RankPool

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        config = measuring.moe_config(num_hidden_layers=LAYERS)
        measuring.write_checkpoint(path, config, "fused", file_bytes=300 << 20)
        pool = RankPool()
        found = pool.run(cost_on_rank, str(path), folder, timeout=450)
        pool.close()
        saved = Path(folder) / "sync" / "checkpoint-1"
        size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        target = Path(folder) / "dd"
        megabytes = size >> 20
        begin = time.perf_counter()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={megabytes}", "conv=fsync"],
            check=True,
            capture_output=True,
        )
        dd = time.perf_counter() - begin
    worst = {key: max(rank[key] for rank in found) for key in found[0]}
    return {"size": size, "dd": dd, **worst}


def async_save_stall_share(full: bool = False) -> dict[str, Any]:
    """How long training waits for an asynchronous save, over a step: later saves than the first."""
    found = _stalls()
    shown = {name: round(value * 1e3, 1) for name, value in found.items()}
    return {
        "value": found["later"] / found["free"],
        "unit": "ratio",
        "reference": "a step",
        "conditions": (
            f"the demo's model and layout, 8 gloo ranks of one thread each; {STEPS} steps, a save "
            f"every {EVERY}; medians, of a save the slowest rank's; a step while one is written "
            f"takes {found.get('writing', 0) / found['free']:.2f} of another"
        ),
        "milliseconds": shown,
    }


def checkpoint_cost(full: bool = False) -> dict[str, Any]:
    """Save and load 2 GB on 8 ranks: seconds, over dd with fsync, host memory of a rank, stall."""
    found = _cost()
    return {
        "conditions": _size(found),
        "save_s": round(found["sync_seconds"], 2),
        "async_save_s": round(found["async_seconds"], 2),
        "first_stall_s": round(found["first_stall"], 3),
        "stall_s": round(found["async_stall"], 3),
        "stall_cpu_s": round(found["async_cpu"], 3),
        "verify_s": round(found["verify_seconds"], 2),
        "load_s": round(found["load_seconds"], 2),
        "dd_s": round(found["dd"], 2),
        "share_of_dd_speed": found["dd"] / found["sync_seconds"],
        "shards_MB": round(found["shards"] / 1e6, 1),
        "save_memory_MB": round(found["sync_memory"] / 1e6, 1),
        "first_async_memory_MB": round(found["first_memory"] / 1e6, 1),
        "async_memory_MB": round(found["async_memory"] / 1e6, 1),
        "load_memory_MB": round(found["load_memory"] / 1e6, 1),
    }


def _size(found: dict[str, Any]) -> str:
    return (
        f"{found['size'] / 1e9:.2f} GB of weights and AdamW's moments in bf16; tp=2, fsdp=4, ep=4"
    )


FIGURES = {
    each.__name__: each
    for each in (
        resume_matrix_failures,
        resume_worst_relative_loss,
        async_save_stall_share,
        checkpoint_cost,
    )
}
