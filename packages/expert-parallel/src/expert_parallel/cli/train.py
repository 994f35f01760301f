"""`ep train`: a job from a file or from flags, on ranks that it starts itself."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch
import typer
from torch import nn
from transformers import TrainingArguments, default_data_collator

from ep_mesh import DistributedConfig
from ep_trainer.checks import check_arguments
from expert_parallel.cli import options
from expert_parallel.cli.console import console, tells_errors
from expert_parallel.cli.data import Blocks, load_ids, save_ids, text_files, token_ids
from expert_parallel.cli.launch import launch, under_launcher
from expert_parallel.cli.models import check_plan, check_weights, load, load_tokenizer
from expert_parallel.cli.plan import show_layout
from expert_parallel.cli.rank import run as run_here
from expert_parallel.meta import read_config

_DEFAULTS = {
    "logging_steps": 10,
    "save_strategy": "no",
    "save_only_model": True,
    "report_to": "none",
    "log_level_replica": "error",
}
_OURS = {
    "output_dir": "give output, the folder of the whole job",
    "use_cpu": "the ranks use what devices there are",
    "disable_tqdm": "the progress is shown by ep train itself",
}
_RESUMING = {"save_strategy": "steps", "save_only_model": False}


@dataclass
class TrainJob:
    """What `ep train` does; the fields of its file.

    Attributes:
        model: a folder or a hub name, with weights, config and tokenizer.
        data: text files (`.txt`, `.md`, `.jsonl`), or folders of them.
        output: the folder that the trained model and the logs (`metrics.jsonl`) are saved to.
        eval_data: text to evaluate on.
        tokenizer: where the tokenizer is, if not beside the model.
        from_scratch: start from random weights; `model` may be a model type then.
        sequence_length: tokens of a sample.
        text_key: where the text stands in a line of a `.jsonl` file.
        dtype: of the parameters: `auto` (as saved), `bfloat16`, `float32`, ...
        layout: fields of `DistributedConfig`.
        training: fields of `transformers.TrainingArguments`.
        resume: save checkpoints that a run can go on from (`training.save_steps`), and go on from the
            newest one in `output` if there is any.
        restarts: how often all ranks are started again after one of them failed; needs `resume`.
    """

    model: str = ""
    data: list[str] = field(default_factory=list)
    output: str = ""
    eval_data: list[str] = field(default_factory=list)
    tokenizer: str | None = None
    from_scratch: bool = False
    sequence_length: int = 1024
    text_key: str = "text"
    dtype: str = "auto"
    layout: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    resume: bool = False
    restarts: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "data", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is missing: give --{name}, or {name}: ... in the file.")
        self.data = _as_list(self.data)
        self.eval_data = _as_list(self.eval_data)
        for name, kind in get_type_hints(type(self)).items():
            setattr(self, name, _as_kind(kind, getattr(self, name), name))
        if self.sequence_length < 2:
            raise ValueError(
                f"sequence_length must be a whole number >= 2, got {self.sequence_length}."
            )
        if self.restarts < 0:
            raise ValueError(f"restarts must be a whole number >= 0, got {self.restarts}.")
        if self.restarts and not self.resume:
            raise ValueError(
                "restarts would begin anew each time: give --resume (resume: true) too."
            )
        _check_known(self.training, TrainingArguments, "training")
        saving = [name for name in ("save_steps", "save_total_limit") if name in self.training]
        if saving and not self.resume and "save_strategy" not in self.training:
            raise ValueError(
                f"training.{saving[0]}: no checkpoints are saved. Give --resume (resume: true) for those "
                "that a run can go on from, or training.save_strategy for weights alone."
            )
        for name in _OURS.keys() & self.training.keys():
            raise ValueError(f"training.{name}: {_OURS[name]}.")
        kinds = get_type_hints(TrainingArguments)
        self.training = {
            name: _as_kind(kinds[name], value, f"training.{name}")
            for name, value in self.training.items()
        }
        torch_dtype(self.dtype)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainJob:
        """Build one from a file's content.

        Raises:
            ValueError: an unknown key, told with the nearest; a field that is missing or wrong.
        """
        _check_known(values, cls, "a training file")
        return cls(**values)

    @property
    def config(self) -> DistributedConfig:
        """The layout as a checked configuration."""
        return DistributedConfig.from_dict(self.layout)

    def arguments(self, device_type: str) -> TrainingArguments:
        """The trainer's arguments; the progress is shown by us."""
        given = {**_DEFAULTS, **(_RESUMING if self.resume else {}), **self.training}
        return TrainingArguments(
            output_dir=self.output, disable_tqdm=True, use_cpu=device_type == "cpu", **given
        )


_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def torch_dtype(name: str) -> torch.dtype | str:
    """A dtype by name, or `"auto"`.

    Raises:
        ValueError: it is no floating-point dtype.
    """
    found = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if name == "auto":
        return name
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    raise ValueError(f"dtype must be auto, bfloat16, float32 or another of torch's, got {name!r}.")


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value or []


def _check_known(values: dict[str, Any], kind: type[Any], where: str) -> None:
    known = [each.name for each in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f": did you mean {near[0]!r}?" if near else f"; it may have {', '.join(known)}."
            raise ValueError(f"{where} has no field {key!r}{hint}")


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list[str]: "a list of texts",
    dict[str, Any]: "names and values",
}


def _as_kind(kind: Any, value: Any, name: str) -> Any:
    """A value of a field of that kind: numbers may be texts, as YAML reads 1e-4. Other kinds are not looked at.

    Raises:
        ValueError: it is of another kind.
    """
    kinds = set(get_args(kind)) if get_origin(kind) in (Union, UnionType) else {kind}
    kind = next(iter(kinds - {NoneType}))
    if (value is None and NoneType in kinds) or len(kinds - {NoneType}) > 1 or kind not in _WORDS:
        return value
    if kind in (int, float) and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind == list[str]:
        fits = isinstance(value, list) and all(isinstance(each, str) for each in value)
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = type(value) is (get_origin(kind) or kind)
    if not fits:
        raise ValueError(f"{name} must be {_WORDS[kind]}, got {value!r}.")
    return value


# -- on a rank


def run(content: dict[str, Any]) -> None:
    """Train on this rank; every rank of the layout must call.

    Args:
        content: the fields of `TrainJob` under "job", and under "ids" the files of token ids that
            the launcher made, if it did.
    """
    from ep_trainer import EPTrainer, ExpertLoad, JsonLines, Memory, Speed
    from expert_parallel.cli.progress import TrainProgress, without_printer

    job = TrainJob.from_dict(content["job"])
    ids: dict[str, str] = content.get("ids") or {}
    tokenizer = load_tokenizer(job.tokenizer or job.model)
    model = load(
        job.model,
        job.config,
        torch_dtype(job.dtype),
        from_scratch=job.from_scratch,
        seed=job.training.get("seed", 0),
    )
    data = _blocks(job.data, ids.get("train"), tokenizer, job)
    held_out = _blocks(job.eval_data, ids.get("eval"), tokenizer, job) if job.eval_data else None
    arguments = job.arguments(model.device.type)
    meters = [Speed(), Memory(), ExpertLoad()]
    metrics = JsonLines(Path(job.output) / "metrics.jsonl", meters)
    trainer = EPTrainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=held_out,
        data_collator=default_data_collator,  # the blocks are of one length
        processing_class=tokenizer,
        callbacks=[*meters, metrics, TrainProgress(console())],
    )
    without_printer(trainer)
    trainer.train(resume_from_checkpoint="auto" if job.resume else None)
    if held_out is not None:
        trainer.evaluate()
    trainer.save_model(job.output)
    console().print(f"saved to {job.output}", markup=False, soft_wrap=True)


def _blocks(paths: list[str], ids: str | None, tokenizer: Any, job: TrainJob) -> Blocks:
    row = load_ids(Path(ids)) if ids else token_ids(text_files(paths), tokenizer, job.text_key)
    return Blocks(row, job.sequence_length)


# -- the command


def check(job: TrainJob) -> nn.Module:
    """Check all that can be checked without ranks and without data; gives the model on meta.

    Raises:
        ValueError: something does not fit.
    """
    text_files([*job.data, *job.eval_data])
    check_arguments(job.arguments("cpu"))
    if not job.from_scratch:
        check_weights(job.model)
    model = check_plan(read_config(job.model), job.config)
    _check_output(job)
    return model


def _check_output(job: TrainJob) -> None:
    """Check that the trained model can be saved, which is done last.

    Raises:
        ValueError: it can't, or it would replace the one that the training starts from.
    """
    output, model = Path(job.output), Path(job.model)
    if not job.from_scratch and model.is_dir() and output.resolve() == model.resolve():
        raise ValueError(f"output {output} is the folder of the model: give another one.")
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ValueError(
            f"output {output} can't be written to ({error.strerror}): give another folder."
        ) from error


def prepare(job: TrainJob, folder: Path) -> dict[str, Any]:
    """Tokenize the data, once for all ranks.

    Raises:
        ValueError: the data or the tokenizer does not fit.
    """
    config = read_config(job.model)
    tokenizer = load_tokenizer(job.tokenizer or job.model)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if isinstance(vocabulary, int) and len(tokenizer) > vocabulary:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {vocabulary}."
        )
    ids: dict[str, str] = {}
    for name, paths in (("train", job.data), ("eval", job.eval_data)):
        if paths:
            row = token_ids(text_files(paths), tokenizer, job.text_key)
            Blocks(row, job.sequence_length)
            save_ids(row, folder / f"{name}.ids")
            ids[name] = str(folder / f"{name}.ids")
    return {"job": dataclasses.asdict(job), "ids": ids}


def _merged(file: Path | None, flags: dict[str, Any], sets: list[str]) -> TrainJob:
    values = options.read_mapping(file) if file else {}
    for name in ("layout", "training"):
        if not isinstance(values.get(name) or {}, dict):
            raise ValueError(f"{name} must hold names and values, got {values[name]!r}.")
        given = {key: value for key, value in flags.pop(name).items() if value is not None}
        values[name] = {**(values.get(name) or {}), **given}
    for text in sets:
        key, found, value = text.partition("=")
        if not found:
            raise ValueError(f"--set takes name=value, got {text!r}.")
        values["training"][key] = options.value_of(value)
    given = {key: value for key, value in flags.items() if value is not None and value != []}
    values.update({key: value for key, value in given.items() if value is not False})
    return TrainJob.from_dict(values)


@tells_errors
def train(
    file: Annotated[
        Path | None,
        typer.Argument(help="A YAML or JSON file of the job; the flags win over it."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Text file or folder; repeatable.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder to save to.")] = None,
    eval_data: Annotated[list[str] | None, typer.Option(help="Text to evaluate on.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="If not beside the model.")] = None,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Random weights.")] = False,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a sample.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16, float32, ...")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a data shard.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Save checkpoints; go on from the newest, if any.")
    ] = False,
    restarts: Annotated[
        int | None, typer.Option(help="Start the ranks again so often after a failure.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value of TrainingArguments; repeatable."),
    ] = None,
    tp: options.Tp = None,
    fsdp: options.Fsdp = None,
    ep: options.Ep = None,
    dp_replicate: options.DpReplicate = None,
    pp: options.Pp = None,
    sequence_parallel: options.SequenceParallel = None,
    ep_implementation: options.Implementation = None,
    layout: options.LayoutFile = None,
    processes: options.Processes = None,
    traceback: options.Traceback = False,
) -> None:
    """Train on text, and save an ordinary Hugging Face checkpoint.

    Each log is a line of metrics.jsonl in the output folder.
    Starts the ranks on this machine. For several machines, start it with torchrun:
    torchrun --nnodes 2 ... -m expert_parallel train job.yaml
    """
    fields = options.layout_fields(
        layout,
        tp_size=tp,
        fsdp_size=fsdp,
        ep_size=ep,
        dp_replicate_size=dp_replicate,
        pp_size=pp,
        enable_sequence_parallel=sequence_parallel,
        ep_implementation=ep_implementation,
    )
    flags = {
        "model": model,
        "data": data,
        "output": output,
        "eval_data": eval_data,
        "tokenizer": tokenizer,
        "from_scratch": from_scratch,
        "sequence_length": sequence_length,
        "dtype": dtype,
        "resume": resume,
        "restarts": restarts,
        "layout": fields,
        "training": {
            "max_steps": steps,
            "per_device_train_batch_size": batch_size,
            "learning_rate": learning_rate,
            "seed": seed,
        },
    }
    with options.world_of(processes):
        job = _merged(file, flags, sets or [])
        size = job.config.world_size
    if under_launcher():
        run_here(run, {"job": dataclasses.asdict(job)})
        return
    if processes is not None:
        job.config.layout.check_world_size(processes)
    out = console()
    show_layout(out, check(job), job.config)
    with tempfile.TemporaryDirectory(prefix="ep-train-") as made:
        with out.status("reading the data"):
            content = prepare(job, Path(made))
        launch("train", content, size, Path(made), traceback=traceback, restarts=job.restarts)
