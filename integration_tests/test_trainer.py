"""The law of the trainer: twenty steps in any layout are twenty steps of one process.

The reference is plain `transformers.Trainer` in this process with the whole global batch; the
trainer under test sees a data shard's part of it on each rank.  AdamW, weight decay, clipping, a
cosine schedule with warm-up, accumulation over two micro-batches, label counts that differ between
samples, shuffled data.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dispatching import dispatching
from torch import Tensor, nn

from ep_mesh import DistributedConfig
from ep_mesh.layout import legal_ep_sizes
from ep_testing import RankPool
from ep_trainer import EPTrainer
from expert_parallel import parallelize

STEPS, GLOBAL_BATCH, LENGTH, EXPERTS = 20, 8, 12, 8


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens; a sample's first labels are ignored, more or fewer of them."""

    def __init__(self, size: int, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 96, (size, LENGTH), generator=generator)
        self.prompt = torch.randint(1, LENGTH - 1, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index].clone()
        labels[: self.prompt[index]] = -100
        mask = torch.ones_like(labels)
        mask[LENGTH - index % 3 :] = 0  # padding at the end, for the auxiliary loss
        return {"input_ids": self.ids[index], "attention_mask": mask, "labels": labels}


@dataclasses.dataclass
class Curve:
    loss: list[float]
    norm: list[float]
    tokens: list[int]
    eval_loss: float
    predictions: Tensor
    flos: float


def build(**changes: Any) -> nn.Module:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes | changes))


def arguments(folder: str, batch: int, **changes: Any) -> transformers.TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "include_num_input_tokens_seen": "all",
        "seed": 11,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(**values | changes)


def curve(trainer: transformers.Trainer) -> Curve:
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    test = trainer.predict(Sentences(13, seed=8))
    logits = test.predictions
    return Curve(
        loss=[entry["loss"] for entry in logs],
        norm=[float(entry["grad_norm"]) for entry in logs],
        tokens=[entry["num_input_tokens_seen"] for entry in logs],
        eval_loss=trainer.evaluate()["eval_loss"],
        predictions=torch.as_tensor(logits[1] if isinstance(logits, tuple) else logits),
        flos=trainer.state.total_flos,
    )


def data() -> dict[str, Sentences]:
    # 164 samples are ten steps and a half: the second epoch starts in the middle of a run, after
    # a last batch that is filled up on some ranks.
    return {"train_dataset": Sentences(164), "eval_dataset": Sentences(21, seed=9)}


def one_process(model: dict[str, Any] | None = None, **changes: Any) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, GLOBAL_BATCH, use_cpu=True, **changes)
        return curve(transformers.Trainer(build(**model or {}), args, **data()))


def on_rank(
    rank: int, sizes: dict[str, Any], model: dict[str, Any], changes: dict[str, Any]
) -> Curve:
    config = DistributedConfig(**dispatching(**sizes))
    sharded = parallelize(build(**model), config)
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, GLOBAL_BATCH // config.dp_size, **changes)
        return curve(EPTrainer(sharded, args, **data()))


AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.1}


@pytest.fixture(scope="module")
def references() -> dict[bool, Curve]:
    """Without and with the auxiliary loss."""
    return {False: one_process(), True: one_process(AUXILIARY)}


# Layouts, and whether with the auxiliary loss.
SAMPLE: list[tuple[dict[str, Any], bool]] = [
    ({"tp_size": 2, "fsdp_size": 4, "ep_size": 4}, True),
    ({"fsdp_size": 8, "ep_size": 8}, False),
    ({"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 4}, True),
    ({"tp_size": 4, "fsdp_size": 2, "ep_size": 4, "enable_sequence_parallel": True}, True),
]


def every_layout() -> list[tuple[dict[str, Any], bool]]:
    layouts: list[dict[str, Any]] = []
    for tp in (8, 4, 2, 1):
        for ep in legal_ep_sizes(tp, 8 // tp, EXPERTS):
            sizes: dict[str, Any] = {"tp_size": tp, "fsdp_size": 8 // tp, "ep_size": ep}
            layouts += [sizes, sizes | {"ep_implementation": "all_to_all"}]
            if ep == tp:
                layouts.append(sizes | {"ep_implementation": "all_reduce"})
    for tp, fsdp in ((2, 2), (1, 4), (4, 1)):
        for ep in legal_ep_sizes(tp, fsdp, EXPERTS):
            layouts.append(
                {"tp_size": tp, "fsdp_size": fsdp, "dp_replicate_size": 2, "ep_size": ep}
            )
    sliced = [
        sizes | {"enable_sequence_parallel": True}
        for sizes in layouts
        if sizes["tp_size"] > 1 and "ep_implementation" not in sizes
    ]
    return [(sizes, auxiliary) for sizes in layouts + sliced for auxiliary in (False, True)]


def name(value: Any) -> str:
    if isinstance(value, bool):
        return "auxiliary" if value else "plain"
    return ",".join(f"{key.removesuffix('_size')}={size}" for key, size in value.items())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sizes" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--all-layouts")
        metafunc.parametrize(("sizes", "auxiliary"), every_layout() if whole else SAMPLE, ids=name)


def check_same(found: Curve, expected: Curve) -> None:
    # float32 sums in another order differ by 1e-6; AdamW carries that on over twenty steps.
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.norm == pytest.approx(expected.norm, rel=1e-3)
    assert found.tokens == expected.tokens
    assert found.eval_loss == pytest.approx(expected.eval_loss, rel=1e-5)
    assert found.flos == pytest.approx(expected.flos, rel=1e-6)
    assert found.predictions.shape == expected.predictions.shape
    torch.testing.assert_close(found.predictions, expected.predictions, rtol=0, atol=1e-3)


def test_curve_is_that_of_one_process(
    ranks: RankPool, sizes: dict[str, Any], auxiliary: bool, references: dict[bool, Curve]
) -> None:
    model = AUXILIARY if auxiliary else {}
    for found in ranks.run(on_rank, sizes, model, {}, timeout=240):
        check_same(found, references[auxiliary])


FOUR = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"label_smoothing_factor": 0.1},
        {"activation_checkpointing": True, "gradient_accumulation_steps": 3},
        {"train_sampling_strategy": "sequential", "dataloader_drop_last": True},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        {
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "include_num_input_tokens_seen": "non_padding",
        },
    ],
    ids=str,
)
def test_other_ways_to_train(ranks: RankPool, changes: dict[str, Any]) -> None:
    few = {"max_steps": 4, **changes}
    if "activation_checkpointing" in few and not hasattr(
        transformers.TrainingArguments, "activation_checkpointing"
    ):
        few["gradient_checkpointing"] = few.pop("activation_checkpointing")  # until 5.17
    expected = one_process(**copy.deepcopy(few))  # transformers writes into dicts that it is given
    for found in ranks.run(on_rank, FOUR, {}, few, world=4, timeout=120):
        check_same(found, expected)


def mean_of_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, wanted = outputs.logits[:, :-1], labels[:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    return total / num_items_in_batch


def own_loss(rank: int, sizes: dict[str, Any] | None) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        if sizes is None:
            args = arguments(folder, GLOBAL_BATCH, max_steps=4, use_cpu=True)
            kind, model = transformers.Trainer, build()
        else:
            config = DistributedConfig(**dispatching(**sizes))
            args = arguments(folder, GLOBAL_BATCH // config.dp_size, max_steps=4)
            kind, model = EPTrainer, parallelize(build(), config)
        return curve(kind(model, args, **data(), compute_loss_func=mean_of_tokens))


def test_a_loss_of_ones_own(ranks: RankPool) -> None:
    expected = own_loss(0, None)
    for found in ranks.run(own_loss, FOUR, world=4, timeout=120):
        check_same(found, expected)


def bf16_losses(rank: int) -> list[float]:
    found = on_rank(rank, FOUR, {}, {"bf16": True, "max_steps": 6, "use_cpu": True})
    return found.loss


def test_bf16_autocast_follows_the_curve(ranks: RankPool, references: dict[bool, Curve]) -> None:
    for losses in ranks.run(bf16_losses, world=4, timeout=120):
        # The learning rate's schedule is another one over six steps, so only its first are alike;
        # bf16 keeps 8 bits of each factor.
        assert losses[:3] == pytest.approx(references[False].loss[:3], rel=1e-2)
        assert losses != references[False].loss[:6]


def save(rank: int, folder: str) -> Tensor:
    config = DistributedConfig(**dispatching(**FOUR))
    changes = {
        "max_steps": 4,
        "save_strategy": "best",
        "save_only_model": True,
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }
    model = parallelize(build(), config)
    trainer = EPTrainer(model, arguments(folder, 4, **changes), **data())
    trainer.train()
    trainer.save_model(f"{folder}/last")
    model.eval()
    with torch.no_grad():
        return model(input_ids=Sentences(2).ids, use_cache=False).logits


def test_checkpoints_are_ordinary_ones(ranks: RankPool, tmp_path: Path) -> None:
    logits = ranks.run(save, str(tmp_path), world=4, timeout=120)
    last = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "last").eval()
    with torch.no_grad():
        expected = last(input_ids=Sentences(2).ids).logits
    for found in logits:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (best,) = tmp_path.glob("checkpoint-*")
    kept = {path.name for path in best.iterdir()}
    assert {"model.safetensors", "config.json", "trainer_state.json", "training_args.bin"} <= kept
    assert not any("optimizer" in file for file in kept)
    transformers.AutoModelForCausalLM.from_pretrained(best)
