"""FSDP's gathers of a layer are started before the dispatch of the layer before it waits for the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatching import dispatching, name_of
from tiny_models import FAMILIES
from tiny_models import build as build_family
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ep_mesh import DistributedConfig
from ep_testing import RankPool
from expert_parallel import parallelize

LAYERS = 3


def events_of(rank: int, family: str, sizes: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What a step does in forward and in backward: gathers by unit, exchanges by number."""
    config = DistributedConfig(**dispatching(**sizes))
    model = parallelize(build_family(FAMILIES[family](num_hidden_layers=LAYERS)), config)
    ids = torch.arange(14).reshape(2, 7) + 3
    events: list[str] = []
    unshard, exchange = FSDPParamGroup.unshard, dist.all_to_all_single

    def gathers(self: Any, *args: Any, **kwargs: Any) -> None:
        started = self._all_gather_result is None and self.is_sharded
        unshard(self, *args, **kwargs)
        if started and self._all_gather_result is not None:
            events.append(f"gather {self._module_fqn}")

    def exchanges(*args: Any, **kwargs: Any) -> Any:
        events.append("exchange")
        return exchange(*args, **kwargs)

    FSDPParamGroup.unshard, dist.all_to_all_single = gathers, exchanges
    try:
        model(input_ids=ids, labels=ids, use_cache=False)  # the first step also sets FSDP up
        events.clear()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        forward = list(events)
        events.clear()
        loss.backward()
    finally:
        FSDPParamGroup.unshard, dist.all_to_all_single = unshard, exchange
    return forward, events


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {"fsdp_size": 4, "ep_size": 2}),
        ("qwen3_moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}),
        ("deepseek_v3", {"fsdp_size": 4, "ep_size": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_a_layer_is_gathered_before_the_one_before_dispatches(
    ranks: RankPool, family: str, sizes: dict[str, Any]
) -> None:
    dense = 1 if family == "deepseek_v3" else 0  # layers without experts at the start
    for forward, backward in ranks.run(events_of, family, sizes, world=4, timeout=120):
        exchanges = [at for at, event in enumerate(forward) if event == "exchange"]
        each = len(exchanges) // (LAYERS - dense)
        for layer in range(1, LAYERS):
            units = [f"gather model.layers.{layer}"]
            if layer >= dense:
                units.append(f"gather model.layers.{layer}.mlp.experts")
            for unit in units:
                started = [at for at, event in enumerate(forward) if event == unit]
                assert started, (unit, forward)
                if layer > dense:
                    assert started[-1] < exchanges[(layer - 1 - dense) * each], (unit, forward)
        gathered = [event for event in backward if event.startswith("gather model.layers")]
        order = [int(event.split(".")[2]) for event in gathered]
        assert order == sorted(order, reverse=True), backward
        # A unit has a gather for each mesh that its parameters lie on.
        assert all(gathered.count(unit) == forward.count(unit) for unit in gathered), backward
