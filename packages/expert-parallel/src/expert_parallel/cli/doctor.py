"""`ep doctor`: what this machine can run, and why it can't run the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import platform
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ep_dispatch import EPImplementationInterface
from ep_dispatch.megamoe import device_problem, load_library
from ep_kernels import choose_backend
from expert_parallel.cli.console import console, tells_errors

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "triton",
    "ep-mesh",
    "ep-kernels",
    "ep-dispatch",
    "ep-plans",
    "ep-trainer",
    "expert-parallel",
)
_OPTIONAL = frozenset({"triton", "tokenizers"})
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SIZE = 128  # a matrix size that any kernel takes


@dataclass(frozen=True)
class Finding:
    """Whether something can be used here.

    Attributes:
        name: what it is.
        works: it can be used; None: it is a fact, not a capability.
        note: its version, or what it does, or why it can't be used.
    """

    name: str
    works: bool | None
    note: str = ""


def versions() -> list[Finding]:
    """Python and the packages that matter."""
    found = [Finding("python", None, platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append(Finding(name, None, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            works = None if name in _OPTIONAL else False
            found.append(Finding(name, works, "not installed"))
    return found


def devices() -> list[Finding]:
    """The accelerators of this machine, or its CPU."""
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this torch is built without CUDA)"
        cpu = f"{platform.machine()}, {torch.get_num_threads()} threads a process"
        return [Finding("cuda", False, f"no GPU{built}"), Finding("cpu", True, cpu)]
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        note = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, sm_{facts.major}{facts.minor}"
        found.append(Finding(f"cuda:{index}", True, note))
    return found


def backends() -> list[Finding]:
    """The communication backends of torch.distributed."""
    if not dist.is_available():
        return [Finding("torch.distributed", False, "this torch is built without it")]
    gpus = torch.cuda.is_available()
    nccl = dist.is_nccl_available()
    why = "" if nccl and gpus else "no GPU" if nccl else "this torch is built without it"
    return [
        Finding("nccl", nccl and gpus, why or "between GPUs"),
        Finding("gloo", dist.is_gloo_available(), "between CPU processes"),
    ]


def implementations() -> list[Finding]:
    """The ways for tokens to reach the experts, by name in the registry."""
    what = {
        "all_to_all": "routed tokens move; any layout",
        "all_to_all_hierarchical": "the same in two hops, between nodes and inside them",
        "all_reduce": "outputs are summed; ep_size == tp_size",
        "auto": "all_reduce at inference where a group shares a batch, else all_to_all",
    }
    found = []
    for name in EPImplementationInterface.names():
        if name == "deepgemm_megamoe":
            problems = _megamoe_problems()
            note = "; ".join(problems) or "FP4 experts, inference; ep_size == tp_size"
            found.append(Finding(name, not problems, note))
        elif name == "symmetric_memory":
            found.append(_symmetric_memory())
        else:
            found.append(Finding(name, True, what.get(name, "registered by you")))
    return found


def _symmetric_memory() -> Finding:
    """What each rank of an EP group looks at when it makes its buffer."""
    name = "symmetric_memory"
    what = "rows written into other ranks' memory; EP group on one machine"
    if not torch.cuda.is_available():
        return Finding(name, True, f"{what}, here of CPU processes")
    refusals = []
    if importlib.util.find_spec("triton") is None:
        refusals.append("its kernel needs triton; pip install triton")
    refusals += [
        f"GPU {one} cannot access the memory of GPU {other}"
        for one, other in itertools.permutations(range(torch.cuda.device_count()), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    return Finding(name, not refusals, "; ".join(refusals) or what)


def _megamoe_problems() -> list[str]:
    problems = [problem] if (problem := device_problem()) else []
    try:
        load_library()
    except ImportError as error:
        problems.append(" ".join(str(error).split()))
    return problems


def kernels() -> list[Finding]:
    """Who computes the experts' matrix products here, by dtype."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for dtype in _KERNEL_DTYPES:
        choice = choose_backend(device, dtype, _SIZE, _SIZE)
        name = f"{str(dtype).removeprefix('torch.')} on {device.type}"
        found.append(Finding(name, True, f"{choice.backend}: {choice.reason}"))
    try:
        choose_backend(device, torch.bfloat16, _SIZE, _SIZE, backend="deep_gemm")
    except ValueError as error:
        found.append(Finding("deep_gemm", False, " ".join(str(error).split())))
    else:
        found.append(Finding("deep_gemm", True, 'asked for by experts_backend="deep_gemm"'))
    return found


def show(out: Console, title: str, findings: list[Finding]) -> None:
    """Print one table."""
    table = Table(box=None, pad_edge=False, show_header=False, title=None)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    for finding in findings:
        table.add_row(f"  {escape(finding.name)}", marks[finding.works], escape(finding.note))
    out.print(f"[bold]{title}[/]")
    out.print(table)


@tells_errors
def doctor() -> None:
    """Show versions, devices, backends, and which implementations and kernels can run here."""
    out = console()
    for title, findings in (
        ("versions", versions()),
        ("devices", devices()),
        ("backends", backends()),
        ("ep implementations", implementations()),
        ("kernels", kernels()),
    ):
        show(out, title, findings)
