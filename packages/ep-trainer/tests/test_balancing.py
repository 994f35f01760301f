"""The auxiliary loss of the global batch from the shards' sums."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ep_testing import RankPool
from ep_trainer.balancing import balancing_loss, global_balancing_loss, load_sums

EXPERTS, TOP_K, LAYERS, TOKENS = 6, 2, 3, 10


def logits(shard: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(shard)
    size = (LAYERS, TOKENS, EXPERTS)
    return tuple(torch.randn(size, generator=generator).mul(1 + shard))


def mask(shard: int) -> Tensor:
    return torch.arange(TOKENS).lt(TOKENS - 3 * shard).long().reshape(2, 5)  # uneven


def test_the_formula_is_that_of_transformers() -> None:
    for attention_mask in (None, mask(1)):
        expected = load_balancing_loss_func(logits(0), EXPERTS, TOP_K, attention_mask)
        found = balancing_loss(*load_sums(logits(0), TOP_K, attention_mask))
        torch.testing.assert_close(found, expected)


def on_shard(rank: int, masked: bool) -> tuple[Tensor, list[Tensor]]:
    own = tuple(layer.requires_grad_() for layer in logits(rank))
    sums = load_sums(own, TOP_K, mask(rank) if masked else None)
    loss = global_balancing_loss(*sums, dist.group.WORLD)
    loss.backward()
    return loss.detach(), [layer.grad for layer in own]


def test_value_and_gradient_are_those_of_the_global_batch(ranks: RankPool) -> None:
    for world in (1, 2, 3):
        for masked in (False, True):
            whole = tuple(
                torch.cat(layer).requires_grad_()
                for layer in zip(*(logits(shard) for shard in range(world)), strict=True)
            )
            masks = torch.cat([mask(shard) for shard in range(world)]) if masked else None
            expected = load_balancing_loss_func(whole, EXPERTS, TOP_K, masks)
            expected.backward()
            results = ranks.run(on_shard, masked, world=world)
            for shard, (loss, grads) in enumerate(results):
                torch.testing.assert_close(loss, expected.detach())
                for layer, grad in zip(whole, grads, strict=True):
                    part = layer.grad[shard * TOKENS : (shard + 1) * TOKENS]
                    # gradients are the mean over the shards, so a shard's part is `world` times
                    torch.testing.assert_close(grad / world, part)
