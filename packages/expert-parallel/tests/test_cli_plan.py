"""`ep plan`: what it prints is what sharding does, and broken rules end it with exit code 1."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from math import comb

import pytest
import torch
import torch.distributed as dist
from cli_models import EP_PLAN, SMALL
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from typer.testing import CliRunner

from ep_mesh import DistributedConfig, Layout, ParallelMesh
from ep_plans import parallelize, plan_parameters, resolve_plans
from expert_parallel.cli import app
from expert_parallel.cli.plan import rank_totals, rows_of
from expert_parallel.meta import build_on_meta, read_config


@pytest.fixture
def ep(monkeypatch):
    """Run the command in this process; gives (exit code, output)."""
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        if arguments[0] == "plan" and not {"--estimate", "--gpus"} & {*arguments}:
            arguments += ("--no-estimate",)
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, result.output

    return run


@pytest.fixture
def dispatch(tmp_path):
    """Flags for a plan that moves tokens, which the oldest transformers does not ship."""
    (tmp_path / "dispatch.json").write_text(json.dumps({"ep_plan": EP_PLAN}))
    return ("--layout", tmp_path / "dispatch.json")


@pytest.fixture
def small(tmp_path):
    """A folder with the config of a small model and no weights."""
    Qwen3MoeConfig(**SMALL).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_a_model_type_without_weights(ep, dispatch):
    code, text = ep("plan", "qwen3_moe", "--tp", "2", "--fsdp", "4", "--ep", "4", *dispatch)
    assert code == 0
    assert "Qwen3MoeForCausalLM, 128 experts a layer, 8 processes" in text
    assert Layout(tp=2, fsdp=4, ep=4).picture(128) in text
    columns = r"24 +grouped_gemm +ep \+ efsdp +9,663,676,416 +1,207,959,552"
    assert re.search(rf"model\.layers\.\*\.mlp\.experts\.gate_up_proj +{columns}", text)
    assert re.search(r"model\.layers\.\*\.mlp\.experts +24 +ep_dispatch_experts", text)
    assert re.search(r"\nall +15,350,731,776 +1,919,640,832\n", text)
    assert "model.layers.* (24 x free_full_weight)" in text
    assert "3.58 GiB of weights" in text
    assert "step of 1 x 2048 tokens a data shard (computed from this plan, not measured" in text
    # 24 layers, 4 passes, half of 2048 tokens of 2048 elements of 2 bytes; 8 of 128 experts.
    others = 3 * (1 - comb(96, 8) / comb(128, 8))
    rows = 24 * 4 * 1024 * 2048 * 2 * others / 2**20
    assert re.search(rf"\nep +dispatch and combine +{rows:,.1f}\n", text)


def test_traffic_grows_with_the_batch(ep, small, dispatch):
    layout = ("plan", small, "--fsdp", "2", "--ep", "2", *dispatch)
    sizes = ("--batch-size", "4", "--sequence-length", "65536")
    one, four = ep(*layout, *sizes[2:]), ep(*layout, *sizes)
    sent = [
        float(re.search(r"dispatch and combine +([\d,.]+)", t)[1].replace(",", ""))
        for _, t in (one, four)
    ]
    assert sent[1] == pytest.approx(4 * sent[0], abs=0.5)


def test_a_folder_and_a_config_file(ep, small, dispatch):
    code, text = ep("plan", small, "--fsdp", "8", "--ep", "8", *dispatch)
    assert (code, "8 experts a layer" in text) == (0, True)
    assert re.search(r"% of 0\.\d+ M parameters: 0\.\d\d MiB of weights", text)
    assert ep("plan", small / "config.json", "--fsdp", "8", "--ep", "8", *dispatch) == (code, text)


@pytest.mark.parametrize(
    "model_type", ["gpt_oss", "mixtral", "deepseek_v3", "llama4_text", "qwen2_moe"]
)
def test_families(ep, model_type):
    code, text = ep("plan", model_type, "--tp", "4", "--ep", "4")
    assert code == 0, text
    assert "grouped_gemm" in text


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, fsdp=2, ep=2),
        Layout(tp=2, fsdp=2, ep=4),
        Layout(tp=4, ep=4),
        Layout(fsdp=2, dp_replicate=2, ep=2),
        Layout(tp=4),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_the_sharded_model(ranks, small, layout):
    config = DistributedConfig(
        tp_size=layout.tp,
        fsdp_size=layout.fsdp,
        dp_replicate_size=layout.dp_replicate,
        ep_size=layout.ep,
        ep_plan=EP_PLAN,
    )

    def held(rank):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL))
        parallelize(model, ParallelMesh(layout), config)
        return sum(
            getattr(parameter, "_local_tensor", parameter).numel()
            for parameter in model.parameters()
        )

    model = build_on_meta(read_config(str(small)))
    plans = resolve_plans(model, config)
    shardings = plan_parameters(model, plans, config)
    totals = rank_totals(model, shardings, layout)
    assert totals == ranks.run(held, world=layout.world_size)
    rows = rows_of(model, plans, shardings, layout)
    assert sum(row.total for row in rows) == sum(p.numel() for p in model.parameters())
    assert sum(row.local[0] for row in rows) <= min(totals)
    assert max(totals) <= sum(row.local[1] for row in rows)


def test_tied_weights_are_counted_once(ep, small):
    config = Qwen3MoeConfig(**SMALL, tie_word_embeddings=True)
    config.save_pretrained(small)
    model = build_on_meta(read_config(str(small)))
    total = sum(parameter.numel() for parameter in model.parameters())
    code, text = ep("plan", small, "--fsdp", "2")
    assert code == 0
    assert re.search(rf"\nall +{total:,} ", text)
    assert "lm_head" not in text.split("FSDP units")[0]


def test_every_broken_rule_is_told_with_what_fits(ep):
    """The expert rule does not hide the attention's."""
    code, text = ep("plan", "qwen3_moe", "--tp", "3", "--fsdp", "4", "--ep", "4")
    assert code == 1
    rules = [line for line in text.splitlines() if line.startswith("broken rule:")]
    assert len(rules) == 2
    assert "ep_size=4 does not fit tp_size=3" in rules[0]
    assert "1 (off), 3, 6, 12" in rules[0]
    assert "4 key-value heads" in rules[1]


def test_one_broken_rule_is_told_once(ep, dispatch):
    code, text = ep("plan", "qwen2_moe", "--fsdp", "8", "--ep", "8", *dispatch)
    assert code == 1
    assert text.count("broken rule:") == 1
    assert "ep_size=8 does not divide the 60 experts" in text


def test_experts_that_do_not_divide(ep, small, dispatch):
    code, text = ep("plan", small, "--fsdp", "3", "--ep", "3", *dispatch)
    assert code == 1
    assert "ep_size=3 does not divide the 8 experts" in text
    assert "rank         0" in text, "the layout itself is sound, so it is drawn"


def test_pipeline_stages_are_shown(ep, small):
    code, text = ep("plan", small, "--pp", "2", "--tp", "2", "--ep", "2")
    assert code == 0
    assert "stage 0: layers 0 to 0, embedding; ranks 0 to 1" in text
    assert "stage 1: layers 1 to 1, head; ranks 2 to 3" in text
    assert re.search(r"q_proj +1 +colwise", text), "what a rank holds is one stage's"
    assert re.search(r"pp +hidden states and gradients +0\.[1-9]", text)


def test_more_stages_than_layers(ep, small):
    code, text = ep("plan", small, "--pp", "4", "--ep", "1")
    assert code == 1
    assert "makes 4 pipeline stages" in text
    assert text.count("broken rule") == 1


def test_no_tp_rule_at_all(ep, small, tmp_path):
    """The layout that the deprecated flag means: experts over the TP ranks, dense modules whole."""
    (tmp_path / "layout.json").write_text('{"tp_size": 4, "ep_size": 4, "tp_plan": {}}')
    code, text = ep("plan", small, "--layout", tmp_path / "layout.json")
    assert code == 0
    assert re.search(r"q_proj +2 +- ", text)
    (tmp_path / "flag.json").write_text('{"tp_size": 4, "enable_expert_parallel": true}')
    with pytest.warns(FutureWarning):
        assert ep("plan", small, "--layout", tmp_path / "flag.json") == (code, text)


def test_a_dense_model_has_no_expert_plan(ep):
    code, text = ep("plan", "llama", "--tp", "2", "--ep", "2")
    assert code == 1
    assert "no experts" in text
    assert "broken rule: ep_size=2, but LlamaForCausalLM brings no ep_plan" in text


def test_a_number_of_processes_is_checked(ep, small):
    assert ep("plan", small, "--fsdp", "8", "--nproc", "8")[0] == 0
    code, text = ep("plan", small, "--fsdp", "8", "--nproc", "6")
    assert code == 1
    assert "= 8 processes, but 6" in text


def test_a_layout_file_with_plans_and_flags_over_it(ep, small, tmp_path):
    file = tmp_path / "layout.yaml"
    file.write_text(
        "tp_size: 2\nfsdp_size: 4\nep_size: 4\ntp_plan: {lm_head: replicate}\n"
        "ep_plan: {model.layers.*.mlp.experts: ep_dispatch_experts}\n"
    )
    code, text = ep("plan", small, "--layout", file, "--ep", "8")
    assert code == 0
    assert "efsdp=1" in text
    assert re.search(r"lm_head +1 +replicate", text)
    file.with_suffix(".json").write_text(json.dumps({"tp_size": 2, "ep_size": 2}))
    assert ep("plan", small, "--layout", file.with_suffix(".json"))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["qwen3-mo"], "Did you mean qwen3_moe"),
        (["./nowhere"], "there is no file or folder ./nowhere"),
        (["nowhere/"], "there is no file or folder nowhere/"),
        (["a/b/c"], "there is no file or folder a/b/c"),
        (["qwen3_moe", "--layout", "missing.json"], "there is no file missing.json"),
        (["qwen3_moe", "--dtype", "int3"], "--dtype must be one of float32, bfloat16"),
        (["."], "has no config.json"),
    ],
)
def test_errors_are_one_line(ep, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    code, text = ep("plan", *arguments)
    assert code == 1
    assert text.startswith("error: ")
    assert expected in text
    assert text.count("\n") == 1


def test_an_unknown_field_in_a_layout_file(ep, tmp_path):
    (tmp_path / "layout.yaml").write_text("tpsize: 2\n")
    code, text = ep("plan", "qwen3_moe", "--layout", tmp_path / "layout.yaml")
    assert code == 1
    assert "did you mean 'tp_size'" in text


def test_many_ranks_are_not_all_drawn(ep, small):
    code, text = ep("plan", small, "--fsdp", "128")
    assert code == 0
    assert "... and so on, to rank 127" in text
    assert len(text.split("rank   ")) <= 10


def test_no_process_group_is_made(ep, small):
    assert ep("plan", small, "--tp", "2", "--ep", "2")[0] == 0
    assert not dist.is_initialized()


def test_python_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "expert_parallel", "plan", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert "Usage: " in done.stdout
    assert "plan" in done.stdout


@pytest.mark.filterwarnings("error::FutureWarning", "error:FSDP2-wrapped module")
def test_the_estimate_of_one_layout(ep, small, dispatch):
    sizes = ("--fsdp", "2", "--ep", "2", "--seq", "32", *dispatch)
    code, text = ep("plan", small, *sizes, "--estimate")
    assert code == 0
    assert re.search(
        r"\nEstimated on h100, with gradient checkpointing: peak \d+\.\d GiB in ", text
    )
    assert re.search(r"\nEstimated on h100, without: peak ", text)
    code, text = ep("plan", small, "--pp", "2", "--fsdp", "2", "--seq", "32", "--estimate")
    assert code == 0
    assert "tokens/s/GPU" in text


def test_a_search_and_its_page(ep, small, tmp_path):
    page = tmp_path / "plan.html"
    code, text = ep(
        "plan", small, "--gpus", "2", "--memory", "80GiB", "--seq", "32", "--html", page
    )
    assert code == 0
    assert re.search(r"\d+ choices fit into 78\.0 GiB", text)
    assert "DistributedConfig(fsdp_size=2, ep_size=2)" in text
    assert "own: the rate counted as each rank's own batch" in text
    assert "pipelines are estimated if asked for, or if nothing else fits: pp=2" in text
    html = page.read_text()
    assert html.count("<svg") == html.count('class="bar"') > 0
    assert not re.search(r"https?:|src=|<link|<script|@import|url\(", html)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpus", "0"), "Invalid value for '--gpus'"),
        (("--gpus", "2", "--memory", "80"), "a number and a unit, such as 80GiB"),
        (("--gpus", "2", "--tp", "2"), "tp_size says one"),
        (("--gpus", "2", "--batch-size", "0"), "Invalid value for '--batch-size'"),
        (("--gpus", "2", "--html", "no/such/folder/x.html"), "there is no folder"),
        (("--memory", "80GiB"), "add --gpus"),
    ],
)
def test_wrong_searches(ep, small, flags, said):
    code, text = ep("plan", small, *flags)
    assert code in (1, 2)
    assert said in " ".join(text.split())
