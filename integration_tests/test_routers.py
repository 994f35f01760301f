"""What balances routers in training: the z-loss and the bias, those of one process in any layout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dispatching import dispatching
from test_selective import CHECKPOINTING
from test_trainer import GLOBAL_BATCH, Sentences, arguments, build, check_same, curve, data
from tiny_models import build as build_family
from tiny_models import deepseek_v3, qwen3_moe
from torch import Tensor, nn

from ep_mesh import DistributedConfig
from ep_plans import full_tensor
from ep_testing import RankPool
from ep_trainer import BiasBalancing, EPTrainer
from ep_trainer.z_loss import RouterZLoss
from expert_parallel import parallelize

SLICED = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4, "enable_sequence_parallel": True}
LAYOUTS: list[dict[str, Any]] = [{"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, SLICED]


# -- z-loss


def test_the_z_loss_is_the_mean_over_the_tokens_of_a_step() -> None:
    samples = Sentences(4)
    rows = [samples[index] for index in range(4)]
    rows[3]["labels"] = torch.full_like(rows[3]["labels"], -100)  # it fills up a batch
    batches = [
        {key: torch.stack([row[key] for row in half]) for key in rows[0]}
        for half in (rows[:2], rows[2:])
    ]
    model = build_family(qwen3_moe(output_router_logits=True))
    z_loss = RouterZLoss(model, 0.5, None)
    number = z_loss.count(batches, torch.device("cpu"))
    terms, expected = [], 0.0
    for batch in batches:
        logits = model(**batch, use_cache=False).router_logits
        terms.append(z_loss.of(batch, number))
        for layer in logits:
            shown = batch["attention_mask"].bool() & batch["labels"].ne(-100).any(1, keepdim=True)
            expected = expected + layer.logsumexp(-1)[shown.flatten()].square().sum()
    expected = 0.5 * expected / sum(int(row["attention_mask"].sum()) for row in rows[:3])
    torch.testing.assert_close(sum(terms), expected)
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    found = torch.autograd.grad(sum(terms), gates, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(expected, gates))
    model.eval()
    model(**batches[0])
    assert not z_loss._logits


def train_with_z_loss(
    rank: int, folder: str, sizes: dict[str, Any] | None, checkpointing: bool
) -> Any:
    changes: dict[str, Any] = {
        "max_steps": 4,
        "gradient_accumulation_steps": 3,
        CHECKPOINTING: checkpointing,
    }
    if sizes is None:
        args = arguments(folder, GLOBAL_BATCH, use_cpu=True, **changes)
        return curve(EPTrainer(build(), args, **data(), router_z_loss_coef=0.3))
    config = DistributedConfig(**dispatching(**sizes))
    args = arguments(folder, GLOBAL_BATCH // config.dp_size, **changes)
    return curve(EPTrainer(parallelize(build(), config), args, **data(), router_z_loss_coef=0.3))


def test_the_z_loss_in_training(ranks: RankPool, tmp_path: Path) -> None:
    expected = train_with_z_loss(0, str(tmp_path), None, False)
    for sizes in LAYOUTS:
        for found in ranks.run(
            train_with_z_loss, str(tmp_path), sizes, sizes is SLICED, world=4, timeout=120
        ):
            check_same(found, expected)


# -- bias


def build_deepseek() -> nn.Module:
    model = build_family(deepseek_v3(), torch.float32)
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.zero_()
    return model


def biases(model: nn.Module) -> list[Tensor]:
    return [value.clone() for name, value in model.named_buffers() if "correction_bias" in name]


def train_with_bias(rank: int, folder: str, sizes: dict[str, Any] | None, **changes: Any) -> Any:
    changes = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, **changes}
    rule = changes.pop("rule", "sign")
    balancing = BiasBalancing(1e-2, rule=rule)
    if sizes is None:
        args = arguments(folder, GLOBAL_BATCH, use_cpu=True, **changes)
        trainer = transformers.Trainer(build_deepseek(), args, **data(), callbacks=[balancing])
    else:
        config = DistributedConfig(**dispatching(**sizes))
        args = arguments(folder, GLOBAL_BATCH // config.dp_size, **changes)
        model = parallelize(build_deepseek(), config)
        trainer = EPTrainer(model, args, **data(), callbacks=[balancing])
    trainer.train()
    if sizes is not None and config.tp_size > 1:
        trainer.save_model(f"{folder}/saved")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], biases(
        trainer.model
    )


def test_the_bias_moves_against_the_load() -> None:
    model = build_deepseek()
    gate = model.model.layers[1].mlp.gate
    chosen: list[Tensor] = []
    gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    balancing = BiasBalancing(0.1)
    balancing.on_train_begin(None, None, None, model=model)
    bias = gate.e_score_correction_bias
    samples = Sentences(2)
    batch = {key: torch.stack([samples[i][key] for i in range(2)]) for key in samples[0]}
    for _ in range(2):
        model(**batch, use_cache=False)
    model.eval()
    model(**batch)
    with torch.no_grad():
        model.train()(**batch)
    shown = batch["attention_mask"].flatten().bool()
    load = sum(torch.bincount(ids[shown].flatten(), minlength=8) for ids in chosen[:2])
    assert torch.equal(balancing._counts[0], load.double())
    balancing.on_optimizer_step()
    torch.testing.assert_close(bias, 0.1 * (load.float().mean() - load).sign())
    before = bias.clone()
    balancing.on_optimizer_step()  # nothing was counted since
    assert torch.equal(bias, before)
    assert gate.e_score_correction_bias is bias
    balancing.on_train_end()
    model(**batch, use_cache=False)
    assert sum(counts.sum() for counts in balancing._counts) == 0


def test_the_bias_is_that_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    rules = ("sign", "proportional")
    alone = {rule: train_with_bias(0, str(tmp_path), None, rule=rule) for rule in rules}
    for rule, sizes, changes in (
        ("sign", LAYOUTS[0], {CHECKPOINTING: True}),
        (
            "proportional",
            SLICED,
            {f"{CHECKPOINTING}_kwargs": {"selective": True}, CHECKPOINTING: True},
        ),
        ("sign", {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}, {}),
    ):
        losses, expected = alone[rule]
        found = ranks.run(
            train_with_bias_on_ranks,
            str(tmp_path),
            sizes,
            {**changes, "rule": rule},
            world=4,
            timeout=120,
        )
        for own_losses, own in found:
            assert own_losses == pytest.approx(losses, rel=1e-5)
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-6)
            assert all(
                torch.equal(mine, first) for mine, first in zip(own, found[0][1], strict=True)
            )
        assert expected[0].abs().max() > 1e-3
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(biases(saved), alone["proportional"][1])


def train_with_bias_on_ranks(
    rank: int, folder: str, sizes: dict[str, Any], changes: dict[str, Any]
) -> Any:
    return train_with_bias(rank, folder, sizes, **copy.deepcopy(changes))


def test_what_bias_balancing_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="rate must be positive"):
        BiasBalancing(0.0)
    with pytest.raises(ValueError, match='"sign" or "proportional"'):
        BiasBalancing(rule="other")
    with pytest.raises(ValueError, match="has none"):
        BiasBalancing().on_train_begin(None, None, None, model=build())
    model = build_deepseek().to(torch.bfloat16)
    with pytest.raises(ValueError, match="keep it in float32"):
        BiasBalancing().on_train_begin(None, None, None, model=model)


class Block(nn.Module):
    """A router whose bias is a parameter, as ERNIE's is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(1, 4), requires_grad=False)
        self.experts = nn.Module()
        self.experts.num_experts = 4
        self.experts.weight = nn.Parameter(torch.zeros(4, 2, 2))
        self.experts.forward = lambda hidden, ids, weights: hidden

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.experts(self.gate(hidden), ids, None)


def move_sharded(rank: int) -> Tensor:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential()
    model.block = Block()
    model.forward = lambda hidden, ids: model.block(hidden, ids)
    fully_shard(model.block)
    balancing = BiasBalancing(0.5)
    balancing.on_train_begin(None, None, None, model=model)
    model.train()(torch.ones(3, 4), torch.tensor([[0, 1], [0, 1], [0, 2]])).sum().backward()
    balancing.on_optimizer_step()
    return full_tensor(model.block.gate.e_score_correction_bias)


def test_a_bias_that_is_a_sharded_parameter(ranks: RankPool) -> None:
    for bias in ranks.run(move_sharded, world=2):
        assert bias.tolist() == [[-0.5, -0.5, 0.5, 0.5]]
