"""The demo's model on a few ranks of torchrun, of which some fail; it goes on until it is done.

`run` starts it with a list of faults, one per start, and gives back what it ended with. The file is
also the program of a rank: `python faults.py FOLDER STEPS`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "packages/expert-parallel/examples"
SIZES: dict[int, dict[str, int]] = {
    2: {"fsdp_size": 2, "ep_size": 2},
    4: {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
}
SAVE_STEPS = 2
KINDS = {
    "kill": "is gone",
    "kill in a save": "is gone",
    "raise": "failed: RuntimeError: out of luck",
    "hang": "hangs at",
}
"""What can happen, and how the others tell it."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank in one start of the program.

    Attributes:
        kind: one of `KINDS`.
        rank: whose.
        steps: after so many steps of this start (in the first save after them).
        share: of a step, how long after that.
    """

    kind: str
    rank: int
    steps: int
    share: float = 0.0


@dataclass
class Outcome:
    """How a run went.

    Attributes:
        losses: by step, those that count: of the start that came to the end, and before it.
        weights: a digest of each rank's.
        restarts: how often it was started again.
        in_saves: how many checkpoints were half written then.
        stopped: seconds from each fault until no rank ran.
        untold: faults that no other rank named.
        text: what was printed.
    """

    losses: dict[str, float]
    weights: list[str]
    restarts: int = 0
    in_saves: int = 0
    stopped: list[float] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    text: str = ""


# -- on a rank


def train(
    rank: int, folder: str, steps: int, world: int, step_timeout: float | None = None
) -> dict[str, Any]:
    """Train, from the last checkpoint if there is one; the losses and a digest of the weights."""
    import hashlib

    import torch
    from transformers import AutoConfig, TrainerCallback, TrainingArguments, default_data_collator

    from ep_trainer import EPTrainer, Watch
    from expert_parallel import AutoModelForCausalLM, DistributedConfig, parallelize

    place = Path(folder)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    class Happens(TrainerCallback):
        """Tells the step, and lets happen what must from within."""

        def __init__(self) -> None:
            path = place / f"fault-{attempt}.json"
            self.fault = Fault(**json.loads(path.read_text())) if path.exists() else None
            self.done = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            fault = self.fault
            _write(place / f"step-{attempt}-{rank}", f"{os.getpid()} {self.done}")
            if fault is None or fault.rank != rank or self.done < fault.steps:
                return
            if fault.kind in ("raise", "hang"):
                _write(place / f"begin-{attempt}", str(time.time()))
            if fault.kind == "raise":
                raise RuntimeError("out of luck")
            while fault.kind == "hang":
                time.sleep(1)
            if fault.kind == "kill in a save":
                from ep_trainer.checkpoint import saving

                saving.flush = self.die

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.done += 1

        def die(self, path: Path) -> None:
            """In place of flushing the rank's part of a checkpoint to the disk."""
            _write(place / f"begin-{attempt}", str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    parallelize(model, DistributedConfig(**SIZES[world]))
    ids = torch.load(place / "ids.pt")[: 64 * 512].view(-1, 64)
    arguments = TrainingArguments(
        str(place / "run"),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=4e-3,
        logging_steps=1,
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
    )
    trainer = EPTrainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        data_collator=default_data_collator,
        callbacks=[Happens()],
        watch=Watch(step_timeout=step_timeout),
    )
    trainer.train(resume_from_checkpoint="auto")
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.to_local().detach().contiguous().numpy().tobytes())  # type: ignore[attr-defined]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = {str(entry["step"]): entry["loss"] for entry in logs}
    return {"losses": losses, "weights": digest.hexdigest()}


def _write(path: Path, text: str) -> None:
    """At once, so that nobody reads a half."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


# -- beside the ranks


def prepare(folder: Path) -> None:
    """The demo's text and model."""
    sys.path.insert(0, str(EXAMPLES))
    import demo

    folder.mkdir(parents=True, exist_ok=True)
    demo.prepare(folder)


def run(
    folder: Path,
    steps: int,
    world: int,
    faults: list[Fault],
    *,
    step_timeout: float = 20.0,
    timeout: float = 120.0,
) -> Outcome:
    """Run the program under torchrun, one fault per start, to its end.

    Args:
        folder: what `prepare` made; the run gets a directory `run` in it.
        steps: of the training.
        world: ranks.
        faults: of the first start, the second one, ...; none in the last.
        step_timeout: of `Watch`.
        timeout: seconds for each start.
    """
    for number, fault in enumerate(faults):
        _write(folder / f"fault-{number}.json", json.dumps(asdict(fault)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", f"--max-restarts={len(faults)}", __file__]
    command += [str(folder), str(steps), str(step_timeout)]
    found = Outcome({}, [])
    quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with (folder / "printed").open("w") as printed:
        launched = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, env={**os.environ, **quiet}
        )
        try:
            for number, fault in enumerate(faults):
                _one_start(folder, number, fault, world, launched, found, timeout)
            launched.wait(timeout)
        finally:
            if launched.poll() is None:
                launched.terminate()
                launched.wait(60)
    found.text = (folder / "printed").read_text()
    if launched.returncode:
        raise RuntimeError(f"torchrun ended with {launched.returncode}:\n{found.text[-6000:]}")
    said = found.text.splitlines()
    for fault in faults:
        named = [t for t in said if f"rank {fault.rank}, step " in t and KINDS[fault.kind] in t]
        if not named:
            found.untold.append(f"{fault}")
    results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world)]
    found.losses = results[0]["losses"]
    found.weights = [each["weights"] for each in results]
    found.restarts = len([*folder.glob("step-*-0")]) - 1
    return found


def _one_start(
    folder: Path,
    number: int,
    fault: Fault,
    world: int,
    launched: subprocess.Popen[bytes],
    found: Outcome,
    timeout: float,
) -> None:
    """Let a fault happen, and wait until no rank runs."""
    from ep_trainer.failures import is_running

    end = time.monotonic() + timeout

    def wait_for(what: str, there: Any) -> None:
        while not there():
            if launched.poll() is not None or time.monotonic() > end:
                text = (folder / "printed").read_text()[-6000:]
                raise RuntimeError(f"start {number}, {fault}: no {what}:\n{text}")
            time.sleep(0.002)

    begin = folder / f"begin-{number}"
    paths = [folder / f"step-{number}-{rank}" for rank in range(world)]
    wait_for("first step", lambda: all(path.exists() for path in paths))
    pids = [int(path.read_text().split()[0]) for path in paths]
    if fault.kind == "kill":
        wait_for("step", lambda: int(paths[0].read_text().split()[1]) >= fault.steps)
        time.sleep(fault.share * 0.5)
        _write(begin, str(time.time()))
        os.kill(pids[fault.rank], signal.SIGKILL)
        found.in_saves += any((folder / "run").glob(".checkpoint-*"))
    wait_for("fault", begin.exists)
    wait_for("end of the ranks", lambda: not any(is_running(pid) for pid in pids))
    found.stopped.append(time.time() - float(begin.read_text()))
    found.in_saves += fault.kind == "kill in a save"


def random_faults(count: int, world: int, seed: int) -> list[Fault]:
    """Mostly kills at random moments, every fourth in a save; the last but one raises, the last hangs."""
    draw = random.Random(seed)
    faults = []
    for number in range(count):
        kind = "kill in a save" if number % 4 == 1 else "kill"
        if count > 3 and number >= count - 2:
            kind = "raise" if number == count - 2 else "hang"
        faults.append(Fault(kind, draw.randrange(world), draw.randrange(4), draw.random()))
    return faults


def main() -> None:
    """The program of a rank."""

    import torch.distributed as dist

    folder, steps, step_timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = train(rank, folder, steps, world, step_timeout)
    _write(Path(folder) / f"result-{rank}.json", json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
