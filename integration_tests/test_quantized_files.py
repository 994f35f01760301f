"""Checkpoints whose experts are in four or eight bits are dequantized on the way, each rank its own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file

from ep_plans import full_tensor
from ep_testing import RankPool
from expert_parallel import AutoModelForCausalLM, add_lora, load_report, parallelize

LAYOUTS = [
    {"tp_size": 2, "fsdp_size": 4, "ep_size": 2},
    {"tp_size": 8, "ep_size": 8},
    {"tp_size": 2, "fsdp_size": 4},
]
IDS = torch.tensor([[5, 9, 17, 33, 65, 2, 11]])
SETTINGS = {
    "gpt_oss": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
    },
    "deepseek_v3": {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    },
}


def gpt_oss_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Experts fused, two values to a byte, with a scale for each 32 of them."""
    model = tiny_models.build(
        tiny_models.gpt_oss(intermediate_size=32, hidden_size=64), torch.bfloat16
    )
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        for name, columns in (("gate_up_proj", 64), ("down_proj", 32)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[key]
            groups = (8, 64, columns // 32)
            tensors[f"{key}_blocks"] = torch.randint(
                0, 256, (*groups, 16), dtype=torch.uint8, generator=generator
            )
            tensors[f"{key}_scales"] = torch.randint(
                120, 128, groups, dtype=torch.uint8, generator=generator
            )
    return tensors


def deepseek_tensors(path: Path) -> dict[str, torch.Tensor]:
    """A tensor per expert in eight bits, with a scale for each block of 16 x 16."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    tiny_models.build(tiny_models.deepseek_v3(**sizes), torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [
        name for name in tensors if ".experts." in name or name.endswith("q_b_proj.weight")
    ]:
        weight = tensors[name].float()
        blocks = weight.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
        scales = blocks.abs().amax((1, 3)) / 448
        quantized = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)
        tensors[name] = quantized.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    return tensors


@pytest.fixture(scope="module", params=["gpt_oss", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make = gpt_oss_tensors if request.param == "gpt_oss" else deepseek_tensors
    save_file(make(path), path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = SETTINGS[request.param]
    (path / "config.json").write_text(json.dumps(config))
    return path


def compare(rank: int, path: str, layout: dict[str, int], out: str) -> int:
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=layout)
    expected, found = plain.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        whole = full_tensor(found[name])
        assert whole.dtype == tensor.dtype, name
        assert torch.equal(whole, tensor), name
    model(IDS, labels=IDS).loss.backward()
    model.save_pretrained(out)
    report = load_report(model)
    assert report is not None
    return report.bytes_read


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_dequantizes_its_share(
    ranks: RankPool, checkpoint: Path, layout: dict[str, int], tmp_path: Path
) -> None:
    read = ranks.run(compare, str(checkpoint), layout, str(tmp_path / "saved"))
    size = (checkpoint / "model.safetensors").stat().st_size
    # A dense weight in eight bits is read whole by each rank that has a part of it.
    assert max(read) < size / 4
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_weights_that_stay_quantized_are_refused_with_advice() -> None:
    from expert_parallel.loading import _check_dequantized

    model: Any = tiny_models.build(tiny_models.gpt_oss())
    _check_dequantized(model)
    model.is_quantized, model.quantization_method = True, "mxfp4"
    with pytest.raises(ValueError, match=r"Mxfp4Config\(dequantize=True\)"):
        _check_dequantized(model)
    model.config.quantization_config = transformers.Mxfp4Config(dequantize=True)
    _check_dequantized(model)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_a_quantizer_that_leaves_experts_out_is_told(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    peft = pytest.importorskip("peft")
    model = tiny_models.build(tiny_models.qwen3_moe(), torch.bfloat16)
    size = sum(layer.mlp.experts.down_proj.nbytes for layer in model.model.layers)
    model.save_pretrained(tmp_path)
    how = {
        "quantization_config": transformers.TorchAoConfig(Int8WeightOnlyConfig()),
        "dtype": torch.bfloat16,
    }
    told = (
        rf"experts.down_proj \(2 x {size // 2} bytes in torch.bfloat16\), {3 * size} bytes in all"
    )
    with pytest.raises(ValueError, match=told):
        AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config={"fsdp_size": 1}, **how)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how)
    with pytest.raises(ValueError, match=told):
        parallelize(plain, {"fsdp_size": 1})
    config = peft.LoraConfig(target_modules=["q_proj"])
    with pytest.raises(ValueError, match=told):
        add_lora(plain, config)
