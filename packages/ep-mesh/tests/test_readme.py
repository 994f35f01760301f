"""What the README shows is what happens."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_ten_lines_print_what_the_readme_says():
    text = README.read_text(encoding="utf-8")
    code, printed = re.search(
        r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", text, re.DOTALL
    ).groups()
    assert len([line for line in code.splitlines() if line]) <= 10
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == printed, done.stderr


def test_the_error_is_the_one_shown():
    session = re.search(r"```python\n(>>>.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    example = doctest.DocTestParser().get_doctest(session.group(1), {}, "README", None, 0)
    assert doctest.DocTestRunner().run(example) == (0, 2)
