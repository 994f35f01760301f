"""A model with a chunked loss is the model: loss and every gradient, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from dispatching import dispatching, name_of
from equality import all_float64
from test_trainer import GLOBAL_BATCH, arguments, check_same, curve, data
from test_trainer import build as build_for_trainer
from tiny_models import build, qwen3_moe
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ep_mesh import DistributedConfig
from ep_plans import full_tensor, parallel_state
from ep_testing import RankPool
from ep_trainer import EPTrainer, chunk_loss
from expert_parallel import parallelize

VOCAB = 96


def batch(shards: int) -> dict[str, Tensor]:
    """[shards, 2, 7] ids; the labels of prompts don't count, fewer in one shard than in another."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (shards, 2, 7), generator=generator)
    labels = ids.clone()
    for shard in range(shards):
        labels[shard, :, : 1 + shard] = -100
    return {"input_ids": ids, "labels": labels}


def on_rank(
    rank: int, sizes: dict[str, Any], changes: dict[str, Any], per_token: bool
) -> dict[str, float]:
    """The relative error of the loss, and of each gradient."""
    with all_float64():
        config = DistributedConfig(**dispatching(**sizes))
        whole = batch(config.dp_size)
        number = {"num_items_in_batch": torch.tensor(17)} if per_token else {}
        model = build(qwen3_moe(**changes))
        parts = [
            {key: value[shard] for key, value in whole.items()} for shard in range(config.dp_size)
        ]
        losses = [model(**part, **number, use_cache=False).loss for part in parts]
        torch.stack(losses).mean().backward()
        expected = {name: p.grad for name, p in model.named_parameters()}

        sharded = parallelize(build(qwen3_moe(**changes)), config)
        chunk_loss(sharded, 5)
        state = parallel_state(sharded)
        shard = state.mesh.layout.batch_of(rank)
        output = sharded(**parts[shard], **number, use_cache=False)
        assert output.logits is None
        output.loss.backward()
        errors = {"loss": abs(output.loss - losses[shard]).item()}
        for name, parameter in sharded.named_parameters():
            difference = full_tensor(parameter.grad) - expected[name]
            errors[name] = (difference.norm() / expected[name].norm().clamp(min=1e-9)).item()
        sharded.eval()
        with torch.no_grad():
            assert sharded(**parts[shard]).logits.shape == (2, 7, sharded.config.vocab_size)
    return errors


TIED = {"tie_word_embeddings": True}
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, {}),
    ({"tp_size": 2, "fsdp_size": 2, "ep_size": 2, "enable_sequence_parallel": True}, TIED),
    ({"fsdp_size": 4, "ep_size": 2}, TIED),
    ({"tp_size": 4, "ep_size": 4}, {"vocab_size": 97}),
]


@pytest.mark.parametrize(("sizes", "changes"), LAYOUTS, ids=lambda value: name_of(value))
def test_loss_and_gradients_are_the_models(
    ranks: RankPool, sizes: dict[str, Any], changes: dict[str, Any]
) -> None:
    for errors in ranks.run(on_rank, sizes, changes, bool(changes), world=4, timeout=120):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < 1e-9, (worst, errors[worst])


def in_bf16(rank: int) -> list[tuple[str, float]]:
    """Under FSDP's mixed precision: relative distances of the gradients from those of the plain loss."""
    sizes = dispatching(tp_size=2, fsdp_size=2, ep_size=2, fsdp_mixed_precision=True)
    config = DistributedConfig(**sizes)
    model = parallelize(build(qwen3_moe(), torch.float32), config)
    part = {key: value[config.layout.batch_of(rank)] for key, value in batch(2).items()}
    grads = []
    for chunked in (False, True):
        if chunked:
            chunk_loss(model, 5)
        model.zero_grad()
        model(**part, use_cache=False).loss.backward()
        grads.append({name: full_tensor(p.grad) for name, p in model.named_parameters()})
    plain, found = grads
    return [(name, ((found[name] - g).norm() / g.norm()).item()) for name, g in plain.items()]


def test_in_mixed_precision(ranks: RankPool) -> None:
    for errors in ranks.run(in_bf16, world=4, timeout=120):
        for name, error in errors:
            assert error < 3e-2, (name, error)  # each side rounds a chain of bf16 products


class Largest(TorchDispatchMode):
    """The most elements that any new tensor has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_no_tensor_of_a_step_has_the_size_of_the_logits() -> None:
    vocab, tokens = 1000, 64
    model = build(qwen3_moe(vocab_size=vocab, num_hidden_layers=1), torch.float32)
    ids = torch.randint(3, vocab, (2, tokens // 2))
    found = []
    for chunked in (False, True):
        if chunked:
            chunk_loss(model, 8)
        with Largest() as largest:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(largest.elements)
    assert found == [tokens * vocab, vocab * model.config.hidden_size], "then the head's weight"


def train(rank: int, folder: str, chunk: int | None) -> Any:
    config = DistributedConfig(**dispatching(tp_size=2, fsdp_size=2, ep_size=4))
    args = arguments(folder, GLOBAL_BATCH // 4 * 2, max_steps=4, label_smoothing_factor=0.1)
    model = parallelize(build_for_trainer(), config)
    return curve(EPTrainer(model, args, **data(), loss_chunk_tokens=chunk))


def test_the_trainer_learns_the_same(ranks: RankPool, tmp_path: Any) -> None:
    args = arguments(
        str(tmp_path), GLOBAL_BATCH, max_steps=4, label_smoothing_factor=0.1, use_cpu=True
    )
    expected = curve(transformers.Trainer(build_for_trainer(), args, **data()))
    for found in ranks.run(train, str(tmp_path), 10, world=4, timeout=120):
        check_same(found, expected)


def test_what_a_chunked_loss_cannot_see_is_refused() -> None:
    model = build(qwen3_moe())
    with pytest.raises(ValueError, match="int of at least 1"):
        chunk_loss(model, 0)
    with pytest.raises(ValueError, match="ForCausalLMLoss"):
        chunk_loss(nn.Linear(2, 2))
    config = transformers.GraniteMoeConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        logits_scaling=3.0,
    )
    scaled = transformers.GraniteMoeForCausalLM(config)
    chunk_loss(scaled)
    ids = torch.ones((1, 4), dtype=torch.long)
    with pytest.raises(ValueError, match="changes its logits"):
        scaled.train()(input_ids=ids, labels=ids)


def test_a_softcap_between_head_and_loss() -> None:
    config = transformers.Gemma2Config(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        final_logit_softcapping=0.5,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(config).double().train()
    ids = torch.arange(8).reshape(2, 4)
    found = []
    for chunked in (False, True):
        if chunked:
            chunk_loss(model, 1)
            chunk_loss(model, 3)  # instead
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append([loss.detach().float(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
