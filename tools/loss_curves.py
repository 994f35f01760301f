"""Loss curves of the demo's model and text in several layouts, beside one process's, as a picture.

`python tools/loss_curves.py [--full] [--folder FOLDER]` trains 30 steps (300 with `--full`, in float32 and
in float64) in each layout, one after the other, in processes of its own. Each curve is kept in FOLDER as
JSON and is not measured again, so that a run that was stopped goes on. `--full` draws docs/loss-curves.png.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "loss-curves.png"
FOLDER = ROOT / "build" / "loss-curves"
sys.path.insert(0, str(ROOT / "packages" / "expert-parallel" / "examples"))

RANKS = 8
LEAST = 1e-8  # what the picture shows for no difference
ONE = "one process"
LAYOUTS: dict[str, dict[str, Any]] = {
    ONE: {},
    "tp=8": {"tp_size": 8, "ep_size": 8},
    "tp=4, fsdp=2": {"tp_size": 4, "fsdp_size": 2, "ep_size": 4},
    "tp=2, fsdp=4": {"tp_size": 2, "fsdp_size": 4, "ep_size": 4},
    "tp=1, fsdp=8": {"fsdp_size": 8, "ep_size": 8},
    "pp=2, tp=2, fsdp=2": {"pp_size": 2, "tp_size": 2, "fsdp_size": 2, "ep_size": 4},
}
SAMPLE = (ONE, "tp=2, fsdp=4", "pp=2, tp=2, fsdp=2")


@dataclass(frozen=True)
class Settings:
    """What all curves have in common.

    Attributes:
        steps: optimizer steps.
        batch: samples of a step, over all data shards.
        length: tokens of a sample.
        rate: the peak of the learning rate, after a twentieth of the steps; a cosine to 0.
        dtype: of weights, gradients and optimizer states, by its name in torch.
    """

    steps: int
    batch: int = 16
    length: int = 32
    rate: float = 2e-3
    dtype: str = "float32"


def train(rank: int, prepared: str, sizes: dict[str, Any], settings: Settings) -> list[float]:
    """The loss of each step; without sizes by plain transformers."""
    import torch
    import transformers

    from ep_mesh import DistributedConfig
    from ep_trainer import EPTrainer
    from expert_parallel import parallelize

    torch.manual_seed(0)  # the same weights on every rank
    config = transformers.AutoConfig.from_pretrained(prepared)
    # Over stages it is the mean of the micro-batches' auxiliary losses, which is another number.
    config.output_router_logits = False
    dtype = getattr(torch, settings.dtype)
    # The products that transformers takes by itself know no float64.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **experts)
    if dtype == torch.float64:
        norm_exactly(model)
    layout = DistributedConfig(**sizes)
    ids = torch.load(Path(prepared) / "ids.pt")
    rows = ids[: len(ids) // settings.length * settings.length].view(-1, settings.length)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch // layout.dp_size,
            learning_rate=settings.rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(settings.steps // 20, 1),
            adam_beta2=0.95,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        kind: Any = EPTrainer if sizes else transformers.Trainer
        trainer = kind(
            parallelize(model, layout) if sizes else model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            data_collator=transformers.default_data_collator,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norm_exactly(model: Any) -> None:
    """Norms in the dtype of their input.

    The model's own round to float32: where ranks share a key's head, the parts of its gradient before
    they are added up, in one process their sum.
    """
    from torch.nn.functional import rms_norm

    def forward(norm: Any, hidden: Any) -> Any:
        return rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(forward, module)


def curves(names: tuple[str, ...], settings: Settings, folder: Path) -> dict[str, list[float]]:
    """The curve of each layout, from `folder` where it is there."""
    from ep_testing import RankPool

    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    with tempfile.TemporaryDirectory() as prepared:
        for name in names:
            sizes = LAYOUTS[name]
            what = {"sizes": sizes, **asdict(settings)}
            kept = kept_file(folder, name, settings)
            known = json.loads(kept.read_text()) if kept.exists() else {}
            if known.get("what") != what:
                if not any(Path(prepared).iterdir()):
                    import demo

                    demo.prepare(Path(prepared))
                pool = RankPool()
                world = RANKS if sizes else 1
                losses = pool.run(train, prepared, sizes, settings, world=world, timeout=3600)
                pool.close()
                if any(each != losses[0] for each in losses):
                    raise AssertionError(f"{name}: the ranks log different losses")
                known = {"what": what, "loss": losses[0]}
                kept.write_text(json.dumps(known))
                print(f"{name}: {losses[0][0]:.4f} -> {losses[0][-1]:.4f}", file=sys.stderr)
            found[name] = known["loss"]
    return found


def kept_file(folder: Path, name: str, settings: Settings) -> Path:
    """Where the curve of a layout is kept."""
    return (
        folder
        / f"{name.replace(', ', '-').replace(' ', '-')}-{settings.steps}-{settings.dtype}.json"
    )


def differences(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """The relative difference of each curve from one process's, at each step."""
    return {
        name: [abs(a / b - 1) for a, b in zip(losses, found[ONE], strict=True)]
        for name, losses in found.items()
        if name != ONE
    }


def apart_from(off: list[float]) -> int | None:
    """The first step at which more than rounding differs."""
    return next((step for step, x in enumerate(off, 1) if x > 1e-6), None)


def draw(found: dict[str, list[float]], exact: dict[str, list[float]], file: Path) -> None:
    """The curves in one picture, and below how far each is from one process's, in float32 and float64."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    figure, (above, *below) = plt.subplots(
        3, 1, figsize=(8, 7), sharex=True, layout="constrained", height_ratios=(4, 2, 2)
    )
    for name, losses in found.items():
        steps = range(1, len(losses) + 1)
        if name == ONE:  # wide, so that its rim is seen below the others
            above.plot(steps, losses, label=name, linewidth=5, color="lightgrey")
            continue
        above.plot(steps, losses, label=name, linewidth=0.8)
        for axes, some in zip(below, (found, exact), strict=True):
            shown = [max(x, LEAST) for x in differences(some)[name]]
            axes.semilogy(steps, shown, linewidth=0.8, color=above.lines[-1].get_color())
    above.set(ylabel="loss, nats per token")
    above.legend()
    for axes, dtype in zip(below, ("float32", "float64"), strict=True):
        axes.set(ylabel=f"difference, {dtype}", ylim=(LEAST / 2, 1e-2))
    below[-1].set(xlabel="step")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(64).save(file, optimize=True)  # a third of the bytes


def loss_curves(full: bool = False, folder: Path = FOLDER) -> dict[str, Any]:
    """The demo's loss curve in several layouts: the largest relative difference from one process's."""
    settings = Settings(steps=300 if full else 30)
    found = curves(tuple(LAYOUTS) if full else SAMPLE, settings, folder)
    told = {}
    if full:
        exact = curves(tuple(LAYOUTS), replace(settings, dtype="float64"), folder)
        draw(found, exact, PICTURE)
        told["worst_float64"] = float(f"{max(map(max, differences(exact).values())):.2g}")
    off = differences(found)
    worst = {name: max(x) for name, x in off.items()}
    return {
        "value": float(f"{max(worst.values()):.2g}"),
        "unit": "relative difference",
        "reference": "plain transformers in one process",
        "conditions": f"{settings.steps} steps, {'; '.join(worst)}; batch of {settings.batch} x "
        f"{settings.length} tokens, the demo's model and text without auxiliary loss, float32; gloo",
        "worst": {name: float(f"{value:.2g}") for name, value in worst.items()},
        "apart_from": {name: apart_from(x) for name, x in off.items()},
        **told,
        "loss": [round(found[ONE][0], 4), round(found[ONE][-1], 4)],
    }


def main() -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    print(json.dumps(loss_curves(arguments.full, arguments.folder)))


if __name__ == "__main__":
    main()
