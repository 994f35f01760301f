from __future__ import annotations

import json
import math

import compare
import pytest

FACTORS = [("tokens_per_s", None), ("over_native", 1.1), ("bytes", 1.01)]
CONTENT = {
    "result_columns": ["result", "params", "version"],
    "results": {
        "layouts.Dispatch.track_bytes": [[10.0, None, math.nan], [["8", "4", "2"]], "1"],
        "layouts.Layouts.track_time_over_native": [[1.0], [["'tp=8'"]], "1"],
        "layouts.Layouts.track_tokens_per_s": [[5.0], [["'tp=8'"]], "1"],
        "layouts.Broken.track_bytes": [None, [["8", "4"]], "1"],
    },
}


def test_values_by_name_and_parameters():
    """What failed is not a number; what does not exist is not there."""
    found = compare.series(CONTENT)
    assert found["layouts.Dispatch.track_bytes(8)"] == 10
    assert math.isnan(found["layouts.Dispatch.track_bytes(4)"])
    assert "layouts.Dispatch.track_bytes(2)" not in found
    assert found["layouts.Layouts.track_time_over_native(tp=8)"] == 1
    assert math.isnan(found["layouts.Broken.track_bytes(4)"])


@pytest.mark.parametrize(
    ("name", "after", "worse"),
    [
        ("track_bytes(8)", 10.2, True),
        ("track_bytes(8)", 10.05, False),
        ("track_bytes(8)", 5.0, False),
        ("track_bytes(8)", None, True),
        ("track_time_over_native(tp=8)", 10.9, False),
        ("track_time_over_native(tp=8)", 11.1, True),
        ("track_tokens_per_s(tp=8)", 1.0, False),
    ],
)
def test_a_series_has_its_own_factor(name, after, worse):
    """None: not measured any more, which hides what it would have said."""
    (change,) = compare.compare({name: 10.0}, {} if after is None else {name: after}, FACTORS)
    assert change.worse is worse
    assert name in str(change)


def test_a_series_without_a_factor_is_an_error():
    with pytest.raises(ValueError, match=r"factors\.json"):
        compare.factor_of("track_something", FACTORS)


def test_each_series_of_the_suites_has_a_factor():
    """A new benchmark must say how it is judged."""
    factors = json.loads((compare.HERE / "factors.json").read_text())["factors"]
    text = "".join(file.read_text() for file in (compare.HERE / "suites").glob("*.py"))
    names = {line.split("(")[0].split()[1] for line in text.splitlines() if "def track_" in line}
    assert len(names) > 8
    for name in names:
        compare.factor_of(f"suite.{name}(tp=8, all_to_all)", factors)
    assert compare.factor_of("suite.track_bytes_per_layer(8, native)", factors) is None
    simulated = "suite.track_simulated_seconds_per_token(tp=8, {})"
    assert compare.factor_of(simulated.format("all_to_all"), factors) == 1.01
    assert compare.factor_of(simulated.format("native"), factors) is None
