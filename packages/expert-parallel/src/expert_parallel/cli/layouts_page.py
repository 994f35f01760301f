"""A page with the layouts that `ep plan --gpus` finds: one file, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from expert_parallel.cli.layouts import KINDS, code, grouped, name_of, told_reason, traffic_of
from expert_parallel.estimate import Choice, Found
from expert_parallel.estimate.devices import GIB

_COLORS = ("#2f5d8a", "#5b8db8", "#a9c6df", "#d98b3a", "#7a9e5f", "#b9a13c", "#a0687a")
_MOST_BLOCKS = 4  # of ranks in the picture

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #ffffff; --faint: #67727f; --line: #d8dee5; --box: #f5f7f9 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --paper: #15191e; --faint: #98a3ae; --line: #343c45; --box: #1d232a }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem; max-width: 75rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .25rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
p { margin: .25rem 0; max-width: 60rem } .faint { color: var(--faint) }
.wide { overflow-x: auto } pre { background: var(--box); padding: .75rem; overflow-x: auto; font-size: .8rem;
  line-height: 1.35; border-radius: 6px }
table { border-collapse: collapse; font-size: .875rem; width: 100% }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th { color: var(--faint); font-weight: 600 } th:nth-child(2), td:nth-child(2), td:last-child, th:last-child {
  text-align: left }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .875rem }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; vertical-align: -.05rem }
.bar { margin: .6rem 0 } .bar div { display: flex; justify-content: space-between; gap: 1rem; font-size: .875rem }
.bar b { font-weight: 600; white-space: nowrap } svg { display: block; width: 100%; height: 1.1rem }
li { margin: .35rem 0; overflow-wrap: anywhere; font-size: .9rem } ul { padding-left: 1.2rem }
code { font-size: .8rem }
"""


def page_of(found: Found, *, title: str, conditions: str, experts: int | None, most: int) -> str:
    """The page as HTML.

    Args:
        found: of the search.
        title: the model and the devices.
        conditions: what was estimated.
        experts: of a layer, for the picture; None: the model has none.
        most: how many choices are shown.
    """
    shown = found.choices[:most]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(conditions)} Estimated, not measured.</p>',
    ]
    if shown:
        parts += [
            "<h2>Memory at the peak of a step</h2>",
            _key(),
            *(_bar(number, choice, found) for number, choice in enumerate(shown, 1)),
            "<h2>Choices</h2>",
            f'<div class="wide">{_table(shown)}</div>',
            "<h2>To paste</h2>",
            f"<pre>{escape(_codes(shown))}</pre>",
            f"<h2>Ranks of choice 1</h2>{_picture(shown[0], experts)}",
        ]
    else:
        parts.append("<p>No layout fits.</p>")
    if found.refused:
        told = (told_reason(reason, group) for reason, group in grouped(found.refused))
        parts.append(f"<h2>Not feasible</h2>{_listed(told)}")
    if found.not_estimated:
        told = (
            f"{reason}: "
            + "; ".join(
                f"{each.layout} (at least {(each.static_bytes or 0) / GIB:.1f} GiB)"
                for each in group
            )
            for reason, group in grouped(found.not_estimated)
        )
        parts.append(f"<h2>Not estimated</h2>{_listed(told)}")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _listed(items: object) -> str:
    assert hasattr(items, "__iter__")
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _key() -> str:
    names = (
        f'<span><i style="background:{color}"></i>{escape(name)}</span>'
        for name, color in zip(KINDS.values(), _COLORS, strict=True)
    )
    return f'<div class="key">{"".join(names)}</div>'


def _bar(number: int, choice: Choice, found: Found) -> str:
    """The peak by kind; the whole width is the memory of a device, the mark is where it should end."""
    at, cells = 0.0, []
    for kind, color in zip(KINDS, _COLORS, strict=True):
        size = choice.estimate.peak.by_kind[kind]
        width = 100 * size / found.memory_bytes
        told = f"{KINDS[kind]} {size / GIB:.1f} GiB"
        cells.append(
            f'<rect x="{at:.3f}" y="0" width="{width:.3f}" height="10" fill="{color}">'
            f"<title>{escape(told)}</title></rect>"
        )
        at += width
    free = 100 * (found.memory_bytes - found.reserved_bytes) / found.memory_bytes
    return (
        f'<div class="bar"><div><span>{number}. {escape(name_of(choice))}</span>'
        f"<b>{choice.estimate.peak.bytes / GIB:.1f} GiB</b></div>"
        '<svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name_of(choice))}">'
        '<rect x="0" y="0" width="100" height="10" fill="#8884"></rect>'
        f'{"".join(cells)}<rect x="{free:.3f}" y="0" width=".15" height="10" fill="#c33"></rect></svg></div>'
    )


def _table(choices: Sequence[Choice]) -> str:
    names = ("", "layout", "tokens/s/GPU", "own batch", "peak GiB", "ms", "sent GiB", "limited by")
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for number, choice in enumerate(choices, 1):
        given = choice.estimate
        sent = ", ".join(f"{axis} {size / GIB:.1f}" for axis, size in traffic_of(choice).items())
        cells = (
            str(number),
            name_of(choice),
            f"{given.unique_tokens_per_second_per_device:,.0f}",
            f"{given.tokens_per_second_per_device:,.0f}",
            f"{given.peak.bytes / GIB:.1f}",
            f"{1000 * given.time.seconds:.0f}",
            sent,
            given.time.bottleneck.removeprefix("kernels: "),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _codes(choices: Sequence[Choice]) -> str:
    return "\n".join(f"{number:>2}  {code(choice)}" for number, choice in enumerate(choices, 1))


def _picture(choice: Choice, experts: int | None) -> str:
    layout = choice.config.layout
    fits = experts is not None and experts % layout.ep == 0
    blocks = layout.picture(experts if fits else None).split("\n\n")
    rest = "\n\n..." if len(blocks) > _MOST_BLOCKS else ""
    return f"<pre>{escape(chr(10).join(blocks[:_MOST_BLOCKS]) + rest)}</pre>"
