"""A training checkpoint of any layout is an ordinary one after an export; the command works on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from dispatching import dispatching
from safetensors.torch import load_file
from test_trainer import Sentences, arguments
from typer.testing import CliRunner

from ep_mesh import DistributedConfig
from ep_testing import RankPool
from ep_trainer import CheckpointOptions, EPTrainer
from ep_trainer.checkpoint import check_checkpoint
from ep_trainer.checkpoint.manifest import section
from expert_parallel import parallelize
from expert_parallel.cli import app

# With single experts in the files, fused in the model; a correction bias; tied embeddings.
FAMILIES = {"qwen3_moe": {"tie_word_embeddings": True}, "deepseek_v3": {}, "gpt_oss": {}}
LAYOUT = dispatching(tp_size=2, fsdp_size=2, ep_size=4)
STAGES = dispatching(pp_size=2, tp_size=2, ep_size=2)


def train(
    rank: int, family: str, folder: str, save_hf: bool, layout: dict[str, Any] | None = None
) -> None:
    config = tiny_models.FAMILIES[family](**FAMILIES[family])
    whole = tiny_models.build(config, torch.float32)
    model = parallelize(whole, DistributedConfig(**layout or LAYOUT))
    args = arguments(folder, 2, max_steps=1, save_strategy="steps", save_steps=1, use_cpu=True)
    options = CheckpointOptions(save_hf=save_hf)
    EPTrainer(model, args, train_dataset=Sentences(8), checkpoint_options=options).train()
    model.save_pretrained(f"{folder}/plain")


def contents(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["checkpoint", *words])


@pytest.mark.parametrize(
    ("family", "layout"),
    [*((family, LAYOUT) for family in FAMILIES), ("qwen3_moe", STAGES)],
    ids=[*FAMILIES, "stages"],
)
def test_an_export_is_what_save_pretrained_writes(
    ranks: RankPool, tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    ranks.run(train, family, str(tmp_path), False, layout, world=4, timeout=120)
    checkpoint, plain = tmp_path / "checkpoint-1", tmp_path / "plain"
    result = run("export", str(checkpoint), str(tmp_path / "out"), "--max-shard-size", "60KB")
    assert result.exit_code == 0, result.output
    expected, found = contents(plain), contents(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    result = run("export", str(checkpoint))
    assert result.exit_code == 0, result.output
    ids = Sentences(2).ids
    with torch.no_grad():
        logits = [
            transformers.AutoModelForCausalLM.from_pretrained(path)(ids).logits
            for path in (plain, tmp_path / "out", checkpoint)
        ]
    torch.testing.assert_close(logits[1], logits[0])
    torch.testing.assert_close(logits[2], logits[0])
    check_checkpoint(checkpoint, values=True)  # it is a training checkpoint still


def test_the_command_looks_checks_and_rewrites(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(train, "qwen3_moe", str(tmp_path), True, world=4, timeout=120)
    checkpoint = tmp_path / "checkpoint-1"
    transformers.AutoModelForCausalLM.from_pretrained(checkpoint)  # save_hf

    told = json.loads(run("inspect", str(checkpoint), "--json").output)
    assert (told["step"], told["world_size"]) == (1, 4)
    assert told["sections"]["model"]["files"] >= 4
    assert told["sections"]["optimizer"]["bytes"] > 2 * told["sections"]["model"]["bytes"]
    text = run("inspect", str(checkpoint), "--tensors").output
    assert "tp=2, fsdp=2, ep=4" in text
    assert "mlp.experts.gate_up_proj" in text

    assert run("verify", str(checkpoint)).exit_code == 0
    fewer = tmp_path / "checkpoint-01"
    result = run("reshard", str(checkpoint), str(fewer), "--files", "2")
    assert result.exit_code == 0, result.output
    assert len(list(section(fewer, "model").glob("*.safetensors"))) == 2
    assert run("verify", str(fewer)).exit_code == 0
    for source, name in ((fewer, "a"), (checkpoint, "b")):
        assert run("export", str(source), str(tmp_path / name)).exit_code == 0
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    assert "exists" in run("reshard", str(checkpoint), str(fewer)).output
    assert "not empty" in run("export", str(checkpoint), str(tmp_path / "a")).output

    path = next(section(checkpoint, "model").glob("rank-00002*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for command in (["verify"], ["export"], ["reshard", str(tmp_path / "c")]):
        result = run(command[0], str(checkpoint), *command[1:])
        assert result.exit_code == 1
        assert path.name in result.output
        assert "the values of " in result.output
