"""Development sessions. `nox -l` lists them; plain `nox` runs lint, typecheck and tests."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.10"
nox.options.default_venv_backend = "uv|virtualenv"  # uv where it is installed, else pip
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typecheck", "tests"]

ROOT = Path(__file__).resolve().parent
PACKAGES = ["ep-mesh", "ep-kernels", "ep-dispatch", "ep-plans", "ep-trainer", "expert-parallel"]
PATHS = {"ep-testing": "tools/ep-testing"} | {p: f"packages/{p}" for p in PACKAGES}
DEV_GROUPS = ["test", "lint", "typecheck", "demo", "micro", "peft"]

# uv does not read pip's settings, so hand over where packages come from.
for name in ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL"):
    if value := os.environ.get(f"PIP_{name}"):
        separator = "," if name == "FIND_LINKS" else " "
        os.environ.setdefault(f"UV_{name}", separator.join(value.split()))
os.environ.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip does: the best of all

TEST_ENV = {
    "PYTHONDONTWRITEBYTECODE": "",  # eight ranks that each compile torch are slow
    "OMP_NUM_THREADS": "1",  # a rank is one thread
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def install(session: nox.Session, *args: str, pins: str = "constraints-cpu.txt") -> None:
    """Install under the pins of a file; EP_CONSTRAINTS=FILE takes another, empty none."""
    pins = os.environ.get("EP_CONSTRAINTS", pins)
    session.install("--quiet", *(["-c", pins] if pins else []), *args)


def group(*names: str) -> list[str]:
    """Dependency groups of the root pyproject.toml."""
    return list(nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), *names))


def editable() -> list[str]:
    """The arguments that install every package from this checkout in one resolver call."""
    return [arg for path in PATHS.values() for arg in ("-e", path)]


def siblings(package: str) -> list[str]:
    """`package` and the packages of this repository that it declares, lowest first."""
    deps = nox.project.load_toml(f"{PATHS[package]}/pyproject.toml")["project"]["dependencies"]
    names = {re.split(r"[^\w.-]", dep, maxsplit=1)[0] for dep in deps}
    below = [p for p in PATHS if p in names]
    return list(dict.fromkeys([*(s for p in below for s in siblings(p)), package]))


def run_dev(session: nox.Session, *command: str, env: dict[str, str] | None = None) -> None:
    """Run a command of the environment that the session `dev` makes."""
    place = Path(session.cache_dir).parent / "dev"
    folder = place / ("Scripts" if sys.platform == "win32" else "bin")
    paths = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(place)}
    session.run(
        str(folder / command[0]), *command[1:], external=True, env=paths | TEST_ENV | (env or {})
    )


@nox.session
def dev(session: nox.Session) -> None:
    """Make .nox/dev: every package, editable, and the tools."""
    install(session, *editable(), *group(*DEV_GROUPS))


@nox.session(venv_backend="none", requires=["dev"])
def tests(session: nox.Session) -> None:
    """Every test; `-- PATHS OPTIONS` go to pytest (`-- --all-layouts`: not just a sample)."""
    run_dev(session, "pytest", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def demo(session: nox.Session) -> None:
    """Train, save, load and generate on 8 CPU ranks; `-- OUTPUT --steps N` changes the run."""
    run_dev(session, "python", "packages/expert-parallel/examples/demo.py", *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests_alone(session: nox.Session, package: str) -> None:
    """Each package with nothing but what it declares: its own tests pass."""
    wanted = dict.fromkeys([*siblings(package), "ep-testing"])
    install(session, *(f"./{PATHS[p]}" for p in wanted), *group("test"))
    session.run("python", "tools/check_alone.py", package, *group("test"), env=TEST_ENV)
    with session.chdir(PATHS[package]):
        session.run("pytest", "tests", *session.posargs, env=TEST_ENV)


@nox.session
def oldest(session: nox.Session) -> None:
    """Every test with the lowest supported transformers and accelerate."""
    install(session, *editable(), *group("test", "demo", "peft"), pins="constraints-oldest.txt")
    session.run("pytest", *session.posargs, env=TEST_ENV)


@nox.session
def trl(session: nox.Session) -> None:
    """TRL's trainer over a layout; trl and datasets (300 MB) are in no other environment."""
    install(session, *editable(), *group("test", "peft", "trl"), "tokenizers")
    session.run("pytest", "integration_tests/test_trl.py", env=TEST_ENV)


@nox.session
def triton(session: nox.Session) -> None:
    """The Triton kernels in its interpreter, and compiled for GPUs: needs none (700 MB)."""
    packages = "./packages/ep-kernels[triton]", "./packages/ep-dispatch", "./tools/ep-testing"
    install(session, *packages, *group("test"))
    session.run("pytest", "packages/ep-kernels/tests/test_triton.py", env=TEST_ENV)
    buffers = "packages/ep-dispatch/tests/test_symmetric_memory.py"
    session.run("pytest", buffers, "-k", "kernel", env=TEST_ENV)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure HEAD with asv, and build the pages in .asv/html; `-- ARGUMENTS` are asv's own."""
    asv(session, *(session.posargs or ["run", "--skip-existing-successful", "HEAD^!"]))
    if not session.posargs:
        asv(session, "publish")


@nox.session
def bench_compare(session: nox.Session) -> None:
    """Measure `-- BASE HEAD` where no results are kept, and fail if anything grew too much.

    Further arguments are those of `asv run`, such as `--bench Dispatch`.
    """
    if len(session.posargs) < 2:
        session.error("give two commits: nox -s bench_compare -- BASE HEAD")
    base, head, *options = session.posargs
    for commit in (base, head):
        asv(session, "run", "--skip-existing-successful", *options, f"{commit}^!")
    session.run("python", "benchmarks/compare.py", base, head)


def asv(session: nox.Session, *arguments: str) -> None:
    """Run asv on the machine of the name in EP_MACHINE, or on "local"."""
    install(session, *group("bench"))
    machine = os.environ.get("EP_MACHINE", "local")
    chosen = ["--machine", machine] if arguments[0] == "run" else []
    with session.chdir("benchmarks"):
        session.run("asv", "machine", "--yes", "--machine", machine, silent=True)
        session.run("asv", *arguments, *chosen, env={"UV_FIND_LINKS": None})


@nox.session(venv_backend="none", requires=["dev"])
def micro(session: nox.Session) -> None:
    """Kernels and index work by themselves; `-- --benchmark-save=NAME`, `--benchmark-compare`."""
    run_dev(session, "pytest", "benchmarks/micro", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format, and what each package may import."""
    session.install("--quiet", *group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/check_imports.py")


@nox.session(venv_backend="none", requires=["dev"])
def typecheck(session: nox.Session) -> None:
    """Strict types in every package."""
    run_dev(session, "mypy", *(f"{path}/src" for path in PATHS.values()))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; needs no torch, the reference is read from the source."""
    session.install("--quiet", *group("docs"))
    shutil.rmtree("site", ignore_errors=True)
    session.run("zensical", "build", "--strict")
