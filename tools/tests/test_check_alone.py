from __future__ import annotations

from pathlib import Path

import check_alone
import pytest


def test_what_nothing_leads_to_is_found() -> None:
    extra = check_alone.unexplained("ep-mesh", "pytest", "hypothesis")
    assert {"transformers", "ep-dispatch"} <= extra
    assert not {"torch", "pytest", "ep-testing", "cloudpickle", "ep-mesh"} & extra


def test_a_dependency_leads_to_its_own() -> None:
    assert {"ep-mesh", "torch", "sympy", "accelerate"} <= check_alone.closure("ep_trainer>=0")


@pytest.mark.parametrize(("optional", "raises"), [(set(), True), ({"no_such_thing"}, False)])
def test_a_module_that_needs_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optional: set[str], raises: bool
) -> None:
    name = f"planted_{raises}".lower()
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "needs.py").write_text("import no_such_thing.part")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(check_alone.OPTIONAL, name, optional)
    if raises:
        with pytest.raises(ModuleNotFoundError):
            check_alone.import_all(name)
    else:
        assert check_alone.import_all(name) == 1
