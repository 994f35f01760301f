"""The whole of it in some minutes on a laptop, with 8 processes and no GPU: `python demo.py`.

A small Qwen3-MoE is trained from scratch on the English of Python's own documentation, saved, loaded
in another layout and in plain transformers, and generates text in each. Needs matplotlib.

    python demo.py [OUTPUT] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3MoeConfig,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from ep_trainer import ExpertLoad, Memory, Speed
from expert_parallel import AutoModelForCausalLM, DistributedConfig, EPTrainer, parallelize

TRAIN = DistributedConfig(tp_size=2, fsdp_size=4, ep_size=4)  # 8 ranks
OTHER = DistributedConfig(tp_size=1, fsdp_size=4, ep_size=2)  # 4 ranks
VOCABULARY, LENGTH, EXPERTS = 1024, 64, 16
PROMPT = "The import statement"
NEW_TOKENS = 40

console = Console(quiet=os.environ.get("RANK", "0") != "0", highlight=False)


# -- before the ranks start


def prepare(folder: Path) -> None:
    """Train a tokenizer on the text, and write it, the text's ids and the model's config."""
    texts = [" ".join(text.split()) for text in pydoc_data.topics.topics.values()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<end>"])
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<end>", pad_token="<end>", padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    ids = [i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    torch.save(torch.tensor(ids), folder / "ids.pt")
    Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=256,
        moe_intermediate_size=192,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.05,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(folder)


# -- on each of 8 ranks


def train(folder: Path, steps: int) -> None:
    """Train over the layout and save an ordinary checkpoint."""
    torch.manual_seed(0)  # the same weights on every rank, of which each keeps its part
    config = AutoConfig.from_pretrained(folder)
    model = parallelize(AutoModelForCausalLM.from_config(config), TRAIN)
    ids = torch.load(folder / "ids.pt")
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    memory, progress = Memory(), ShowProgress()
    load = ExpertLoad(picture=folder / "expert-load.png")
    trainer = EPTrainer(
        model,
        TrainingArguments(
            str(folder / "trainer"),
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=4e-3,
            lr_scheduler_type="cosine",
            warmup_steps=max(steps // 20, 1),
            adam_beta2=0.95,
            max_grad_norm=1.0,
            logging_steps=max(steps // 30, 1),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=default_data_collator,
        callbacks=[Speed(), memory, load, progress],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(folder / "checkpoint"))
    if dist.get_rank() == 0:
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        found = {
            "steps": [entry["step"] for entry in logs],
            "loss": [entry["loss"] for entry in logs],
            "tokens_per_s_per_rank": logs[-1].get("tokens_per_second_per_rank"),
            "peak_memory_gb": memory.per_rank,
            "load": [shares.tolist() for shares in load.history],
        }
        (folder / "results.json").write_text(json.dumps(found))


class ShowProgress(TrainerCallback):
    """A bar with the newest loss, speed and memory."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[logs]}"),
            console=console,
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar."""
        self.task = self.bar.add_task("training", total=state.max_steps, logs="")
        self.bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move it."""
        self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the numbers; where there is no terminal, on lines of their own."""
        if "loss" not in logs:
            return
        shown = f"loss {logs['loss']:.3f}"
        if "tokens_per_second_per_rank" in logs:
            shown += f"  {logs['tokens_per_second_per_rank']:,.0f} tokens/s a rank"
        self.bar.update(self.task, logs=shown)
        if not console.is_terminal:
            console.print(f"step {state.global_step}/{state.max_steps}  {shown}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar as it stands."""
        self.bar.stop()


# -- on each of 4 ranks, and in one process


def generate(folder: Path, layout: DistributedConfig | None) -> None:
    """Load the checkpoint and continue the prompt, greedily."""
    sharded = {} if layout is None else {"distributed_config": layout}
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", **sharded)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    with torch.no_grad():
        ids = model.generate(
            **prompt, max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=1.2
        )
    name = "plain" if layout is None else "sharded"
    if os.environ.get("RANK", "0") == "0":
        (folder / f"{name}.txt").write_text(
            " ".join(tokenizer.decode(ids[0]).split()), encoding="utf-8"
        )


# -- afterwards


def report(folder: Path) -> None:
    """Tables of what was measured, and the picture."""
    found = json.loads((folder / "results.json").read_text())
    table = Table("rank", "peak memory", title="Memory")
    for rank, gigabytes in enumerate(found["peak_memory_gb"]):
        table.add_row(str(rank), f"{gigabytes * 1000:,.0f} MB")
    console.print(table)
    table = Table("layer", f"share of each of {EXPERTS} experts, at the end", title="Experts' load")
    bars = " ▁▂▃▄▅▆▇█"
    for layer, shares in enumerate(found["load"][-1]):
        line = "".join(bars[min(round(share / max(shares) * 8), 8)] for share in shares)
        table.add_row(str(layer), f"{line}   most {max(shares) * EXPERTS:.2f} x even")
    console.print(table)
    picture(found, folder / "training.png")
    first, last = found["loss"][0], found["loss"][-1]
    speed = found["tokens_per_s_per_rank"] or 0
    console.print(f"loss {first:.2f} -> {last:.2f}, {speed:,.0f} tokens/s a rank")


def picture(found: dict[str, Any], file: Path) -> None:
    """Draw the loss and the experts' load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(found["steps"], found["loss"])
    left.set(title="Loss", xlabel="step", ylabel="nats per token")
    loads = torch.tensor(found["load"][-1]) * EXPERTS
    image = right.imshow(loads, aspect="auto", vmin=0)
    right.set(title="Experts' load at the end", xlabel="expert", ylabel="layer")
    right.set_yticks(range(len(loads)))
    figure.colorbar(image, label="1 = even")
    figure.savefig(file, dpi=120)


def ranks(count: int, *arguments: str) -> None:
    """Run this file on `count` processes; the failing rank's error is shown."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={count}", __file__, *arguments]
    quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    subprocess.run(command, check=True, env={**os.environ, **quiet})


def main() -> None:
    """All steps, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path, nargs="?", default=Path("demo-output"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--job", choices=["train", "generate"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder, steps = arguments.output.resolve(), arguments.steps
    if arguments.job:
        train(folder, steps) if arguments.job == "train" else generate(folder, OTHER)
        dist.destroy_process_group()
        return

    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    console.rule("1. A tokenizer and a small Qwen3-MoE")
    prepare(folder)
    console.rule("2. Train on 8 ranks: tp=2, fsdp=4, ep=4")
    console.print(TRAIN.layout.picture(EXPERTS), markup=False, soft_wrap=True)
    ranks(8, str(folder), "--job=train", f"--steps={steps}")
    report(folder)
    console.rule("3. The checkpoint on 4 ranks, fsdp=4, ep=2, and in plain transformers")
    console.print(OTHER.layout.picture(EXPERTS), markup=False, soft_wrap=True)
    ranks(4, str(folder), "--job=generate")
    generate(folder, None)
    sharded, plain = ((folder / f"{name}.txt").read_text("utf-8") for name in ("sharded", "plain"))
    console.print(f"[bold]4 ranks:[/] {escape(sharded)}", soft_wrap=True)
    console.print(f"[bold]plain transformers:[/] {escape(plain)}", soft_wrap=True)
    if sharded != plain:
        sys.exit("The two texts differ: the checkpoint was not loaded alike.")
    console.rule("Next")
    ep = Path(sys.executable).with_name("ep")
    console.print(
        f"the pictures           {folder / 'training.png'}, {folder / 'expert-load.png'}\n"
        f"the checkpoint         {folder / 'checkpoint'}\n"
        "another layout         change TRAIN at the head of this file\n"
        f"another model's layout {ep} plan qwen3_moe --tp 4 --fsdp 2 --ep 4\n"
        f"your own text          {ep} train --help",
        markup=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
