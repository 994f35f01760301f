"""Make the table of docs/supported-models.md: `python tools/supported_models.py [CONFIGURATION ...]`.

Runs every MoE family of the installed transformers, or the ones that are named, as
integration_tests/test_families.py does, on eight ranks of this machine (about ten minutes for all on
two cores), and writes what came of it. Rows of the others are kept.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "supported-models.md"
WORKS = "yes"
_COLUMNS = ("Configuration", "Model", "Notes")


def reason(error: BaseException) -> str:
    """An error in one line of the table: what the first rank raised, else the text itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (raised or lines or [type(error).__name__])[0].replace("|", "\\|")[:200]


def version() -> str:
    """The transformers version that the table was made with."""
    found = re.search(r"transformers (\d[\w.]*)", PAGE.read_text())
    return found[1] if found else ""


def read_table() -> dict[str, dict[str, str]]:
    """What the page says of each configuration, by layout."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    if not rows:
        return {}
    header, _, *body = rows
    layouts = [name for name in header if name not in _COLUMNS]
    return {row[0].strip("`"): {name: row[header.index(name)] for name in layouts} for row in body}


def page(results: dict[str, dict[str, str]], models: dict[str, str], notes: dict[str, str]) -> str:
    """The whole page.

    Args:
        results: by configuration, then by layout: `WORKS` or a reason.
        models: the model class that was run, by configuration.
        notes: what to know, by configuration.
    """
    import transformers

    layouts = list(next(iter(results.values())))
    works = sum(set(row.values()) == {WORKS} for row in results.values())
    header = [*_COLUMNS[:2], *layouts, _COLUMNS[2]]
    lines = [
        "# Supported models",
        "",
        (
            "Every configuration class of transformers "
            f"{transformers.__version__} that brings an expert plan, and Llama 4's, which brings none. A "
            "tiny random checkpoint of each is loaded sharded on eight ranks, in two layouts, and runs "
            "forward and backward. `yes`: the loss and every gradient equal those of one process. "
            f"That is so for {works} of {len(results)}; a reason stands where it is not. Multimodal "
            "models contain the text model that is listed, and its plan with it."
        ),
        "",
        "Made by `python tools/supported_models.py`; `nox -s tests -- --all-layouts` checks every row.",
        "",
        "| " + " | ".join(header) + " |",
        "| " + " | ".join("---" for _ in header) + " |",
    ]
    for name, row in results.items():
        cells = [f"`{name}`", f"`{models[name]}`", *row.values(), notes.get(name, "")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(chosen: list[str]) -> None:
    """Run the chosen families, or all, and write the page after each."""
    sys.path.insert(0, str(ROOT / "integration_tests"))
    import transformers
    from families import NOTES, family_configs, model_class
    from sharded_families import LAYOUTS, compare

    import ep_kernels  # noqa: F401  # the ranks then start with it
    import ep_plans  # noqa: F401
    import expert_parallel  # noqa: F401
    from ep_testing import RankPool

    transformers.logging.set_verbosity_error()
    configs = family_configs()
    if unknown := [name for name in chosen if name not in configs]:
        raise SystemExit(f"no such configuration: {unknown}. Known: {list(configs)}")
    models = {name: model_class(config).__name__ for name, config in configs.items()}
    results = read_table() if version() == transformers.__version__ else {}
    pool = RankPool()
    start = time.perf_counter()
    for name in chosen or configs:
        row = {}
        for layout, sizes in LAYOUTS.items():
            try:
                compare(pool, name, sizes)
                row[layout] = WORKS
            except AssertionError as error:
                row[layout] = reason(error)
            print(f"{time.perf_counter() - start:6.0f} s  {name}, {layout}: {row[layout]}")
        results[name] = row
        done = {name: results[name] for name in configs if name in results}
        PAGE.write_text(page(done, models, NOTES))
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
