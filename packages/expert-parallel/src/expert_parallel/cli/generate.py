"""`ep generate`: text from a sharded model, on ranks that it starts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from ep_mesh import DistributedConfig
from ep_mesh.world import gathered
from expert_parallel.cli import options
from expert_parallel.cli.console import console, tells_errors
from expert_parallel.cli.launch import launch, under_launcher
from expert_parallel.cli.models import check_plan, load, load_tokenizer
from expert_parallel.cli.rank import run as run_here
from expert_parallel.cli.train import torch_dtype
from expert_parallel.meta import read_config


def run(job: dict[str, Any]) -> None:
    """Generate on this rank, and print all texts on the first; every rank must call."""
    texts = continuations(job)
    out = console()
    for prompt, text in zip(job["prompts"], texts, strict=True):
        out.rule()
        out.print(f"[bold]{_plain(prompt)}[/]{_plain(text)}", soft_wrap=True)


def continuations(job: dict[str, Any]) -> list[str]:
    """What the model adds to each prompt, on every rank.

    Data shards take prompts in turn. One that has none takes part with the first prompt, since its
    ranks hold experts for the others.
    """
    config = DistributedConfig.from_dict(job["layout"])
    tokenizer = load_tokenizer(job["tokenizer"] or job["model"], padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = load(job["model"], config, torch_dtype(job["dtype"]))
    layout, rank = config.layout, dist.get_rank()
    prompts: list[str] = job["prompts"]
    mine = range(layout.batch_of(rank), len(prompts), layout.data_parallel_size)
    chosen = [prompts[i] for i in mine] or prompts[:1]
    batch = tokenizer(chosen, return_tensors="pt", padding=tokenizer.pad_token is not None)
    torch.manual_seed(job["seed"] + layout.batch_of(rank))  # a TP group draws the same tokens
    with torch.no_grad():
        ids = model.generate(
            **batch.to(model.device), pad_token_id=tokenizer.pad_token_id, **job["generation"]
        )
    added = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    found = dict(zip(mine, added, strict=False))
    merged = {index: text for part in gathered(found) for index, text in part.items()}
    return [merged[index] for index in range(len(prompts))]


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


@tells_errors
def generate(
    model: Annotated[str, typer.Argument(help="Folder or hub name.", show_default=False)],
    prompts: Annotated[list[str] | None, typer.Argument(help="One or more prompts.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with a prompt on each line.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 64,
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw tokens instead of the best.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="With --sample.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --sample.")] = None,
    top_k: Annotated[int | None, typer.Option(help="With --sample.")] = None,
    seed: Annotated[int, typer.Option(help="With --sample.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32, ...")] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="If not beside the model.")] = None,
    tp: options.Tp = None,
    fsdp: options.Fsdp = None,
    ep: options.Ep = None,
    dp_replicate: options.DpReplicate = None,
    pp: options.Pp = None,
    ep_implementation: options.Implementation = None,
    layout: options.LayoutFile = None,
    processes: options.Processes = None,
    traceback: options.Traceback = False,
) -> None:
    """Generate text with a sharded model.

    Starts the ranks on this machine; under torchrun, it is one of them.
    """
    lines = options.read_text(prompt_file).splitlines() if prompt_file else []
    asked = [text for text in [*(prompts or []), *lines] if text.strip()]
    if not asked:
        raise ValueError("there is no prompt: give one after the model, or --prompt-file.")
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    given = {name: value for name, value in sampling.items() if value is not None}
    if given and not sample:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{names} needs --sample.")
    torch_dtype(dtype)
    with options.world_of(processes):
        config = options.distributed_config(
            layout,
            tp_size=tp,
            fsdp_size=fsdp,
            ep_size=ep,
            dp_replicate_size=dp_replicate,
            pp_size=pp,
            ep_implementation=ep_implementation,
        )
    job = {
        "model": model,
        "tokenizer": tokenizer,
        "prompts": asked,
        "dtype": dtype,
        "seed": seed,
        "layout": config.to_dict(),
        "generation": {"max_new_tokens": max_new_tokens, "do_sample": sample, **given},
    }
    if under_launcher():
        run_here(run, job)
        return
    if processes is not None:
        config.layout.check_world_size(processes)
    check_plan(read_config(model), config)
    launch("generate", job, config.world_size, traceback=traceback)
