"""TRL's `SFTTrainer` over a layout trains as it does in one process.

Needs trl, which the development environment does not have: `nox -s trl`.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import transformers
from test_trainer import build

from ep_mesh import DistributedConfig
from ep_testing import RankPool
from ep_trainer import with_layout
from expert_parallel import add_lora, parallelize

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

GLOBAL_BATCH, STEPS, LENGTH = 4, 4, 10


def tokenizer() -> Any:
    """A word is a token."""
    words = {f"w{index}": index for index in range(3, 96)}
    known = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **words}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def texts(size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(size):
        ids = torch.randint(3, 96, (LENGTH,), generator=generator)
        cut = int(torch.randint(1, LENGTH - 2, (), generator=generator))
        words = [f"w{int(each)}" for each in ids]
        rows.append({"prompt": " ".join(words[:cut]), "completion": " " + " ".join(words[cut:])})
    return datasets.Dataset.from_list(rows)


def curve(
    rank: int, sizes: dict[str, Any] | None, lora: bool, changes: dict[str, Any]
) -> tuple[list[dict[str, float]], float]:
    """The logs of some steps, and the evaluation's loss; in one process without `sizes`."""
    model: Any = build()
    shards = 1
    if sizes is not None:
        config = DistributedConfig(**sizes)
        model, shards = parallelize(model, config), config.dp_size
    if lora:
        import peft

        wanted = peft.LoraConfig(
            r=4,
            target_modules=["q_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        add_lora(model, wanted, seed=3)
    with tempfile.TemporaryDirectory() as folder:
        values: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": GLOBAL_BATCH // shards,
            "per_device_eval_batch_size": GLOBAL_BATCH // shards,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "adam_epsilon": 1e-6,
            "logging_steps": 1,
            "save_strategy": "no",
            "router_aux_loss_coef": 0.0,
            "seed": 11,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "dataloader_pin_memory": False,
        }
        kind = trl.SFTTrainer if sizes is None else with_layout(trl.SFTTrainer)
        trainer = kind(
            model,
            trl.SFTConfig(**values | changes),
            train_dataset=texts(40, seed=7),
            eval_dataset=texts(10, seed=8),
            processing_class=tokenizer(),
        )
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return logs, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("sizes", "lora", "changes"),
    [
        ({"tp_size": 2, "ep_size": 2}, False, {"router_aux_loss_coef": 0.01}),
        ({"fsdp_size": 2, "ep_size": 2}, True, {}),
        ({"fsdp_size": 2, "ep_size": 2}, False, {}),
    ],
    ids=str,
)
def test_curve_is_that_of_one_process(
    ranks: RankPool, sizes: dict[str, Any], lora: bool, changes: dict[str, Any]
) -> None:
    expected, eval_loss = curve(0, None, lora, changes)
    for logs, found in ranks.run(curve, sizes, lora, changes, world=2, timeout=240):
        for name, bound in (("loss", 1e-5), ("grad_norm", 1e-3), ("num_tokens", 0.0)):
            wanted = [float(entry[name]) for entry in expected]
            assert [float(entry[name]) for entry in logs] == pytest.approx(wanted, rel=bound), name
        assert found == pytest.approx(eval_loss, rel=1e-5)
