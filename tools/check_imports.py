"""Check what each package imports, from the syntax trees alone: `python tools/check_imports.py`.

A package may import the standard library and what `ALLOWED` says; what it needs to be imported
must be declared in its pyproject.toml, and nothing else. A private name of a dependency (a part of its path begins
with an underscore, or it is in `PRIVATE`) is imported in the package's `_compat.py` alone, and
that file names the versions the name was seen in.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BELOW_TRAINER = {"torch", "ep_mesh", "ep_kernels", "ep_dispatch", "ep_plans"}
TRAINER = BELOW_TRAINER | {"transformers", "accelerate"}

# What a package may depend on.
ALLOWED = {
    "ep_mesh": {"torch"},
    "ep_kernels": {"torch"},
    "ep_dispatch": {"torch"},
    "ep_plans": {"torch", "ep_mesh", "ep_dispatch"},
    "ep_trainer": TRAINER | {"numpy"},
    "expert_parallel": TRAINER
    | {"ep_trainer", "safetensors", "huggingface_hub", "typer", "rich", "yaml"},
}
# What it may use where it is installed, without declaring that it needs it.
OPTIONAL = {
    "ep_kernels": {"triton", "deep_gemm"},
    "ep_dispatch": {"triton", "deep_gemm", "transformers", "torchtitan"},
    "ep_trainer": {"matplotlib"},
    "expert_parallel": {"matplotlib", "tokenizers", "peft"},
}
# Modules that are private though their names do not say so.
PRIVATE = (
    "transformers.conversion_mapping",
    "transformers.core_model_loading",
    "transformers.distributed",
    "transformers.integrations.fsdp",
    "transformers.integrations.tensor_parallel",
)
# Distributions whose import name is not their own with underscores.
IMPORT_NAMES = {"pyyaml": "yaml"}


@dataclass(frozen=True)
class Use:
    """A dotted name of another package, and the line that uses it."""

    name: str
    line: int

    @property
    def root(self) -> str:
        """The top-level package."""
        return self.name.partition(".")[0]

    @property
    def private(self) -> bool:
        """Whether the name is private to the package it comes from."""
        hidden = any(p.startswith("_") and not p.endswith("__") for p in self.name.split("."))
        return hidden or any(f"{self.name}.".startswith(f"{p}.") for p in PRIVATE)


def uses(tree: ast.Module) -> Iterator[Use]:
    """Every absolute import of a module, and every dotted name that starts at an imported one."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Use(alias.name, node.lineno)
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield Use(f"{node.module}.{alias.name}", node.lineno)
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            value = node.value
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in bound:
                yield Use(".".join([bound[value.id], *reversed(parts)]), node.lineno)


def declared(folder: Path) -> set[str]:
    """The import names of what a package's pyproject.toml depends on."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^\w.-]", d, maxsplit=1)[0] for d in project.get("dependencies", [])]
    return {IMPORT_NAMES.get(n.lower(), n.lower().replace("-", "_")) for n in names}


def faults(folder: Path) -> list[str]:
    """What is wrong with the imports of the package in `folder`, one line each."""
    package = folder.name.replace("-", "_")
    allowed, optional = ALLOWED[package], OPTIONAL.get(package, set())
    needs = declared(folder)
    found = [
        f"{folder.name}/pyproject.toml: depends on {name}, which this package must not"
        for name in sorted(needs - allowed)
    ]
    used = set()
    for path in sorted((folder / "src" / package).rglob("*.py")):
        where = f"{folder.name}/{path.relative_to(folder)}"
        text = path.read_text()
        compat = path.name == "_compat.py"
        if compat and not re.search(r"\d+\.\d+", text):
            found.append(f"{where}: must name the versions that its private names were seen in")
        seen = set()
        for use in uses(ast.parse(text, where)):
            if use.root in sys.stdlib_module_names or use.root == package:
                continue
            used.add(use.root)
            at = f"{where}:{use.line}: {use.name}"
            if use.root not in allowed | optional:
                found.append(f"{where}:{use.line}: imports {use.root}, which it must not")
            elif use.root not in needs | optional:
                found.append(f"{where}:{use.line}: imports {use.root}, which it does not declare")
            elif use.private and not compat and at not in seen:
                found.append(f"{at} is private: only {package}/_compat.py may touch it")
            seen.add(at)
    found += [
        f"{folder.name}/pyproject.toml: depends on {name}, which no module imports"
        for name in sorted(needs & allowed - used)
    ]
    return list(dict.fromkeys(found))


def main() -> None:
    """Print the faults of every package and fail if there are any."""
    folders = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
    found = [fault for folder in folders for fault in faults(folder)]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(folders)} packages, {len(found)} faulty imports")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
