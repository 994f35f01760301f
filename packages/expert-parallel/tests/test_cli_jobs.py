"""`ep train` and `ep generate`: jobs from files and flags, checked before a rank starts."""

from __future__ import annotations

import io
import json
import os

import pytest
import torch
import torch.distributed as dist
from cli_models import EP_PLAN, TEXT, save_model
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerState
from typer.testing import CliRunner

from ep_mesh import DistributedConfig, Layout
from expert_parallel.cli import app, generate, launch, progress, train, worker


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture
def started(monkeypatch):
    """Instead of starting ranks, note what would be started."""
    calls = []

    def note(command, job, processes, folder=None, *, traceback=False, restarts=0):
        calls.append((command, job, processes))

    for module in (train, generate):
        monkeypatch.setattr(module, "launch", note)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return calls


def ep(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


# -- a training job


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_file_and_flags_over_it(started, model, text, tmp_path, kind):
    file = tmp_path / f"job.{kind}"
    values = {
        "model": str(model),
        "data": str(text),
        "output": str(tmp_path / "out"),
        "sequence_length": 16,
        "layout": {"tp_size": 2, "fsdp_size": 4, "ep_size": 4, "ep_plan": EP_PLAN},
        "training": {"max_steps": 5, "learning_rate": 1e-4, "warmup_steps": 2},
    }
    file.write_text(
        json.dumps(values) if kind == "json" else json.dumps(values).replace("0.0001", "1e-4")
    )
    code, output = ep("train", file, "--ep", 8, "--steps", 7, "--set", "weight_decay=0.1")
    assert code == 0, output
    [(command, content, processes)] = started
    job = content["job"]
    assert (command, processes) == ("train", 8)
    assert job["layout"] == {"tp_size": 2, "fsdp_size": 4, "ep_size": 8, "ep_plan": EP_PLAN}
    assert job["training"] == {
        "max_steps": 7,
        "learning_rate": 1e-4,
        "warmup_steps": 2,
        "weight_decay": 0.1,
    }
    assert "8 experts a layer, 8 processes" in output
    assert "ep=8        E0" in output


def test_flags_alone(started, model, text, tmp_path):
    arguments = ("--model", model, "--data", text, "--output", tmp_path, "--sequence-length", 16)
    assert ep("train", *arguments, "--fsdp", 2, "--nproc", 2)[0] == 0
    assert started[0][1]["job"]["layout"] == {"fsdp_size": 2}


def test_a_job_that_resumes_saves_what_it_needs(model, text, tmp_path):
    values = {"model": str(model), "data": str(text), "output": str(tmp_path)}
    job = train.TrainJob(**values, resume=True, restarts=3, training={"save_steps": 5})
    arguments = job.arguments("cpu")
    assert (arguments.save_strategy.value, arguments.save_steps) == ("steps", 5)
    assert not arguments.save_only_model
    assert train.TrainJob(**values).arguments("cpu").save_only_model


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": ""}, "model is missing"),
        ({"data": []}, "data is missing"),
        ({"restarts": 2}, "give --resume"),
        ({"training": {"save_steps": 3}}, "no checkpoints are saved. Give --resume"),
        ({"ouput": "x"}, "no field 'ouput': did you mean 'output'"),
        (
            {"training": {"max_step": 3}},
            "training has no field 'max_step': did you mean 'max_steps'",
        ),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate must be a number"),
        ({"training": {"output_dir": "x"}}, "training.output_dir"),
        ({"training": [1]}, "training must hold names and values"),
        ({"layout": {"tpsize": 2}}, "did you mean 'tp_size'"),
        (
            {"layout": {"fsdp_size": 3, "ep_size": 3, "ep_plan": EP_PLAN}},
            "does not divide the 8 experts",
        ),
        ({"layout": {"tp_size": 3}}, "key-value heads"),
        ({"dtype": "int8"}, "dtype must be auto"),
        ({"sequence_length": 1}, "sequence_length must be"),
        ({"sequence_length": 100_000}, "less than one sequence"),
        ({"data": "missing.txt"}, "no file or folder missing.txt"),
        ({"model": "qwen3-mo"}, "Did you mean qwen3_moe"),
        ({"model": 5}, "model must be a text, got 5"),
        ({"data": [5]}, "data must be a list of texts, got [5]"),
        ({"resume": "no"}, "resume must be true or false, got 'no'"),
        ({"restarts": True, "resume": True}, "restarts must be a whole number, got True"),
        ({"training": {"max_steps": "ten"}}, "training.max_steps must be a whole number"),
        ({"training": {"bf16": "no"}}, "training.bf16 must be true or false"),
        ({"training": {"use_cpu": True}}, "training.use_cpu"),
        ({"training": {"per_device_train_batch_size": 0}}, "per_device_train_batch_size=0"),
        ({"training": {"optim": "adafactor"}}, "optim='adafactor'"),
        ({"output": "FOLDER/job.json"}, "job.json can't be written to"),
        ({"output": "MODEL"}, "is the folder of the model"),
        (
            {"tokenizer": "no/tokenizer"},
            "no tokenizer can be read from no/tokenizer: pass --tokenizer",
        ),
        ({"model": "qwen3-moe"}, "qwen3-moe is a model type, which has no weights"),
    ],
)
def test_what_does_not_fit_is_one_line_before_any_rank_starts(
    started, model, text, tmp_path, changes, expected
):
    values = {"model": str(model), "data": str(text), "output": str(tmp_path / "out")}
    job = json.dumps({**values, "sequence_length": 16, **changes})
    job = job.replace("FOLDER", str(tmp_path)).replace("MODEL", str(model))
    (tmp_path / "job.json").write_text(job)
    code, output = ep("train", tmp_path / "job.json")
    assert code == 1
    last = output.splitlines()[-1]
    assert last.startswith("error: ")
    assert expected in last
    assert not started


def test_a_flag_of_zero_is_not_left_out(started, model, text, tmp_path):
    arguments = ("--model", model, "--data", text, "--output", tmp_path)
    code, output = ep("train", *arguments, "--sequence-length", 0)
    assert code == 1
    assert "sequence_length must be" in output


def test_a_job_file_that_is_no_text(tmp_path):
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe")
    code, output = ep("train", tmp_path / "job.yaml")
    assert code == 1
    assert "job.yaml is no UTF-8 text" in output


def test_processes_must_be_the_layout_s(started, model, text, tmp_path):
    arguments = ("--model", model, "--data", text, "--output", tmp_path, "--sequence-length", 16)
    code, output = ep("train", *arguments, "--fsdp", 4, "--nproc", 2)
    assert code == 1
    assert "= 4 processes, but 2 are" in output
    assert not started


def test_tp_size_is_derived_from_the_number_of_processes(started, model, text, tmp_path):
    (tmp_path / "layout.yaml").write_text("tp_plan: auto\nfsdp_size: 2\n")
    code, output = ep("generate", model, "The", "--layout", tmp_path / "layout.yaml", "--nproc", 4)
    assert code == 0, output
    [(_, job, processes)] = started
    assert (processes, job["layout"]["tp_size"]) == (4, 2)
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("command", [["train"], ["generate", "nowhere"]])
def test_a_traceback_is_shown_where_it_is_asked_for(command):
    result = CliRunner().invoke(app, [*command, "--traceback"])
    assert isinstance(result.exception, ValueError)


def test_the_vocabulary_must_hold_the_tokenizer(started, model, text, tmp_path):
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 99}))
    arguments = ("--tokenizer", model, "--data", text, "--output", tmp_path / "out")
    code, output = ep("train", "--model", tmp_path, *arguments, "--from-scratch")
    assert code == 1
    assert "the model's vocab_size is 99" in output
    code, output = ep("train", "--model", tmp_path, *arguments)
    assert code == 1
    assert "holds no weights (*.safetensors); to train from random ones, pass" in output
    code, output = ep("train", "--model", tmp_path, *arguments[2:], "--from-scratch")
    assert code == 1
    assert "there is no tokenizer in" in output


# -- a generation job


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "there is no prompt"),
        (["", " "], "there is no prompt"),
        (["--prompt-file", "missing.txt"], "there is no file missing.txt"),
        (["The", "--top-p", "0.5"], "--top-p needs --sample"),
        (["The", "--dtype", "int8"], "dtype must be auto"),
        (["The", "--tp", "3"], "tp_size=3 does not fit"),
        (["The", "--tp", "2", "--nproc", "3"], "= 2 processes, but 3 are"),
    ],
)
def test_generate_errors(started, model, arguments, expected):
    code, output = ep("generate", model, *arguments)
    assert code == 1
    assert expected in output.splitlines()[-1]
    assert not started


def test_prompts_from_a_file(started, model, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    assert ep("generate", model, "zero", "--prompt-file", tmp_path / "prompts.txt")[0] == 0
    assert started[0][1]["prompts"] == ["zero", "one", "two"]


# -- on ranks


@pytest.mark.parametrize("from_scratch", [False, True])
def test_training_on_ranks_saves_an_ordinary_checkpoint(ranks, model, text, tmp_path, from_scratch):
    out = tmp_path / "out"
    job = {
        "model": str(model),
        "data": [str(text)],
        "eval_data": [str(text)],
        "output": str(out),
        "sequence_length": 16,
        "from_scratch": from_scratch,
        "layout": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4, "ep_plan": EP_PLAN},
        "training": {"max_steps": 6, "learning_rate": 0.01, "logging_steps": 3},
    }

    ranks.run(lambda rank: train.run({"job": job}), world=4, timeout=120)
    trained = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer(TEXT[:200], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        after = trained(ids, labels=ids).loss
        before = AutoModelForCausalLM.from_pretrained(model)(ids, labels=ids).loss
    assert after < before - 0.3
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logs = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logs] == [3, 6]
    assert all(line["expert_rank_load_max"] >= 1 for line in logs)
    assert len(logs[0]["expert_layers"]) == len([n for n in trained.state_dict() if "down" in n])


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, ep=2), Layout(fsdp=4, ep=4)], ids=str)
def test_generation_is_that_of_a_single_process(ranks, model, layout):
    """Prompts of several lengths, more and fewer than data shards."""
    prompts = ["The tokens", "An answer comes back to the", "experts"]
    single = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = single.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        expected.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    config = DistributedConfig(
        tp_size=layout.tp, fsdp_size=layout.fsdp, ep_size=layout.ep, ep_plan=EP_PLAN
    )
    job = {
        "model": str(model),
        "tokenizer": None,
        "dtype": "float32",
        "seed": 0,
        "layout": config.to_dict(),
        "generation": {"max_new_tokens": 6, "do_sample": False},
    }
    for count in (3, 1):
        given = {**job, "prompts": prompts[:count]}
        found = ranks.run(
            lambda rank, given: generate.continuations(given), given, world=config.world_size
        )
        assert found == [expected[:count]] * config.world_size


# -- starting ranks


@pytest.mark.parametrize("traceback", [False, True])
def test_a_failing_rank_s_error_is_one_line(tmp_path, capfd, traceback):
    with pytest.raises(launch.JobError, match=r"^model is missing: give --model"):
        launch.launch("train", {"job": {}}, 2, traceback=traceback)
    assert ("in __post_init__" in capfd.readouterr().err) is traceback


def test_the_first_error_is_the_one_told(tmp_path):
    launch.report_error(tmp_path, 3, "the cause")
    launch.report_error(tmp_path, 0, "Connection closed by peer")
    assert launch.first_error(tmp_path) == "rank 3: the cause"
    assert launch.first_error(tmp_path / "none") is None


def test_the_error_of_the_last_start_is_the_one_told(tmp_path, monkeypatch):
    launch.report_error(tmp_path, 3, "what was mended")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    launch.report_error(tmp_path, 0, "the last straw")
    assert launch.first_error(tmp_path) == "the last straw"


@pytest.mark.parametrize(("rank", "told"), [("0", True), ("1", False)])
def test_a_restart_tells_why_once(tmp_path, monkeypatch, capfd, rank, told):
    launch.report_error(tmp_path, 1, "rank 1, step 3, is gone")
    (tmp_path / "job.json").write_text('{"command": "train", "job": {}, "traceback": false}')
    monkeypatch.setattr(worker, "run", lambda *arguments: None)
    monkeypatch.setattr("sys.argv", ["worker", str(tmp_path / "job.json")])
    for name, value in (("RANK", rank), ("TORCHELASTIC_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    worker.main()
    expected = "restart 1 of at most 2: rank 1, step 3, is gone\n"
    assert capfd.readouterr().err == (expected if told else "")


@pytest.mark.parametrize(("step", "told"), [(0, ""), (20, "goes on from step 20 of 60\n")])
def test_a_resumed_run_tells_where_it_goes_on(step, told):
    out = io.StringIO()
    state = TrainerState(global_step=step, max_steps=60)
    progress.TrainProgress(Console(file=out)).on_train_begin(None, state, None)
    assert out.getvalue() == told


def test_a_rank_that_is_killed_is_told(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "if os.environ.get('RANK') == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(launch.JobError, match=r"rank 1 was ended by SIGKILL \(out of memory\?\)"):
        launch.launch("train", {"job": {}}, 2)


@pytest.mark.time_limit(240)
def test_train_and_generate_from_the_command_line(model, text, tmp_path, capfd, monkeypatch):
    """The whole way: ranks start, one prints, the checkpoint is read in another layout."""
    monkeypatch.setenv("COLUMNS", "160")
    out = tmp_path / "out"
    flags = "--sequence-length 16 --steps 2 --set logging_steps=1 --tp 2 --ep 2"
    assert ep("train", "--model", model, "--data", text, "--output", out, *flags.split())[0] == 0
    printed = capfd.readouterr().out
    assert printed.count("step 1/2  loss") == 1
    assert printed.count("step 2/2  loss") == 1
    assert printed.count("busiest expert") == 2
    assert printed.count(f"saved to {out}") == 1
    assert ep("generate", out, "The tokens", "--fsdp", 2, "--max-new-tokens", 2)[0] == 0
    assert capfd.readouterr().out.count("The tokens") == 1


def test_no_process_group_is_left():
    assert not dist.is_initialized()
