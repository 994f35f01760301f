"""The Python blocks of every README and page run as they stand.

A block of `>>>` lines is a doctest: what it prints is compared. A comment in the line before a block changes how:

    <!-- ranks: 4 -->        on four ranks instead of one
    <!-- continues -->       after the blocks before it in the file, in the same namespace
    <!-- pytest -->          as a test file
    <!-- not run: reason --> it is compiled only
"""

from __future__ import annotations

import doctest
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ep_mesh import Layout
from ep_testing import RankError, RankPool

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mode>[^\n]*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
MODES = re.compile(r"ranks: \d|continues|pytest|not run: .+")

pytest_plugins = ["pytester"]


@dataclass(frozen=True)
class Snippet:
    where: str
    mode: str
    code: str

    @property
    def runs(self) -> bool:
        return not self.mode.startswith(("not run", "pytest"))


def snippets(text: str, name: str) -> list[Snippet]:
    found: list[Snippet] = []
    code = ""
    for match in BLOCK.finditer(text):
        mode = match["mode"] or ""
        if mode and not MODES.fullmatch(mode):
            raise ValueError(f"{name}: unknown mode {mode!r} of a Python block")
        line = text.count("\n", 0, match.start("code"))
        block = "\n" * line + match["code"]  # so that a traceback tells the page's line
        code = code + block[code.count("\n") :] if mode == "continues" else block
        mode = found[-1].mode if mode == "continues" else mode
        found.append(Snippet(f"{name}:{line}", mode, code))
    return found


def pages() -> list[Path]:
    patterns = ("README.md", "packages/*/README.md", "tools/*/README.md", "docs/**/*.md")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


SNIPPETS = [s for p in pages() for s in snippets(p.read_text(), str(p.relative_to(ROOT)))]


def execute(rank: int, code: str, where: str, folder: str) -> None:
    os.chdir(folder)
    if code.lstrip().startswith(">>>"):
        example = doctest.DocTestParser().get_doctest(code, {}, where, where, 0)
        told: list[str] = []
        failed, _ = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
        assert not failed, "".join(told)
    else:
        exec(compile(code, where, "exec"), {"__name__": "__main__"})  # noqa: S102


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if s.runs], ids=lambda s: s.where)
def test_snippet_runs(ranks: RankPool, tmp_path: Path, snippet: Snippet) -> None:
    world = int(snippet.mode.removeprefix("ranks: ") or 1)
    ranks.run(execute, snippet.code, snippet.where, str(tmp_path), world=world)


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if not s.runs], ids=lambda s: s.where)
def test_snippet_compiles(snippet: Snippet) -> None:
    compile(snippet.code, snippet.where, "exec")


@pytest.mark.parametrize(
    "snippet", [s for s in SNIPPETS if s.mode == "pytest"], ids=lambda s: s.where
)
def test_snippet_is_a_test(pytester: pytest.Pytester, snippet: Snippet) -> None:
    pytester.makepyfile(snippet.code)
    result = pytester.runpytest_subprocess(timeout=120)
    assert result.ret == 0


@pytest.mark.parametrize(
    ("page", "layouts", "experts"),
    [
        ("README.md", [Layout(tp=4, fsdp=2, ep=4)], 128),
        ("docs/layouts.md", [Layout(tp=2, fsdp=4, ep=ep) for ep in (2, 4, 8)], 8),
    ],
)
def test_drawings_are_what_is_printed(page: str, layouts: list[Layout], experts: int) -> None:
    shown = {line.removeprefix("    ") for line in (ROOT / page).read_text().splitlines()}
    for layout in layouts:
        assert set(layout.picture(experts).splitlines()) <= shown


def test_every_package_has_a_readme_that_works() -> None:
    for package in (ROOT / "packages").iterdir():
        found = snippets((package / "README.md").read_text(), package.name)
        assert any(s.runs for s in found), f"{package.name}/README.md has no block that is run"


def test_a_broken_block_is_found_at_its_line(ranks: RankPool, tmp_path: Path) -> None:
    first, second, third = snippets(
        "# Page\n\n```python\na = 1\n```\n\n<!-- continues -->\n```python\nassert a == 2\n```\n"
        "<!-- ranks: 2 -->\n```python\nimport torch\n```\n",
        "page.md",
    )
    assert (first.runs, third.mode) == (True, "ranks: 2")
    with pytest.raises(RankError, match=r"page\.md:8\", line 9"):
        ranks.run(execute, second.code, second.where, str(tmp_path), world=1)
    with pytest.raises(RankError, match=r"Got:\n +2"):
        ranks.run(execute, ">>> 1 + 1\n3\n", "page.md:1", str(tmp_path), world=1)
    with pytest.raises(ValueError, match="unknown mode 'rank: 2'"):
        snippets("<!-- rank: 2 -->\n```python\n```\n", "page.md")
