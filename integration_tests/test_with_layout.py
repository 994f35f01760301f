"""A trainer that others derived from `transformers.Trainer`, with a loss of its own, over a layout."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import transformers
from dispatching import dispatching
from test_trainer import GLOBAL_BATCH, Curve, arguments, build, check_same, curve, data
from torch import nn

from ep_mesh import DistributedConfig
from ep_testing import RankPool
from ep_trainer import EPTrainer, with_layout
from expert_parallel import parallelize


class OwnLoss(transformers.Trainer):
    """Computes the loss as trainers of TRL do: from the logits, by label tokens of all processes."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        labels = inputs["labels"][:, 1:]
        total = nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum"
        )
        if num_items_in_batch is None:
            loss = total / labels.ne(-100).sum()
        else:
            shards = self.accelerator.num_processes // self.get_tp_size()
            loss = total / num_items_in_batch * shards
        return (loss, {"loss": loss, "logits": outputs.logits}) if return_outputs else loss


def run(rank: int, sizes: dict[str, Any] | None) -> Curve:
    model: Any = build()
    with tempfile.TemporaryDirectory() as folder:
        if sizes is None:
            args = arguments(folder, GLOBAL_BATCH, max_steps=3, use_cpu=True)
            return curve(OwnLoss(model, args, **data()))
        config = DistributedConfig(**dispatching(**sizes))
        args = arguments(folder, GLOBAL_BATCH // config.dp_size, max_steps=3)
        return curve(with_layout(OwnLoss)(parallelize(model, config), args, **data()))


def test_own_loss_is_that_of_one_process(ranks: RankPool) -> None:
    expected = run(0, None)
    for sizes, world in ({"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, 4), ({"pp_size": 2}, 2):
        for found in ranks.run(run, sizes, world=world, timeout=120):
            check_same(found, expected)


class OwnForward(OwnLoss):
    """Puts a forward of its own into the model, as `SFTTrainer` does."""

    def __init__(self, model: Any, *rest: Any) -> None:
        super().__init__(model, *rest)
        model.forward = lambda **inputs: model.lm_head(model.model(**inputs)[0])


def refuse_own_forward(rank: int) -> None:
    model = parallelize(build(), DistributedConfig(pp_size=2))
    with pytest.raises(ValueError, match="EPOwnForward replaces the model's forward"):
        with_layout(OwnForward)(model, arguments("unused", 2))


def test_a_forward_of_ones_own_over_stages_is_refused(ranks: RankPool) -> None:
    ranks.run(refuse_own_forward, world=2, timeout=60)


def test_classes() -> None:
    assert with_layout(transformers.Trainer) is EPTrainer
    made = with_layout(OwnLoss)
    assert made is with_layout(OwnLoss)
    assert made is with_layout(made)
    assert made.__name__ == "EPOwnLoss"
    assert issubclass(made, EPTrainer)
    assert issubclass(made, OwnLoss)
    with pytest.raises(TypeError, match=r"subclass of transformers\.Trainer, got <class 'int'>"):
        with_layout(int)  # type: ignore[type-var]


def test_what_would_be_skipped_is_refused() -> None:
    model = build()
    model.lm_head.add_module("lora", nn.ModuleDict())  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="output head has adapters"):
        with_layout(OwnLoss)(model, arguments("unused", 1, use_cpu=True))
    with pytest.raises(ValueError, match=r"call expert_parallel\.add_lora"):
        with_layout(OwnLoss)(build(), arguments("unused", 1, use_cpu=True), peft_config=object())
