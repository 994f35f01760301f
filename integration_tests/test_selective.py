"""Selective activation checkpointing: the gradients of a step without it, and nothing sent twice."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from dispatching import dispatching, name_of
from test_trainer import GLOBAL_BATCH, arguments, build, check_same, curve, data
from tiny_models import FAMILIES
from tiny_models import build as build_family
from torch import Tensor

from ep_dispatch import collectives, keep_communicated
from ep_mesh import DistributedConfig
from ep_testing import RankPool
from ep_trainer import EPTrainer
from expert_parallel import parallelize

NEW_NAME = hasattr(transformers.TrainingArguments, "activation_checkpointing")
CHECKPOINTING = "activation_checkpointing" if NEW_NAME else "gradient_checkpointing"  # until 5.17


@contextlib.contextmanager
def communication() -> Iterator[Counter[str]]:
    """How many collectives of each kind run meanwhile, without FSDP's."""
    count: Counter[str] = Counter()
    places = [
        (dist, "all_to_all_single"),
        (dist, "all_reduce"),
        (collectives, "_gather_single"),
        (collectives, "_reduce_scatter_single"),
    ]
    before = [getattr(*place) for place in places]

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return function(*args, **kwargs)

        return call

    for (owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, counted(name, function))
    try:
        yield count
    finally:
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def step(model: Any, ids: Tensor) -> tuple[list[Tensor], Counter[str]]:
    """The gradients of a step, and what it communicates."""
    model.zero_grad()
    with communication() as count:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    locals_ = [
        p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()
    ]
    return [loss.detach(), *locals_], count


def on_rank(rank: int, family: str, sizes: dict[str, Any]) -> None:
    # Llama 4 ships no plan that could mask: it is dispatched by ours.
    config = DistributedConfig(**(sizes if family == "llama4" else dispatching(**sizes)))
    model = parallelize(build_family(FAMILIES[family]()), config)
    shard = config.layout.batch_of(rank)
    ids = torch.arange(14).reshape(2, 7) * (3 + shard) % 90 + 3
    expected, plain = step(model, ids)
    counts = {}
    enable = getattr(model, f"{CHECKPOINTING}_enable")
    for context in (None, keep_communicated):
        more = {} if context is None else {"context_fn": context}
        enable({"use_reentrant": False, **more})
        found, counts[context] = step(model, ids)
        for name, value, wanted in zip(
            ["loss", *(n for n, _ in model.named_parameters())], found, expected, strict=True
        ):
            assert torch.equal(value, wanted), (context, name)
    assert counts[keep_communicated] == plain, (counts, plain)
    assert counts[None].total() > plain.total()


CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}),
    ("qwen3_moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 4, "enable_sequence_parallel": True}),
    ("qwen2_moe", {"fsdp_size": 4, "ep_size": 4}),
    ("deepseek_v3", {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}),
    ("llama4", {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}),
    ("gpt_oss", {"tp_size": 2, "dp_replicate_size": 2, "ep_size": 2}),
]


@pytest.mark.parametrize(
    ("family", "sizes"), CASES, ids=lambda v: v if isinstance(v, str) else name_of(v)
)
def test_gradients_and_collectives_are_those_without_it(
    ranks: RankPool, family: str, sizes: dict[str, Any]
) -> None:
    ranks.run(on_rank, family, sizes, world=4, timeout=120)


def train(rank: int, folder: str, selective: bool) -> tuple[Any, int]:
    config = DistributedConfig(**dispatching(tp_size=2, fsdp_size=2, ep_size=4))
    changes: dict[str, Any] = {"max_steps": 3}
    if selective:
        changes |= {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"selective": True}}
    args = arguments(folder, GLOBAL_BATCH // 2, **changes)
    trainer = EPTrainer(parallelize(build(), config), args, **data())
    args.to_json_string()  # as loggers do
    with communication() as count:
        return curve(trainer), count["all_to_all_single"]


def test_the_trainer_learns_the_same(ranks: RankPool, tmp_path: Any) -> None:
    plain = ranks.run(train, str(tmp_path), False, world=4, timeout=120)
    found = ranks.run(train, str(tmp_path), True, world=4, timeout=120)
    for (one, sent), (other, sent_again) in zip(plain, found, strict=True):
        check_same(other, one)
        assert sent_again == sent


def refuse(rank: int, folder: str, kwargs: dict[str, Any]) -> str:
    config = DistributedConfig(**dispatching(ep_size=2, fsdp_size=2))
    args = arguments(folder, 4, **{CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": kwargs})
    with pytest.raises(ValueError, match="selective") as error:
        EPTrainer(parallelize(build(), config), args, **data())
    return str(error.value)


def test_arguments_that_contradict_each_other(ranks: RankPool, tmp_path: Any) -> None:
    for kwargs in ({"selective": "yes"}, {"selective": True, "use_reentrant": True}):
        ranks.run(refuse, str(tmp_path), kwargs, world=2)
