from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_plans import Attention, Flops, ModelFlops, model_flops


@pytest.mark.parametrize("length", [1, 5, 12, 13])
@pytest.mark.parametrize("kind", ["full", "window", "chunk"])
def test_keys_of_a_query(length: int, kind: str) -> None:
    """Counted one by one."""
    attention = Attention(
        2, 3, 5, window=4 if kind == "window" else None, chunk=4 if kind == "chunk" else None
    )
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = key <= query
    if kind == "window":
        seen &= key > query - 4
    elif kind == "chunk":
        seen &= key // 4 == query // 4
    keys = seen.sum().item() / length
    assert attention.keys(length) == pytest.approx(keys)
    assert attention.flops(length) == pytest.approx(2 * 2 * (3 + 5) * keys)
    assert attention.flops(length, causal=False) == 2 * 2 * (3 + 5) * length


def test_stages_join_to_the_whole() -> None:
    first = ModelFlops({"a": Flops(dense=2.0)}, {"a": Attention(1, 1, 1)})
    last = ModelFlops({"a": Flops(dense=2.0), "b": Flops(head=3.0, frozen=3.0)})
    whole = (first | last).at(3)
    assert whole == Flops(dense=2.0, scores=8.0, head=3.0, frozen=3.0)
    assert whole.forward == 13.0
    assert whole.training == 3 * 13.0 - 3.0


def test_what_stands_for_the_embedding_is_looked_up() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Module(), nn.Linear(2, 5, bias=False)
    model.embed.weight = model.head.weight
    assert model_flops(model).at(1).forward == 2 * 2 * 10, "nothing says what it is"
    model.get_input_embeddings = lambda: model.embed
    assert model_flops(model).at(1).forward == 2 * 10


def test_what_is_not_known_is_told() -> None:
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.weight = nn.Parameter(torch.ones(4, 2, 2))
    with pytest.raises(ValueError, match="experts per token"):
        model_flops(model)
    model.config = SimpleNamespace(num_experts_per_tok=2)
    assert model_flops(model).at(1).experts == 2 * 2 * 4
    model.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="encoder-decoder"):
        model_flops(model)
    with pytest.raises(ValueError, match="sequence_length"):
        ModelFlops().at(0)
