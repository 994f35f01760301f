"""`ep plan`: who holds and sends what, for any model and sizes, without processes and without weights."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from transformers import PreTrainedConfig

from ep_mesh import DistributedConfig, Layout
from ep_plans import ParameterSharding, Plans, num_experts_of, plan_stages, resolve_plans
from ep_plans.patterns import rule_for, wildcard
from ep_plans.styles import STYLES, Scope
from expert_parallel.cli import options
from expert_parallel.cli.console import console, one_line, tells_errors
from expert_parallel.cli.layouts import bytes_of, show_found
from expert_parallel.cli.layouts_page import page_of
from expert_parallel.cli.stages import Held, heaviest_part, show_stages, stage_traffic
from expert_parallel.cli.traffic import Traffic, step_traffic
from expert_parallel.estimate import DEVICES, search
from expert_parallel.estimate import estimate as estimate_step
from expert_parallel.estimate.devices import GIB, device_of
from expert_parallel.estimate.search import exactly
from expert_parallel.meta import build_on_meta, read_config

_MOST_BLOCKS = 8  # of ranks in the picture
_VERIFIED = 3  # choices that --exact simulates whole
_SEARCH = "Search"
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Row:
    """Parameters or modules of one pattern that are treated alike.

    Attributes:
        pattern: their name, with `*` for a layer number.
        count: how many there are.
        style: the rule that applies; empty: none.
        sharded: the axes they are sharded over, first cut first.
        total: elements in all.
        local: elements that a rank holds, the least and the most.
    """

    pattern: str
    count: int
    style: str
    sharded: str
    total: int = 0
    local: tuple[int, int] = (0, 0)


class _Held(NamedTuple):
    owner: str
    numel: int
    by_rank: tuple[int, ...]


def rows_of(
    model: nn.Module, plans: Plans, shardings: dict[str, ParameterSharding], layout: Layout
) -> list[Row]:
    """The resolved plan, grouped by pattern, in the order of the model."""
    local_numel = _local_numels(layout)
    groups: dict[tuple[str, str, str], list[_Held]] = {}
    for name, parameter in model.named_parameters():
        style = plans.ep.get(name) or plans.tp.get(name) or ""
        sharding = shardings[name]
        owner = name.removesuffix(".weight").removesuffix(".bias")
        held = _Held(owner, parameter.numel(), local_numel(sharding, tuple(parameter.shape)))
        key = (wildcard(owner), style, _axes(sharding, layout))
        groups.setdefault(key, []).append(held)
    rows = [
        Row(
            pattern,
            len({held.owner for held in found}),
            style,
            axes,
            sum(held.numel for held in found),
            _range(_sum_by_rank(held.by_rank for held in found)),
        )
        for (pattern, style, axes), found in groups.items()
    ]
    return _module_rows(model, plans) + rows


def _module_rows(model: nn.Module, plans: Plans) -> list[Row]:
    """Rules that change how a module runs, without being a rule of its own parameters."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, module in model.named_modules():
        style = plans.ep.get(name) or plans.tp.get(name)
        if style is None:
            continue
        own = any(True for _ in module.named_parameters(recurse=False))
        if not own or STYLES[style].scope is not Scope.DENSE:
            counts[wildcard(name), style] += 1
    return [Row(pattern, count, style, "") for (pattern, style), count in counts.items()]


def rank_totals(
    model: nn.Module, shardings: dict[str, ParameterSharding], layout: Layout
) -> list[int]:
    """The number of elements that each rank holds."""
    local_numel = _local_numels(layout)
    return _sum_by_rank(
        local_numel(shardings[name], tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    )


def _local_numels(layout: Layout) -> Any:
    """A function from a sharding and a shape to the elements on each rank, each computed once."""

    @cache
    def local_numel(sharding: ParameterSharding, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sharding.local_numel(shape, layout, rank) for rank in range(layout.world_size))

    return local_numel


def _sum_by_rank(held: Iterable[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip(*held, strict=True)]


def _range(numbers: list[int]) -> tuple[int, int]:
    return min(numbers), max(numbers)


def _axes(sharding: ParameterSharding, layout: Layout) -> str:
    axes = []
    if sharding.cut is not None:
        copies = f" ({sharding.cut.copies} copies)" if sharding.cut.copies > 1 else ""
        axes.append(f"{sharding.cut.axis}{copies}")
    if sharding.data_axis is not None and layout.size(sharding.data_axis) > 1:
        axes.append(sharding.data_axis)
    return " + ".join(axes)


# -- rules


def broken_rules(model: nn.Module, fields: dict[str, Any], processes: int | None) -> list[str]:
    """Every rule that the fields break for this model, as far as one does not hide another."""
    found: list[str] = []

    def attempt(**changes: Any) -> None:
        try:
            config = DistributedConfig.from_dict({**fields, **changes})
            if processes is not None and not changes:
                config.layout.check_world_size(processes)
            resolve_plans(model, config)
            if config.pp_size > 1:
                plan_stages(model, config)
        except ValueError as error:
            text = " ".join(str(error).split())
            if text not in found:
                found.append(text)

    attempt()
    if found:  # TP alone and EP alone: what the first error may have hidden
        attempt(ep_size=1, ep_implementation="auto")
        attempt(tp_plan={}, tp_size=fields.get("tp_size") or 1)
    return found


def experts_per_layer(model: nn.Module, config: DistributedConfig) -> int | None:
    """The experts of the first layer that has some; None for a dense model."""
    rules: dict[str, str] = {}
    with suppress(ValueError):
        alone = replace(config, ep_size=1, ep_implementation="auto", tp_plan={})
        rules = resolve_plans(model, alone).ep_rules
    for name, module in model.named_modules():
        style = rule_for(name, rules)
        if style in STYLES and STYLES[style].scope is Scope.EXPERTS:
            return num_experts_of(module)
    return None


# -- printing


def show_layout(out: Console, model: nn.Module, config: DistributedConfig) -> None:
    """Print the model's and the layout's sizes, and the picture."""
    layout, experts = config.layout, experts_per_layer(model, config)
    told = f"{experts} experts a layer" if experts else "no experts"
    out.print(
        f"{type(model).__name__}, {told}, {layout.world_size} "
        f"{'process' if layout.world_size == 1 else 'processes'}\n",
        markup=False,
        soft_wrap=True,
    )
    fits = experts is not None and experts % layout.ep == 0
    blocks = layout.picture(experts if fits else None).split("\n\n")
    shown = blocks[:_MOST_BLOCKS]
    out.print("\n\n".join(shown), markup=False, soft_wrap=True)
    if len(blocks) > len(shown):
        out.print(f"\n... and so on, to rank {layout.world_size - 1}")
    out.print()


def show_plan(out: Console, model: nn.Module, config: DistributedConfig, itemsize: int) -> None:
    """Print the plan that applies, and what each rank holds."""
    layout = config.layout
    show_stages(out, model, config)
    whole = sum(parameter.numel() for parameter in model.parameters())
    model, plans, shardings = heaviest_part(
        model, config, lambda held: max(rank_totals(held[0], held[2], layout))
    )
    if config.pp_size > 1:
        out.print("What the ranks of the heaviest stages hold:\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("module or parameter", overflow="fold")
    table.add_column("n", justify="right")
    table.add_column("style", overflow="fold")
    table.add_column("sharded over", overflow="fold")
    table.add_column("parameters", justify="right")
    table.add_column("per rank", justify="right")
    for row in rows_of(model, plans, shardings, layout):
        has_elements = row.total > 0
        table.add_row(
            escape(row.pattern),
            str(row.count),
            row.style or "-",
            row.sharded or ("-" if has_elements else ""),
            f"{row.total:,}" if has_elements else "",
            _span(row.local) if has_elements else "",
        )
    total = sum(parameter.numel() for parameter in model.parameters())
    held = _range(rank_totals(model, shardings, layout))
    table.add_section()
    table.add_row("all", "", "", "", f"{total:,}", _span(held))
    out.print(table)
    _show_units(out, plans, config)
    # AdamW keeps two states per element, in the parameter's dtype.
    weights, rest = _size(held[1] * itemsize), _size(3 * held[1] * itemsize)
    number = f"{whole / 1e9:.3g} B" if whole >= 1e8 else f"{whole / 1e6:.3g} M"
    out.print(
        f"\nA rank holds {held[1] / whole:.1%} of {number} parameters: {weights} "
        f"of weights, and in training {rest} of gradients and AdamW states "
        f"({itemsize} bytes each). Activations and gathered weights come on top.",
        soft_wrap=True,
    )


def _size(nbytes: int) -> str:
    unit, name = (2**30, "GiB") if nbytes >= 2**27 else (2**20, "MiB")
    return f"{nbytes / unit:.2f} {name}"


def show_traffic(
    out: Console,
    model: nn.Module,
    config: DistributedConfig,
    itemsize: int,
    *,
    batch_size: int,
    sequence_length: int,
) -> None:
    """Print what a rank sends in a training step."""
    tokens = batch_size * sequence_length

    def sent(held: Held) -> list[Traffic]:
        return step_traffic(*held, config, tokens=tokens, itemsize=itemsize)

    try:
        busiest = heaviest_part(model, config, lambda held: sum(each.sent for each in sent(held)))
        found = sent(busiest)
        found += stage_traffic(model, config, tokens=tokens, itemsize=itemsize)
    except ValueError as error:
        out.print(f"\nThe traffic can't be computed: {error}", markup=False, soft_wrap=True)
        return
    out.print(
        f"\nA rank sends in a training step of {batch_size} x {sequence_length} tokens a data shard "
        "(computed from this plan, not measured; experts chosen evenly):\n",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("axis")
    table.add_column("what")
    table.add_column("MiB", justify="right")
    for each in found:
        table.add_row(each.axis, each.what, f"{each.sent / 2**20:,.1f}")
    table.add_section()
    table.add_row("all", "", f"{sum(each.sent for each in found) / 2**20:,.1f}")
    out.print(table)


def _show_units(out: Console, plans: Plans, config: DistributedConfig) -> None:
    if config.dp_size == 1 or not plans.fsdp:
        return
    units = Counter((wildcard(name), style) for name, style in plans.fsdp.items())
    text = ", ".join(f"{pattern} ({n} x {style})" for (pattern, style), n in units.items())
    out.print(f"\nFSDP units: {text}", markup=False, soft_wrap=True)


def _span(held: tuple[int, int]) -> str:
    least, most = held
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def show_estimate(
    out: Console,
    model: PreTrainedConfig,
    config: DistributedConfig,
    *,
    device: str,
    dtype: torch.dtype,
    batch_size: int,
    sequence_length: int,
) -> None:
    """Print the estimated peak and rate of a training step, with and without gradient checkpointing."""
    for checkpointing in (True, False):
        how = "with gradient checkpointing" if checkpointing else "without"
        try:
            found = estimate_step(
                model,
                config,
                sequence_length=sequence_length,
                micro_batch=batch_size,
                gradient_checkpointing=checkpointing,
                dtype=dtype,
                device=device,
                sampled=True,
            )
        except Exception as error:  # noqa: BLE001 - a model's forward may do anything
            out.print(f"\nNo step is estimated: {one_line(error)}", markup=False, soft_wrap=True)
            return
        out.print(
            f"{'' if not checkpointing else chr(10)}Estimated on {device}, {how}: peak "
            f"{found.peak.bytes / GIB:.1f} GiB in {found.peak.phase}, "
            f"{found.unique_tokens_per_second_per_device:,.0f} tokens/s/GPU "
            f"({found.tokens_per_second_per_device:,.0f} counted as each rank's own), limited by "
            f"{found.time.bottleneck}.",
            markup=False,
            soft_wrap=True,
        )


def show_search(
    out: Console,
    model: str,
    gpus: int,
    *,
    memory: str | None,
    device: str,
    dtype: torch.dtype,
    batch_size: int,
    sequence_length: int,
    html: Path | None,
    exact: bool,
    pipelines: bool | None,
    most: int,
) -> None:
    """Print every layout that fits, and write the page."""
    size = bytes_of(memory) if memory is not None else device_of(device).memory_bytes
    if html is not None and not html.resolve().parent.is_dir():
        raise ValueError(f"--html: there is no folder {html.resolve().parent}.")
    given = read_config(model)
    built = build_on_meta(copy.deepcopy(given))
    found = search(
        given,
        gpus,
        sequence_length=sequence_length,
        micro_batch=batch_size,
        memory_bytes=size,
        dtype=dtype,
        device=device,
        pipelines=pipelines,
    )
    if exact:
        first = [exactly(choice, given) for choice in found.choices[:_VERIFIED]]
        found = replace(found, choices=(*first, *found.choices[_VERIFIED:]))
    experts = experts_per_layer(built, DistributedConfig())
    kind = type(built).__name__
    title = f"{kind} on {gpus} x {device}"
    told = f"{experts} experts a layer" if experts else "no experts"
    conditions = (
        f"{told}, {batch_size} x {sequence_length} tokens a data shard, {str(dtype).removeprefix('torch.')} "
        "parameters, gradients and AdamW states."
    )
    out.print(f"{title}: {conditions}\n", markup=False, soft_wrap=True)
    show_found(out, found, most=most)
    if html is not None:
        text = page_of(found, title=title, conditions=conditions, experts=experts, most=most)
        html.write_text(text, encoding="utf-8")
        out.print(f"\nWritten: {html}", markup=False, soft_wrap=True)
    if not found.choices:
        raise typer.Exit(1)


@tells_errors
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a config.json, a model type such as qwen3_moe, or a hub name.",
            show_default=False,
        ),
    ],
    tp: options.Tp = None,
    fsdp: options.Fsdp = None,
    ep: options.Ep = None,
    dp_replicate: options.DpReplicate = None,
    pp: options.Pp = None,
    sequence_parallel: options.SequenceParallel = None,
    ep_implementation: options.Implementation = None,
    layout: options.LayoutFile = None,
    processes: options.Processes = None,
    dtype: Annotated[str, typer.Option(help="Of all elements: float32, bfloat16, float16.")] = (
        "bfloat16"
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a data shard.")] = 1,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", "--seq", min=1, help="Tokens of a sample.")
    ] = 2048,
    device: Annotated[
        str, typer.Option(help=f"Whose times are estimated: {', '.join(DEVICES)}.")
    ] = "h100",
    estimate: Annotated[bool, typer.Option(help="Estimate a step's peak and rate.")] = True,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Find the layouts for so many.", rich_help_panel=_SEARCH),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Of a GPU, such as 80GiB; default: the device's.", rich_help_panel=_SEARCH
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="How many layouts to show.", rich_help_panel=_SEARCH)
    ] = 10,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with pictures.", rich_help_panel=_SEARCH)
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Simulate all layers of the first three.", rich_help_panel=_SEARCH
        ),
    ] = False,
    pipelines: Annotated[
        bool | None,
        typer.Option(
            help="Estimate layouts with stages too; default: if no other fits.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
) -> None:
    """Show who holds and sends what: the picture, the plan, memory and traffic, broken rules.

    With --gpus: every layout that fits, the fastest first. Needs no GPU, no processes and no weights.
    Exit code 1 if a rule is broken or no layout fits.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}.")
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
    out = console()
    elements: torch.dtype = getattr(torch, dtype)
    if gpus is not None:
        if fields or processes is not None:
            given = ", ".join([*fields, *(["--nproc"] if processes is not None else [])])
            raise ValueError(
                f"--gpus finds the layout itself, but {given} says one: leave one out."
            )
        show_search(
            out,
            model,
            gpus,
            memory=memory,
            device=device,
            dtype=elements,
            batch_size=batch_size,
            sequence_length=sequence_length,
            html=html,
            exact=exact,
            pipelines=pipelines,
            most=top,
        )
        return
    if memory is not None or html is not None or exact or pipelines is not None:
        raise ValueError(
            "--memory, --html, --exact and --pipelines belong to a search: add --gpus."
        )
    with torch.no_grad():
        built = build_on_meta(read_config(model))
    with options.world_of(processes):
        broken = broken_rules(built, fields, processes)
    with suppress(ValueError), options.world_of(processes):
        config = DistributedConfig.from_dict(fields)
        show_layout(out, built, config)
    if not broken:
        show_plan(out, built, config, _DTYPES[dtype])
        show_traffic(
            out,
            built,
            config,
            _DTYPES[dtype],
            batch_size=batch_size,
            sequence_length=sequence_length,
        )
        if estimate:
            show_estimate(
                out,
                read_config(model),
                config,
                device=device,
                dtype=elements,
                batch_size=batch_size,
                sequence_length=sequence_length,
            )
        return
    for rule in broken:
        out.print(f"[bold red]broken rule:[/] {escape(rule)}", soft_wrap=True)
    raise typer.Exit(1)
