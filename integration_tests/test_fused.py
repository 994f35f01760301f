"""Fused norms and rotary embeddings in sharded models, against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
from equality import all_float64, batches, reference, relative_error
from tiny_models import FAMILIES, build

import expert_parallel
from ep_mesh import DistributedConfig
from ep_plans import full_tensor
from ep_testing import RankPool
from expert_parallel.fusing import inputs, norms, rotary

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 fsdp2 ep4 sp": {
        "tp_size": 2,
        "fsdp_size": 2,
        "ep_size": 4,
        "enable_sequence_parallel": True,
    },
    "tp4": {"tp_size": 4},
    "fsdp4 ep2": {"fsdp_size": 4, "ep_size": 2},
}


def trained(rank: int, family: str, sizes: dict[str, Any]) -> tuple[float, int, int]:
    """The worst error of loss and gradients in float32, and how often each operator ran."""
    config = DistributedConfig(**sizes)
    with all_float64():
        plain = build(FAMILIES[family]())
        ids = batches(config, plain.config.vocab_size)
        losses, grads, _, _ = reference(lambda: build(FAMILIES[family]()), ids)
    ran = {"rms_norm": 0, "apply_rotary": 0}
    patch = pytest.MonkeyPatch()
    patch.setattr(inputs, "SMALL", 0)
    for module, name in ((norms, "rms_norm"), (rotary, "apply_rotary")):
        inner = getattr(module, name)

        def counted(*args: Any, _inner: Any = inner, _name: str = name) -> Any:
            ran[_name] += 1
            return _inner(*args)

        patch.setattr(module, name, counted)
    try:
        model = expert_parallel.parallelize(build(FAMILIES[family]()).float(), config)
        ran.update(dict.fromkeys(ran, 0))  # without what recognised them
        shard = config.layout.batch_of(rank)
        loss = model(input_ids=ids[shard], labels=ids[shard], use_cache=False).loss
        loss.backward()
    finally:
        patch.undo()
    parameters = dict(model.named_parameters())
    worst = abs(loss.item() - losses[shard]) / losses[shard]
    for name, expected in grads.items():
        worst = max(worst, relative_error(full_tensor(parameters[name].grad), expected))
    return worst, ran["rms_norm"], ran["apply_rotary"]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "tp2 fsdp2 ep4 sp"),
        ("qwen3_moe", "tp4"),
        ("mixtral", "fsdp4 ep2"),
    ],
)
def test_equal_one_process(ranks: RankPool, family: str, name: str) -> None:
    for worst, normed, rotated in ranks.run(trained, family, LAYOUTS[name], world=4):
        assert normed > 0
        assert rotated > 0
        assert worst < 1e-4
