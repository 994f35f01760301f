"""What cannot work is refused when the trainer is built."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainingArguments

from ep_trainer.checks import check_arguments, check_saves


def arguments(**changes: Any) -> TrainingArguments:
    values = {"output_dir": "unused", "use_cpu": True, "report_to": [], "save_strategy": "no"}
    return TrainingArguments(**values | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp16_full_eval": True}, "dtype"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"accelerator_config": {"even_batches": False}}, "even_batches"),
        ({"optim": "adafactor"}, "adamw_torch"),
        ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size=0"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps=-1"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_arguments_are_refused_with_what_to_do(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_arguments(arguments(**changes))


def test_every_problem_is_told_at_once() -> None:
    args = arguments(fp16_full_eval=True, auto_find_batch_size=True)
    with pytest.raises(ValueError, match=r"(?s)fp16_full_eval.*auto_find_batch_size"):
        check_arguments(args)


def test_checkpoints_of_every_kind_are_allowed() -> None:
    check_arguments(arguments())
    best = {"load_best_model_at_end": True, "eval_strategy": "steps"}
    for changes in ({}, {"save_only_model": True}, best):
        check_arguments(arguments(save_strategy="steps", **changes))


def test_a_save_pretrained_that_gathers_nothing_is_refused() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, moe_intermediate_size=4))
    with pytest.raises(ValueError, match="one rank's shards"):
        check_saves(model)
    model.save_pretrained = lambda folder: None
    check_saves(model)
