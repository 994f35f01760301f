from __future__ import annotations

from pathlib import Path

import check_imports
import pytest

PYPROJECT = """
[project]
name = "ep-plans"
dependencies = ["torch>=2.11", "ep-mesh"{more}]
"""


def plant(folder: Path, source: str, file: str = "thing.py", more: str = "") -> list[str]:
    package = folder / "ep-plans"
    (package / "src/ep_plans").mkdir(parents=True)
    (package / "pyproject.toml").write_text(PYPROJECT.format(more=more))
    (package / "src/ep_plans" / file).write_text(source)
    (package / "src/ep_plans" / "uses.py").write_text("import ep_mesh, torch")
    return check_imports.faults(package)


@pytest.mark.parametrize(
    "source",
    [
        "import os, torch, torch.distributed as dist",
        "from ep_mesh import Layout",
        "from ep_plans import _compat\nfrom ep_plans._compat import thing",
        "from . import _compat",
        "import torch\ntorch.nn.Linear.__init__",
        "self = object()\nself._anything",
    ],
)
def test_what_is_allowed(tmp_path: Path, source: str) -> None:
    assert plant(tmp_path, source) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import ep_trainer", "imports ep_trainer, which it must not"),
        (
            "def f():\n    from transformers import Trainer",
            "imports transformers, which it must not",
        ),
        ("import numpy as np", "imports numpy, which it must not"),
        ("from ep_dispatch import AllToAll", "imports ep_dispatch, which it does not declare"),
        ("import torch.distributed._functional_collectives as f", "is private"),
        ("from torch.distributed import _functional_collectives", "is private"),
        ("from torch.distributed.fsdp._fully_shard import FSDPState", "is private"),
        ("import torch\ntorch._grouped_mm(1)", "torch._grouped_mm is private"),
        ("import torch.distributed as dist\ndist._x.y()", "torch.distributed._x.y is private"),
        ("from torch import nn\nnn.Module._apply", "torch.nn.Module._apply is private"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, source: str, fault: str) -> None:
    found = plant(tmp_path, source)
    assert found
    assert fault in found[0]
    assert found[0].startswith("ep-plans/src/ep_plans/thing.py:")


def test_private_names_live_in_compat_with_their_versions(tmp_path: Path) -> None:
    private = "from torch._C import thing"
    assert plant(tmp_path / "a", f'"""Seen in torch 2.13."""\n{private}', "_compat.py") == []
    assert "versions" in plant(tmp_path / "b", private, "_compat.py")[0]


def test_a_dependency_that_the_design_forbids(tmp_path: Path) -> None:
    found = plant(tmp_path, "", more=', "transformers>=5"')
    assert found == [
        "ep-plans/pyproject.toml: depends on transformers, which this package must not"
    ]


def test_a_dependency_that_nothing_needs(tmp_path: Path) -> None:
    found = plant(tmp_path, "", more=', "ep-dispatch"')
    assert found == ["ep-plans/pyproject.toml: depends on ep_dispatch, which no module imports"]


def test_modules_that_are_private_without_an_underscore() -> None:
    assert check_imports.Use("transformers.distributed.fsdp.thing", 1).private
    assert not check_imports.Use("transformers.distributed_thing", 1).private
    assert not check_imports.Use("transformers.__version__", 1).private


def test_the_command_reads_every_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_imports.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("6 packages, ")
