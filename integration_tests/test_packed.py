"""Sequences packed into one row are as good as apart, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dispatching import dispatching, name_of
from equality import all_float64
from test_trainer import GLOBAL_BATCH, Sentences, arguments, build
from tiny_models import FAMILIES
from tiny_models import build as build_family
from torch import Tensor, nn
from transformers import AttentionInterface, DataCollatorWithFlattening
from transformers.masking_utils import AttentionMaskInterface

from ep_mesh import DistributedConfig
from ep_plans import full_tensor
from ep_testing import RankPool
from ep_trainer import EPTrainer
from expert_parallel import parallelize

LENGTHS = [(3, 5, 1, 4), (2, 6, 4), (7, 1), (4, 4, 5)]
"""Of the sequences of each data shard."""


def segments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by the kwargs of FlashAttention alone: each sequence by itself."""
    assert attention_mask is None
    assert cu_seq_lens_q is not None
    sizes = cu_seq_lens_q.diff().tolist()
    parts = zip(*(x.split(sizes, dim=2) for x in (query, key, value)), strict=True)
    out = [
        nn.functional.scaled_dot_product_attention(
            *part, is_causal=True, scale=scaling, enable_gqa=True
        )
        for part in parts
    ]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


def samples(shard: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(shard)
    rows = [torch.randint(3, 90, (size,), generator=generator).tolist() for size in LENGTHS[shard]]
    return [{"input_ids": row, "labels": row} for row in rows]


def on_rank(rank: int, family: str, sizes: dict[str, Any], attention: str) -> tuple[str, float]:
    """The worst relative error of a gradient, and whose."""
    with all_float64():
        config = DistributedConfig(**dispatching(**sizes))
        shards = [samples(shard) for shard in range(config.dp_size)]
        items = sum(len(row["input_ids"]) - 1 for shard in shards for row in shard)
        apart = build_family(FAMILIES[family]())
        total = 0.0
        for row in (row for shard in shards for row in shard):
            ids = torch.tensor(row["input_ids"])[None]
            total += apart(
                input_ids=ids, labels=ids, num_items_in_batch=items, use_cache=False
            ).loss
        total.backward()
        packed = build_family(FAMILIES[family]())
        if attention == "segments":
            AttentionInterface.register("segments", segments)
            AttentionMaskInterface.register("segments", lambda *args, **kwargs: None)
        packed.set_attn_implementation(attention)
        packed = parallelize(packed, config)
        collate = DataCollatorWithFlattening(return_flash_attn_kwargs=attention == "segments")
        batch = collate(shards[config.layout.batch_of(rank)], return_tensors="pt")
        loss = packed(**batch, num_items_in_batch=items, use_cache=False).loss
        (loss * config.dp_size).backward()
        expected = {name: p.grad for name, p in apart.named_parameters()}
        errors = {}
        for name, parameter in packed.named_parameters():
            error = (full_tensor(parameter.grad) - expected[name]).norm()
            errors[name] = (error / expected[name].norm().clamp(min=1e-6)).item()
    worst = max(errors, key=errors.__getitem__)
    return worst, errors[worst]


SLICED = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4, "enable_sequence_parallel": True}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, "eager"),
    ("qwen3_moe", SLICED, "sdpa"),
    ("qwen3_moe", SLICED, "segments"),
    ("qwen3_moe", {"tp_size": 4, "ep_size": 4}, "segments"),
    ("deepseek_v3", {"fsdp_size": 4, "ep_size": 2}, "eager"),
]


@pytest.mark.parametrize(
    ("family", "sizes", "attention"), CASES, ids=lambda v: v if isinstance(v, str) else name_of(v)
)
def test_packed_sequences_are_those_apart(
    ranks: RankPool, family: str, sizes: dict[str, Any], attention: str
) -> None:
    for name, error in ranks.run(on_rank, family, sizes, attention, world=4, timeout=120):
        assert error < 1e-9, (name, error)


class Uneven(Sentences):
    """Sentences of many lengths, without masks."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        size = 3 + index % 9
        ids = self.ids[index, :size].tolist()
        return {"input_ids": ids, "labels": [-100, *ids[1:]] if index % 2 else ids}


def train(rank: int, folder: str, sizes: dict[str, Any] | None) -> tuple[list[float], list[int]]:
    changes: dict[str, Any] = {"max_steps": 5, "include_num_input_tokens_seen": "all"}
    collate = DataCollatorWithFlattening()
    train_data = Uneven(21)  # the second step of an epoch fills up a batch with one new sample
    if sizes is None:
        args = arguments(folder, GLOBAL_BATCH, use_cpu=True, **changes)
        trainer = transformers.Trainer(build(), args, collate, train_data)
    else:
        config = DistributedConfig(**dispatching(**sizes))
        args = arguments(folder, GLOBAL_BATCH // config.dp_size, **changes)
        trainer = EPTrainer(parallelize(build(), config), args, collate, train_data)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry["loss"] for entry in logs], [entry["num_input_tokens_seen"] for entry in logs]


def test_a_flattening_collator_trains_as_in_one_process(ranks: RankPool, tmp_path: Path) -> None:
    losses, tokens = train(0, str(tmp_path), None)
    for sizes in ({"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, {"fsdp_size": 4, "ep_size": 4}):
        for own_losses, own_tokens in ranks.run(train, str(tmp_path), sizes, world=4, timeout=120):
            assert own_losses == pytest.approx(losses, rel=1e-5)
            assert own_tokens == tokens
