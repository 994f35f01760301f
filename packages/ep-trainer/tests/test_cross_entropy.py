"""Chunked cross-entropy is torch's on the logits, without the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ep_dispatch.collectives import chunk_bounds
from ep_testing import RankPool
from ep_trainer import chunked_cross_entropy

TOKENS, HIDDEN, VOCAB = 13, 6, 29


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64).mul(2).to(dtype)
        for size in ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    )
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[::4] = -100
    labels[1], labels[2] = 0, VOCAB - 1
    return hidden, weight, bias, labels


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, settings: dict[str, Any]
) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    if (cap := settings.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    number = settings.get("num_items")
    loss = functional.cross_entropy(
        logits,
        labels,
        reduction="mean" if number is None else "sum",
        label_smoothing=settings.get("label_smoothing", 0.0),
    )
    return loss if number is None else loss / number


def run(function: Any, part: slice, settings: dict[str, Any]) -> list[Tensor]:
    """The loss, and the gradients of three times it."""
    hidden, weight, bias, labels = inputs()
    leaves = [hidden.requires_grad_(), *(x[part].clone().requires_grad_() for x in (weight, bias))]
    loss = function(*leaves, labels, settings)
    (3 * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_items": 40},
    {"num_items": torch.tensor(7), "label_smoothing": 0.2},
    {"softcap": 3.0},
    {"softcap": 2.0, "label_smoothing": 0.1, "num_items": 5},
]


def chunked(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, settings: dict[str, Any]
) -> Tensor:
    return chunked_cross_entropy(hidden, weight, labels, bias=bias, **settings)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 100])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradients_are_those_of_the_logits(
    settings: dict[str, Any], chunk_tokens: int
) -> None:
    expected = run(plain, slice(None), settings)
    found = run(chunked, slice(None), settings | {"chunk_tokens": chunk_tokens})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def over_vocabulary(rank: int, world: int, settings: dict[str, Any]) -> list[Tensor]:
    settings = settings | {"group": torch.distributed.group.WORLD, "vocab_size": VOCAB}
    part = slice(*chunk_bounds(VOCAB, world, rank))
    return run(chunked, part, settings | {"chunk_tokens": 5})


def over_few_entries(rank: int, world: int) -> list[Tensor]:
    """A vocabulary of two over three ranks: the last rank has nothing of it."""
    weight = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    part = weight[slice(*chunk_bounds(2, world, rank))].clone().requires_grad_()
    loss = chunked_cross_entropy(
        torch.tensor([[0.5, 1.0]], dtype=torch.float64),
        part,
        torch.tensor([1]),
        group=torch.distributed.group.WORLD,
        vocab_size=2,
    )
    loss.backward()
    return [loss.detach(), part.grad]


def test_a_vocabulary_cut_over_ranks(ranks: RankPool) -> None:
    for world in (2, 3):
        for settings in SETTINGS[2:]:
            loss, hidden, weight, bias = run(plain, slice(None), settings)
            found = ranks.run(over_vocabulary, world, settings, world=world)
            for rank, (own_loss, own_hidden, *parts) in enumerate(found):
                torch.testing.assert_close([own_loss, own_hidden], [loss, hidden])
                part = slice(*chunk_bounds(VOCAB, world, rank))
                torch.testing.assert_close(parts, [weight[part], bias[part]])
    found = ranks.run(over_few_entries, 3, world=3)
    expected = torch.tensor([2.5, 0.5], dtype=torch.float64).logsumexp(0) - 0.5
    assert all(torch.allclose(loss, expected) for loss, _ in found)
    assert [len(grad) for _, grad in found] == [1, 1, 0]


def test_no_label_counts_and_no_token() -> None:
    hidden, weight, _, labels = inputs()
    nothing = torch.full_like(labels, -100)
    assert chunked_cross_entropy(hidden, weight, nothing).isnan()
    hidden.requires_grad_()
    chunked_cross_entropy(hidden, weight, nothing, num_items=3).backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert chunked_cross_entropy(hidden[:0], weight, labels[:0], num_items=1) == 0


def test_what_is_frozen_has_no_gradient() -> None:
    hidden, weight, _, labels = inputs()
    hidden.requires_grad_()
    chunked_cross_entropy(hidden, weight, labels, chunk_tokens=4).backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_half_precision_is_as_near_as_the_plain_way() -> None:
    hidden, weight, bias, labels = inputs(torch.bfloat16)
    exact = run_at(plain, [x.double() for x in (hidden, weight, bias)], labels)
    ours = run_at(chunked, [hidden, weight, bias], labels)
    naive = run_at(plain, [hidden, weight, bias], labels)
    for mine, theirs, wanted in zip(ours, naive, exact, strict=True):
        error, bound = ((x.double() - wanted).norm() / wanted.norm() for x in (mine, theirs))
        assert error <= max(1.5 * bound, 2**-8)


def run_at(function: Any, leaves: list[Tensor], labels: Tensor) -> list[Tensor]:
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    loss = function(*leaves, labels, {} if function is plain else {"chunk_tokens": 3})
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def test_autocast_computes_in_its_dtype() -> None:
    hidden, weight, bias, labels = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked(hidden, weight, bias, labels, {"chunk_tokens": 4})
        expected = plain(hidden, weight, bias, labels, {})
    torch.testing.assert_close(loss, expected.float(), rtol=1e-3, atol=1e-3)
    assert loss != chunked(hidden, weight, bias, labels, {})


class Largest(TorchDispatchMode):
    """The most elements that any new tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


def test_no_tensor_has_the_size_of_the_logits() -> None:
    tokens, hidden_size, vocab, chunk = 512, 4, 64, 8
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    labels = torch.randint(vocab, (tokens,))
    with Largest() as largest:
        chunked_cross_entropy(hidden, weight, labels, chunk_tokens=chunk).backward()
    assert largest.elements == tokens * hidden_size
    with Largest() as largest:
        functional.cross_entropy(hidden @ weight.T, labels).backward()
    assert largest.elements == tokens * vocab


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens must be"),
        ({"label_smoothing": 1.5}, "label_smoothing must be"),
        ({"softcap": -1.0}, "softcap must be"),
        ({"bias": torch.ones(3)}, r"bias must be \[29\]"),
        ({"vocab_size": 30}, "holds 30 rows, got a weight with 29"),
        ({"labels": torch.zeros(4, dtype=torch.long)}, "one for each position"),
        ({"labels": torch.full((TOKENS,), VOCAB)}, r"labels must be in 0..28"),
        ({"weight": torch.ones(VOCAB, HIDDEN + 1)}, r"weight \[vocabulary, H\]"),
    ],
    ids=str,
)
def test_wrong_inputs_are_refused(changes: dict[str, Any], text: str) -> None:
    hidden, weight, _, labels = inputs()
    given = {"hidden_states": hidden, "weight": weight, "labels": labels} | changes
    with pytest.raises(ValueError, match=text):
        chunked_cross_entropy(**given)


def test_backward_twice_is_refused() -> None:
    hidden, weight, _, labels = inputs()
    loss = chunked_cross_entropy(hidden.requires_grad_(), weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
