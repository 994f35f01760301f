"""`DistributedConfig`: defaults, derived sizes, rules, and its way through dicts and files."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_layouts import every_layout

from ep_mesh import PP_SCHEDULES, DistributedConfig, Layout


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


# -- sizes


def test_sizes_are_resolved_to_one():
    config = DistributedConfig()
    assert (config.tp_size, config.fsdp_size, config.dp_replicate_size) == (1, 1, 1)
    assert (config.pp_size, config.ep_size, config.world_size) == (1, 1, 1)
    assert (config.ep_implementation, config.fsdp_over_tp) == ("auto", None)


def test_what_follows_from_the_sizes():
    config = DistributedConfig(tp_size=2, fsdp_size=4, dp_replicate_size=2, pp_size=2, ep_size=4)
    assert config.layout == Layout(tp=2, fsdp=4, dp_replicate=2, pp=2, ep=4)
    assert (config.world_size, config.dp_size, config.efsdp_size) == (32, 8, 2)


@pytest.mark.parametrize("plan", ["auto", {}, {"model.norm": "replicate"}])
def test_tp_size_is_derived_where_a_plan_is_given(monkeypatch, plan):
    monkeypatch.setenv("WORLD_SIZE", "16")
    config = DistributedConfig(tp_plan=plan, fsdp_size=2, dp_replicate_size=2, pp_size=2)
    assert config.tp_size == 2
    assert DistributedConfig(fsdp_size=2).tp_size == 1, "not without a plan"
    assert DistributedConfig(tp_plan=plan, tp_size=4).tp_size == 4, "not if it is given"


def test_tp_size_without_a_launcher_is_one():
    assert DistributedConfig(tp_plan="auto").tp_size == 1


def test_tp_size_that_cannot_be_derived(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=8 .*fsdp_size=3 .* = 3 .*multiple of 3"):
        DistributedConfig(tp_plan="auto", fsdp_size=3)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a whole number >= 1, got 'many'"):
        DistributedConfig(tp_plan="auto")


def test_a_plan_never_infers_the_ep_size():
    assert DistributedConfig(tp_size=2, ep_plan={"model.layers.*.mlp": "x"}).ep_size == 1


# -- rules


@pytest.mark.parametrize("size", [0, -2, 2.0, "2", True])
@pytest.mark.parametrize(
    "name", ["tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size"]
)
def test_a_size_is_a_whole_number_above_zero(name, size):
    with pytest.raises(
        ValueError, match=f"{name} must be a whole number >= 1 or None, got {size!r}"
    ):
        DistributedConfig(**{name: size})


@given(st.integers(1, 12), st.integers(1, 12), st.integers(2, 150))
def test_ep_size_is_a_multiple_of_tp_and_divides_fsdp_times_tp(tp, fsdp, ep):
    fits = ep % tp == 0 and (fsdp * tp) % ep == 0
    if fits:
        assert (
            DistributedConfig(tp_size=tp, fsdp_size=fsdp, ep_size=ep).efsdp_size == fsdp * tp // ep
        )
    else:
        with pytest.raises(
            ValueError, match=rf"ep_size={ep} .*tp_size={tp}.*Sizes that fit: 1 \(off\)"
        ):
            DistributedConfig(tp_size=tp, fsdp_size=fsdp, ep_size=ep)


def test_ep_size_divides_the_experts():
    config = DistributedConfig(tp_size=2, fsdp_size=4, ep_size=8)
    config.check_experts(128)
    with pytest.raises(ValueError, match=r"ep_size=8 does not divide the 60 experts.* 2, 4\."):
        config.check_experts(60)


@pytest.mark.parametrize("name", ["all_reduce", "deepgemm_megamoe"])
def test_implementations_that_need_one_shared_batch(name):
    DistributedConfig(tp_size=4, fsdp_size=2, ep_size=4, ep_implementation=name)
    DistributedConfig(tp_size=4, fsdp_size=2, ep_implementation=name)  # EP off: not used
    with pytest.raises(
        ValueError, match=rf"{name}.*ep_size=8 and tp_size=4.*ep_size=4, or.*all_to_all"
    ):
        DistributedConfig(tp_size=4, fsdp_size=2, ep_size=8, ep_implementation=name)
    with pytest.raises(ValueError, match=rf"{name}.*ep_size=8 and tp_size=1"):
        DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation=name)
    sliced = {"tp_size": 4, "enable_sequence_parallel": True, "ep_implementation": name}
    DistributedConfig(**sliced)  # EP off
    with pytest.raises(ValueError, match=rf"{name}.*shares one batch.*enable_sequence_parallel"):
        DistributedConfig(**sliced, ep_size=4)


def test_as_many_stages_as_the_schedule_has():
    assert DistributedConfig(pp_size=2, pp_stages=(3, 1)).pp_stages == [3, 1]
    looped = DistributedConfig(pp_size=2, pp_schedule="interleaved_1f1b", pp_stages=[1, 2, 3, 4])
    assert DistributedConfig.from_dict(looped.to_dict()) == looped
    with pytest.raises(ValueError, match=r"\[3, 1\] has 2 stages.*has 4: give 4 numbers"):
        DistributedConfig(pp_size=2, pp_schedule="zero_bubble", pp_stages=[3, 1])


def test_any_registered_name_may_be_an_implementation():
    assert DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="my_ep").ep_size == 8


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("tp_plan", "manual", '"auto"'),
        ("tp_plan", [("a", "b")], "dict"),
        ("ep_plan", "auto", "dict"),
        ("fsdp_plan", {"a": 1}, "'a': 1"),
        ("ep_plan", {1: "x"}, "1: 'x'"),
        ("fsdp_cpu_offload", "no", "True or False"),
        ("enable_sequence_parallel", 1, "True or False"),
        ("fsdp_over_tp", "yes", "True, False or None"),
        ("pp_schedule", "dualpipe", "1f1b, interleaved_1f1b, zero_bubble, gpipe"),
        ("pp_micro_batches", 0, ">= 1"),
        ("pp_stages", [2, 0], "whole numbers >= 1"),
        ("pp_stages", 4, "list"),
        ("ep_implementation", "", "name"),
        ("ep_implementation", None, "name"),
    ],
)
def test_values_of_the_wrong_kind(field, value, expected):
    with pytest.raises(ValueError, match=field) as error:
        DistributedConfig(**{field: value})
    assert expected in str(error.value)


def test_every_layout_can_be_configured():
    for layout in every_layout(16):
        config = DistributedConfig(
            tp_size=layout.tp,
            fsdp_size=layout.fsdp,
            dp_replicate_size=layout.dp_replicate,
            pp_size=layout.pp,
            ep_size=layout.ep,
        )
        assert config.layout == layout


# -- the deprecated flag


def test_the_deprecated_flag_means_ep_over_the_tp_ranks_without_tp_rules():
    with pytest.warns(FutureWarning, match=r"ep_size=4, tp_plan=\{\}"):
        config = DistributedConfig(tp_size=4, fsdp_size=2, enable_expert_parallel=True)
    assert config == DistributedConfig(tp_size=4, fsdp_size=2, ep_size=4, tp_plan={})


def test_the_deprecated_flag_keeps_a_plan_that_is_given():
    with pytest.warns(FutureWarning):
        config = DistributedConfig(tp_size=4, tp_plan="auto", enable_expert_parallel=True)
    assert (config.tp_plan, config.ep_size) == ("auto", 4)


def test_an_explicit_ep_size_wins_over_the_deprecated_flag():
    for ep in (1, 8):
        with pytest.warns(FutureWarning, match="no effect"):
            config = DistributedConfig(
                tp_size=4, fsdp_size=2, ep_size=ep, enable_expert_parallel=True
            )
        assert config == DistributedConfig(tp_size=4, fsdp_size=2, ep_size=ep)


def test_the_deprecated_flag_never_changes_tp_or_fsdp(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.warns(FutureWarning):
        config = DistributedConfig(fsdp_size=8, enable_expert_parallel=True)
    assert (config.tp_size, config.fsdp_size, config.ep_size) == (1, 8, 1)


def test_the_warning_points_at_the_caller():
    with pytest.warns(FutureWarning) as caught:
        DistributedConfig(tp_size=2, enable_expert_parallel=True)
    assert caught[0].filename == __file__


# -- dicts and files

PLANS = st.dictionaries(st.text(min_size=1), st.text(min_size=1), max_size=3)
CONFIGS = st.builds(
    lambda layout, **rest: DistributedConfig(
        tp_size=layout.tp,
        fsdp_size=layout.fsdp,
        dp_replicate_size=layout.dp_replicate,
        pp_size=layout.pp,
        ep_size=layout.ep,
        **rest,
    ),
    st.sampled_from(list(every_layout(16))),
    tp_plan=st.none() | st.just("auto") | PLANS,
    ep_plan=st.none() | PLANS,
    fsdp_plan=st.none() | PLANS,
    enable_sequence_parallel=st.booleans(),
    fsdp_cpu_offload=st.booleans(),
    fsdp_mixed_precision=st.booleans(),
    fsdp_over_tp=st.none() | st.booleans(),
    pp_schedule=st.sampled_from(list(PP_SCHEDULES)),
    pp_micro_batches=st.none() | st.integers(1, 9),
    ep_implementation=st.sampled_from(["auto", "all_to_all", "mine"]),
)


@given(CONFIGS)
def test_round_trips(config):
    assert DistributedConfig.from_dict(config.to_dict()) == config
    assert DistributedConfig.from_dict(json.loads(config.to_json_string())) == config


def test_a_file_says_the_same_anywhere(tmp_path, monkeypatch):
    """Sizes are resolved when it is written, so the reader's WORLD_SIZE does not matter."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.warns(FutureWarning):
        config = DistributedConfig(tp_plan="auto", fsdp_size=2, enable_expert_parallel=True)
    config.to_json_file(tmp_path / "layout.json")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DistributedConfig.from_json_file(tmp_path / "layout.json") == config
    assert config.tp_size == config.ep_size == 4


def test_a_dict_that_native_transformers_wrote():
    """It holds the flag beside the size that the flag was resolved to: no warning, no effect."""
    native = {
        "tp_size": 2,
        "tp_plan": None,
        "enable_sequence_parallel": False,
        "enable_expert_parallel": True,
        "fsdp_size": 4,
        "dp_replicate_size": 1,
        "fsdp_plan": None,
        "fsdp_cpu_offload": False,
        "fsdp_mixed_precision": False,
        "pp_size": 1,
        "ep_size": 4,
        "ep_plan": None,
        "ep_implementation": "auto",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = DistributedConfig.from_dict(native)
    assert config == DistributedConfig(tp_size=2, fsdp_size=4, ep_size=4)


def test_a_config_does_not_change_after_its_check():
    config = DistributedConfig(tp_size=2, ep_size=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ep_size = 3
    with pytest.raises(ValueError, match="ep_size=3"):
        dataclasses.replace(config, ep_size=3)
    assert dataclasses.replace(config, tp_size=4, ep_size=4).world_size == 4


def test_overrides_win():
    assert DistributedConfig.from_dict({"tp_size": 2}, tp_size=4, fsdp_size=2).world_size == 8


def test_unknown_keys_are_told_with_the_nearest_field():
    with pytest.raises(ValueError, match=r"no field 'tpsize' \(did you mean 'tp_size'\?\)"):
        DistributedConfig.from_dict({"tpsize": 2})
    with pytest.raises(ValueError, match=r"no field 'zzz'\. Fields: tp_size, tp_plan"):
        DistributedConfig.from_dict({"tp_size": 2, "zzz": 1})


@pytest.mark.parametrize(("text", "error"), [("{", "is not JSON"), ("[1]", "JSON object")])
def test_a_file_that_holds_something_else(tmp_path, text, error):
    path = tmp_path / "layout.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=error):
        DistributedConfig.from_json_file(path)
