"""What `ep plan --gpus` tells: the layouts of a model, sorted, and why the others are none."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from expert_parallel.estimate import Choice, Found, Refused
from expert_parallel.estimate.devices import GIB
from expert_parallel.estimate.search import layout_text

KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "states",
    "activations": "activations",
    "gathered_buffers": "gathered",
    "exchange_buffers": "exchange",
    "temporaries": "temporary",
}
"""The kinds of memory, and what they are called in a table."""
_UNITS = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}


_LEGEND = (
    "own: the rate counted as each rank's own batch, which the ranks of a TP group share. static: parameters, "
    "gradients and AdamW states. sent: by a rank in a step, over each axis; a=b are axes of the same ranks."
)


def bytes_of(text: str) -> int:
    """The bytes that a text such as `80GiB` or `141 GB` means.

    Raises:
        ValueError: it has no number, or no unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = found and _UNITS.get(found[2].upper())
    if not found or not unit or not float(found[1]):
        raise ValueError(
            f"--memory must be a number and a unit, such as 80GiB or 141GB, got {text!r}."
        )
    return int(float(found[1]) * unit)


def name_of(choice: Choice) -> str:
    """The layout, and how it runs, on one line."""
    told = [layout_text(choice.config)]
    if not choice.gradient_checkpointing:
        told.append("no checkpointing")
    if choice.experts_recompute != "none":
        told.append(f"experts_recompute={choice.experts_recompute}")
    return ", ".join(told)


def traffic_of(choice: Choice) -> dict[str, int]:
    """The bytes that a rank sends in a step, by axis."""
    sent: dict[str, int] = defaultdict(int)
    for each in choice.estimate.traffic:
        sent[each.axis] += each.sent_bytes
    return dict(sent)


def grouped(refused: Iterable[Refused]) -> list[tuple[str, list[Refused]]]:
    """By reason, the most frequent first."""
    groups: dict[str, list[Refused]] = defaultdict(list)
    for each in refused:
        groups[each.reason].append(each)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))


def told_reason(reason: str, group: list[Refused]) -> str:
    """A reason with what was said of its first layout, and all its layouts."""
    first = group[0].detail
    said = first if re.sub(r"\d+", "N", first).startswith(reason) else f"{reason} ({first})"
    for_first = f" [{group[0].layout}]" if len(group) > 1 else ""
    layouts = "; ".join(each.layout for each in group)
    return f"{said.rstrip('.')}{for_first}: {layouts}"


def show_found(out: Console, found: Found, *, most: int) -> None:
    """Print the choices, and why other layouts are none."""
    usable = (found.memory_bytes - found.reserved_bytes) / GIB
    out.print(
        f"{len(found.choices)} choices fit into {usable:.1f} GiB ({found.memory_bytes / GIB:.1f} GiB without "
        f"{found.reserved_bytes / GIB:.0f} GiB for what is not counted), {len(found.refused)} layouts don't, "
        f"{len(found.not_estimated)} are not estimated.\n",
        soft_wrap=True,
    )
    shown = found.choices[:most]
    if shown:
        out.print(_table(shown))
        if len(shown) < len(found.choices):
            out.print(f"... and {len(found.choices) - len(shown)} more (--top).")
        out.print(_LEGEND, soft_wrap=True)
        out.print()
        for number, choice in enumerate(shown, 1):
            out.print(f"{number:>2}  {code(choice)}", markup=False, soft_wrap=True)
    if found.refused:
        out.print("\n[bold]Not feasible[/]")
        for reason, group in grouped(found.refused):
            out.print(f"- {escape(told_reason(reason, group))}", soft_wrap=True)
    if found.not_estimated:
        out.print(
            "\n[bold]Not estimated[/] (parameters, gradients and AdamW states of the fullest rank)"
        )
        for reason, group in grouped(found.not_estimated):
            told = "; ".join(_with_static(each) for each in group)
            out.print(f"- {escape(f'{reason}: {told}')}", soft_wrap=True)


def code(choice: Choice) -> str:
    """The `DistributedConfig`, and what else is to be set."""
    rest = []
    if choice.experts_recompute != "none":
        rest.append(f"experts_recompute={choice.experts_recompute!r}")
    if choice.gradient_checkpointing:
        rest.append("gradient_checkpointing=True")
    return choice.code + (f"  # {', '.join(rest)}" if rest else "")


def _with_static(each: Refused) -> str:
    told = each.layout
    if each.static_bytes is not None:
        told += f" ({each.static_bytes / GIB:.1f} GiB)"
    return told


def _table(choices: Iterable[Choice]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("layout", overflow="fold")
    for name in ("tokens/s/GPU", "own", "peak GiB", "static", "activ.", "buffers", "temp."):
        table.add_column(name, justify="right")
    table.add_column("sent GiB", overflow="fold")
    table.add_column("limited by")
    for number, choice in enumerate(choices, 1):
        given, kinds = choice.estimate, choice.estimate.peak.by_kind
        sums = (
            kinds["parameters"] + kinds["gradients"] + kinds["optimizer_states"],
            kinds["activations"],
            kinds["gathered_buffers"] + kinds["exchange_buffers"],
            kinds["temporaries"],
        )
        sent = ", ".join(f"{axis} {size / GIB:.1f}" for axis, size in traffic_of(choice).items())
        table.add_row(
            str(number),
            name_of(choice),
            f"{given.unique_tokens_per_second_per_device:,.0f}",
            f"{given.tokens_per_second_per_device:,.0f}",
            f"{given.peak.bytes / GIB:.1f}" + ("" if choice.extrapolated else "*"),
            *(f"{size / GIB:.1f}" for size in sums),
            sent,
            given.time.bottleneck.removeprefix("kernels: "),
        )
    return table
