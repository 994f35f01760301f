"""Adapters of sharded models are PEFT's: same gradients, same steps, same files.

The reference is `peft` around the plain model in one process, in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from dispatching import dispatching
from equality import all_float64, batches, by_mesh
from safetensors.torch import load_file
from test_trainer import Sentences, arguments
from test_trainer import build as build_float32
from tiny_models import FAMILIES, build
from torch import Tensor, nn

from ep_mesh import DistributedConfig
from ep_plans import full_tensor, parallel_state
from ep_plans.stages import children_first
from ep_testing import RankPool
from ep_trainer import EPTrainer, PipelineRunner
from expert_parallel import add_lora, load_lora, parallelize

peft = pytest.importorskip("peft")

VOCAB, STEPS = 96, 3
EXPERTS = {
    "qwen3_moe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gpt_oss": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "mixtral": [],  # by the names of older checkpoints, below
    "deepseek_v3": ["mlp.experts.down_proj"],
    "llama4": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    "qwen2_moe": ["mlp.experts.gate_up_proj", "mlp.gate.weight"],
}
LINEAR = {
    "deepseek_v3": ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "mixtral": ["q_proj", "k_proj", "o_proj", "w1", "w2", "w3", "gate"],
    "qwen2_moe": ["q_proj", "v_proj", "o_proj", "shared_expert_gate", "lm_head"],
}
USUAL = ["q_proj", "k_proj", "v_proj", "o_proj"]
WHOLE = {
    "qwen3_moe": ["mlp.gate", "lm_head", "k_norm"],
    "mixtral": ["embed_tokens"],
    "deepseek_v3": ["mlp.gate"],
}


def lora_config(family: str, **changes: Any) -> Any:
    values = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": LINEAR.get(family, USUAL),
        "target_parameters": EXPERTS[family] or None,
        "modules_to_save": WHOLE.get(family),
    }
    return peft.LoraConfig(**values | changes)


def by_peft(family: str, folder: Path | str | None = None, **changes: Any) -> Any:
    """A plain model with PEFT's adapters: new ones with nothing at zero, or those of a directory."""
    model = build(FAMILIES[family]())
    if folder is not None:
        return peft.PeftModel.from_pretrained(
            model, folder, is_trainable=True, autocast_adapter_dtype=False
        )
    config = lora_config(family, **changes)
    wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=generator)
    return wrapped


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(by_mesh(model), lr=1e-2, eps=1e-6, foreach=False)


def in_file_form(found: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Gradients or values by the names, and in the form, of PEFT's files."""
    from expert_parallel.lora.adding import adapters_of, lora_state, packed, saved_tensors

    state = lora_state(model)
    assert state is not None
    whole = {
        f"base_model.model.{name}": found[name]
        for name, tensor in saved_tensors(model, state.targets)
        if tensor.requires_grad
    }
    return whole | {
        f"base_model.model.{adapter.layer.key}.{factor}.weight": packed(
            found[f"{name}.{factor}"], adapter.layer, factor
        )
        for name, adapter in adapters_of(model)
        for factor in ("lora_A", "lora_B")
    }


def train_by_peft(
    family: str, folder: Path, ids: Tensor
) -> tuple[dict[str, Tensor], list[float], Tensor]:
    """First gradients, losses, and logits after the steps; the first adapters are saved."""
    model = by_peft(family)
    model.save_pretrained(folder)
    optimizer = optimizer_of(model)
    losses, grads = [], {}
    for _ in range(STEPS):
        each = [model(input_ids=part, labels=part, use_cache=False).loss for part in ids]
        loss = torch.stack(each).mean()
        loss.backward()
        grads = grads or {
            name.replace(".modules_to_save", "").replace(".default", ""): p.grad.clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return grads, losses, model(input_ids=ids[0], use_cache=False).logits.detach()


def steps_on_rank(
    rank: int, family: str, sizes: dict[str, Any], first: str, last: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float]]:
    with all_float64():
        config = DistributedConfig(**sizes)
        model = parallelize(build(FAMILIES[family]()), config, **options)
        load_lora(model, first, trainable=True)
        state = parallel_state(model)
        assert state is not None
        runner = PipelineRunner(model) if config.pp_size > 1 else None
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        assert names
        whole = tuple(WHOLE.get(family, ()))
        assert all(".lora." in name or name.rpartition(".")[0].endswith(whole) for name in names)
        assert names <= state.shardings.keys()
        ids = batches(config, VOCAB)[state.mesh.layout.batch_of(state.mesh.rank)]
        optimizer = optimizer_of(model)
        losses, grads = [], {}
        for _ in range(STEPS):
            batch = {"input_ids": ids, "labels": ids, "use_cache": False}
            if runner is None:
                loss = model(**batch).loss
                loss.backward()
            else:
                loss = runner.step(batch)
            grads = grads or {
                name: full_tensor(p.grad)
                for name, p in model.named_parameters()
                if p.grad is not None
            }
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.save_pretrained(last)
        return in_file_form(grads, model), losses


Case = tuple[str, dict[str, Any], dict[str, Any]]
FOUR = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}
SAMPLE: list[Case] = [
    ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, {}),
    ("gpt_oss", {"tp_size": 2}, {}),
    ("mixtral", FOUR, {}),
    ("qwen3_moe", {"pp_size": 2, "tp_size": 2, "ep_size": 2}, {}),
]
ALL: list[Case] = [
    *SAMPLE,
    ("qwen3_moe", FOUR, {}),
    ("qwen3_moe", {"tp_size": 2}, {}),
    ("qwen3_moe", {"tp_size": 8, "ep_size": 8}, {}),  # copies of key-value heads
    ("qwen3_moe", {"tp_size": 2, "enable_sequence_parallel": True}, {}),
    ("qwen3_moe", {"tp_size": 4, "ep_size": 4, "enable_sequence_parallel": True}, {}),
    ("qwen3_moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}, {"ep_options": {"num_chunks": 2}}),
    ("qwen3_moe", {"fsdp_size": 2, "dp_replicate_size": 2}, {}),
    ("qwen3_moe", {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}, {}),
    ("gpt_oss", FOUR, {}),
    ("mixtral", {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}, {}),
    ("deepseek_v3", FOUR, {}),
    ("llama4", {"fsdp_size": 2, "ep_size": 2}, {}),
    ("llama4", FOUR, {}),
    ("llama4", {"tp_size": 2}, {}),
    ("qwen2_moe", FOUR, {}),
    ("qwen2_moe", {"pp_size": 2, "fsdp_size": 2, "ep_size": 2}, {}),
    ("mixtral", {"pp_size": 2, "tp_size": 2, "fsdp_size": 2, "ep_size": 4}, {}),
    ("gpt_oss", {"pp_size": 2, "dp_replicate_size": 2, "fsdp_size": 2}, {}),
]


def name(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ",".join(f"{key.removesuffix('_size')}={size}" for key, size in value.items())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "options" in metafunc.fixturenames:
        cases = ALL if metafunc.config.getoption("--all-layouts") else SAMPLE
        metafunc.parametrize(("family", "sizes", "options"), cases, ids=name)


def test_training_is_pefts(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    config = DistributedConfig(**sizes)
    ids = batches(config, VOCAB)
    first, last = tmp_path / "first", tmp_path / "last"
    with all_float64():
        grads, losses, logits = train_by_peft(family, first, ids)
    arguments = family, dispatching(**sizes), str(first), str(last), options
    answers = ranks.run(steps_on_rank, *arguments, world=config.layout.world_size, timeout=120)
    seen = set().union(*(found for found, _ in answers))
    assert seen == grads.keys()
    scale = max(g.norm() for g in grads.values())
    for rank, (found, _) in enumerate(answers):
        assert config.pp_size > 1 or found.keys() == seen
        for key in found:
            expected = grads[key]
            error = (found[key] - expected).norm() / max(expected.norm(), 1e-4 * scale)
            assert error < 1e-9, (rank, key, float(error))
    shards = [curve for at, (_, curve) in enumerate(answers) if at % config.layout.tp == 0]
    for step, expected_loss in enumerate(losses):
        mean = sum(curve[step] for curve in shards) / len(shards)
        assert mean == pytest.approx(expected_loss, rel=1e-9)
    with all_float64():
        again = by_peft(family, last)(input_ids=ids[0], use_cache=False).logits
    assert (again - logits).norm() / logits.norm() < 1e-9


def trained(
    rank: int,
    sizes: dict[str, Any] | None,
    first: str,
    last: str,
    layers: int = 2,
    checkpoint: str | None = None,
    **changes: Any,
) -> list[float]:
    """Losses of `EPTrainer`, or of `transformers.Trainer` around PEFT's model: float32, fused AdamW."""
    changes = {"max_steps": 4, "weight_decay": 0.0, **changes}
    args = arguments(last, 4 if sizes is None else 2, **changes)
    kind: Any = transformers.Trainer
    model: Any = build_float32(num_hidden_layers=layers)
    if sizes is None:
        args.use_cpu = True
        model = peft.PeftModel.from_pretrained(model, first, is_trainable=True)
    else:
        kind = EPTrainer
        model = load_lora(parallelize(model, DistributedConfig(**sizes)), first, trainable=True)
    trainer = kind(model, args, train_dataset=Sentences(40))
    trainer.train(resume_from_checkpoint=checkpoint)
    if sizes is not None:
        trainer.save_model(last)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(ranks: RankPool, tmp_path: Path) -> None:
    """The trainer's own optimizer, accumulation and files; the fused optimizer reads raw memory."""
    model = peft.get_peft_model(build_float32(), lora_config("qwen3_moe", r=4))
    model.save_pretrained(tmp_path / "first")
    first, last = str(tmp_path / "first"), str(tmp_path / "last")
    expected = trained(0, None, first, str(tmp_path / "other"))
    sizes = dispatching(fsdp_size=2, ep_size=2)
    for found in ranks.run(trained, sizes, first, last, world=2, timeout=120):
        assert found == pytest.approx(expected, rel=1e-5)
    assert {"adapter_config.json", "adapter_model.safetensors", "training_args.bin"} <= {
        path.name for path in Path(last).iterdir()
    }
    assert not list(Path(last).glob("model*.safetensors"))


def trained_with_saves(rank: int, sizes: dict[str, Any], first: str, run: str) -> list[float]:
    changes = {"save_strategy": "steps", "save_steps": 2}
    return trained(rank, sizes, first, run, 4, **changes)


def test_trainer_over_stages(ranks: RankPool, tmp_path: Path) -> None:
    """The first rank, of two stages, trains nothing; and another layout goes on from a checkpoint."""
    config = lora_config(
        "qwen3_moe",
        r=4,
        target_parameters=None,
        layers_to_transform=[1, 2],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(build_float32(num_hidden_layers=4), config)
    model.save_pretrained(tmp_path / "first")
    first, run = str(tmp_path / "first"), str(tmp_path / "run")
    expected = trained(0, None, first, str(tmp_path / "other"), 4)
    sizes = dispatching(pp_size=2, fsdp_size=2, ep_size=2, pp_schedule="zero_bubble")
    for found in ranks.run(trained_with_saves, sizes, first, run, world=4, timeout=200):
        assert found == pytest.approx(expected, rel=1e-5)
    sizes, last = dispatching(fsdp_size=2, ep_size=2), str(tmp_path / "last")
    checkpoint = f"{run}/checkpoint-2"
    for found in ranks.run(trained, sizes, first, last, 4, checkpoint, world=2, timeout=120):
        assert found == pytest.approx(expected, rel=1e-5)
    whole, resumed = (load_file(f"{each}/adapter_model.safetensors") for each in (run, last))
    assert whole.keys() == load_file(f"{first}/adapter_model.safetensors").keys()
    for key, value in whole.items():
        torch.testing.assert_close(resumed[key], value, rtol=1e-3, atol=1e-5)


def added_over_stages(rank: int) -> None:
    plain = build(FAMILIES["qwen3_moe"]())
    add_lora_plainly(plain)
    model = parallelize(build(FAMILIES["qwen3_moe"]()), DistributedConfig(pp_size=2))
    add_lora(model, lora_config("qwen3_moe"), seed=1)
    whole = plain.state_dict()
    pipeline = parallel_state(model).pipeline  # type: ignore[union-attr]
    assert pipeline.tensors == tuple(whole)
    assert pipeline.modules == tuple(children_first(plain))
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole[name]), name


def test_adapters_of_stages_are_those_of_the_whole_model(ranks: RankPool) -> None:
    ranks.run(added_over_stages, world=2)


def in_bfloat16(rank: int, sizes: dict[str, Any]) -> list[tuple[Tensor, float]]:
    """Logits, and the loss, of a bfloat16 model with float32 adapters, and steps of it."""
    config = DistributedConfig(**sizes)
    model = parallelize(build(FAMILIES["qwen3_moe"](), torch.bfloat16), config)
    plain = build(FAMILIES["qwen3_moe"](), torch.bfloat16)
    ids = batches(config, VOCAB)[parallel_state(model).mesh.layout.batch_of(rank)]  # type: ignore[union-attr]
    add_lora(model, lora_config("qwen3_moe", modules_to_save=None), seed=1)
    add_lora_plainly(plain)
    told = []
    for each in (model, plain):
        optimizer = torch.optim.AdamW(by_mesh(each), lr=1e-2)
        assert {p.dtype for p in each.parameters() if p.requires_grad} == {torch.float32}
        assert {p.dtype for p in each.parameters() if not p.requires_grad} == {torch.bfloat16}
        for _ in range(2):
            out = each(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(optimizer.state) == sum(p.requires_grad for p in each.parameters())
        told.append((out.logits.detach().float(), out.loss.item()))
    return told


def add_lora_plainly(model: Any) -> None:
    """As `add_lora`, in a process that takes itself for alone."""
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        add_lora(model, lora_config("qwen3_moe", modules_to_save=None), seed=1)


def test_base_in_bfloat16(ranks: RankPool) -> None:
    for (found, loss), (expected, plain_loss) in ranks.run(
        in_bfloat16, dispatching(tp_size=2, ep_size=2), world=2
    ):
        # Of eight bits of mantissa, in sums of another order.
        assert (found - expected).norm() / expected.norm() < 3e-2
        assert loss == pytest.approx(plain_loss, rel=2e-2)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "gpt_oss",
            {"target_modules": "all-linear", "target_parameters": None},
            "experts too.*gate_up_proj",
        ),
        (
            "gpt_oss",
            {"target_modules": ["q_proj", "down_proj"], "target_parameters": None},
            r"\['down_proj'\]",
        ),
        (
            "gpt_oss",
            {"target_modules": r".*\.(q_proj|down_proj)", "target_parameters": None},
            "would skip",
        ),
        ("qwen3_moe", {"target_modules": ["q_porj"], "target_parameters": None}, "q_porj.*q_proj"),
        ("qwen3_moe", {"target_modules": ["q_proj", "w_proj"]}, r"\['w_proj'\] match nothing"),
        (
            "qwen3_moe",
            {"target_parameters": ["experts.up"]},
            r"\['experts.up'\] match nothing.*experts.gate_up_proj",
        ),
        (
            "qwen3_moe",
            {"target_modules": ["gate_proj", "q_proj"]},
            "without also targeting up_proj",
        ),
        ("qwen3_moe", {"use_dora": True}, "use_dora=True"),
        ("qwen3_moe", {"init_lora_weights": "pissa"}, "pissa"),
        ("qwen3_moe", {"modules_to_save": ["lm_haed"]}, "'lm_haed'; names end with.*'lm_head'"),
        ("qwen3_moe", {"modules_to_save": ["self_attn"]}, "both name .*q_proj"),
        ("qwen2_moe", {"modules_to_save": ["act_fn"]}, "act_fn has no weights"),
        ("qwen3_moe", {"lora_dropout": 0.1}, "lora_dropout"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_what_peft_would_skip_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    model = build(FAMILIES[family]())
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        add_lora(model, lora_config(family, **changes))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == names


def test_a_tied_weight_does_not_train_whole() -> None:
    model = build(FAMILIES["qwen3_moe"](tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"lm_head\.weight is tied to another weight"):
        add_lora(model, lora_config("qwen3_moe", modules_to_save=["lm_head"]))


def test_what_cannot_be_adapted_is_refused(tmp_path: Path) -> None:
    model = build(FAMILIES["qwen3_moe"]())
    config = lora_config("qwen3_moe")
    attention = model.model.layers[0].self_attn
    whole = attention.q_proj.weight
    attention.q_proj.weight = nn.Parameter(whole.to(torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"q_proj.weight.*quantized, while .*gate_up_proj"):
        add_lora(model, config)
    attention.q_proj.weight = whole
    with pytest.raises(TypeError, match="PeftModel"):
        add_lora(peft.get_peft_model(build(FAMILIES["qwen3_moe"]()), config), config)
    add_lora(model, config)
    with pytest.raises(ValueError, match="adapters already"):
        add_lora(model, config)
    with pytest.raises(ValueError, match="shard it first"):
        parallelize(model, DistributedConfig())
    model.save_pretrained(tmp_path)
    other = build(FAMILIES["qwen3_moe"](moe_intermediate_size=16))
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: .* should be"):
        load_lora(other, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        load_lora(other, tmp_path / "nowhere")
    damaged = tmp_path / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"adapter_model\.safetensors is damaged"):
        load_lora(other, tmp_path)


def test_experts_and_dense_layers_of_one_name_are_told() -> None:
    config = lora_config(
        "deepseek_v3", target_modules="all-linear", target_parameters=None, modules_to_save=None
    )
    with pytest.warns(UserWarning, match=r"leaves out \['model.layers.0.mlp.gate_proj'"):
        add_lora(build(FAMILIES["deepseek_v3"]()), config)


def test_some_layers_only_and_dropout() -> None:
    config = lora_config(
        "qwen3_moe",
        target_modules=["q_proj"],
        target_parameters=None,
        modules_to_save=None,
        layers_to_transform=[1],
        init_lora_weights=False,
        lora_dropout=0.5,
    )
    model = add_lora(build(FAMILIES["qwen3_moe"]()), config, seed=0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    path = "model.layers.1.self_attn.q_proj.lora.weight"
    assert trained == {f"{path}.lora_A", f"{path}.lora_B"}
    ids = torch.arange(3, 10)[None]
    first, second = (model(input_ids=ids).logits for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    first, second = (model(input_ids=ids).logits for _ in range(2))
    assert torch.equal(first, second)


def test_initial_values_are_pefts_in_kind() -> None:
    for kind in (True, "gaussian"):
        config = lora_config("qwen3_moe", init_lora_weights=kind, r=8)
        ours = add_lora(build(FAMILIES["qwen3_moe"]()), config, seed=0)
        theirs = peft.get_peft_model(build(FAMILIES["qwen3_moe"]()), config)
        layer = ours.model.layers[0].mlp.experts.lora["gate_up_proj"]
        wrapper = theirs.base_model.model.model.layers[0].mlp.experts.base_layer
        assert not layer.lora_B.any()
        expected = wrapper.lora_A["default"].weight
        assert layer.lora_A.std().item() == pytest.approx(expected.std().item(), rel=0.1)
        assert layer.lora_A.numel() == expected.numel()
