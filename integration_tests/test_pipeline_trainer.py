"""The trainer over pipeline stages: its curve, norms, counts and predictions are those of one process."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import transformers
from test_trainer import (
    AUXILIARY,
    GLOBAL_BATCH,
    Sentences,
    arguments,
    build,
    check_same,
    on_rank,
    one_process,
)

from ep_mesh import DistributedConfig
from ep_testing import RankPool
from ep_trainer import EPTrainer
from expert_parallel import parallelize

FEW = {"max_steps": 4, "gradient_accumulation_steps": 2}
MODEL = {"num_hidden_layers": 4}
SAMPLE: list[dict[str, Any]] = [
    {"pp_size": 2, "fsdp_size": 2, "ep_size": 2},
    {"pp_size": 2, "tp_size": 2, "ep_size": 2, "pp_schedule": "zero_bubble"},
]
REST: list[dict[str, Any]] = [
    {**sizes, "pp_schedule": schedule}
    for sizes in (
        {"pp_size": 2},
        {"pp_size": 2, "fsdp_size": 2, "ep_size": 2},
        {"pp_size": 2, "tp_size": 2, "ep_size": 2},
        {"pp_size": 2, "tp_size": 2, "fsdp_size": 2, "ep_size": 4},
        {"pp_size": 2, "dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
    )
    for schedule in ("1f1b", "interleaved_1f1b", "zero_bubble", "gpipe")
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A sample of layouts; with `--all-layouts` all."""
    if "sizes" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--all-layouts")
        metafunc.parametrize("sizes", [*SAMPLE, *(REST if whole else [])], ids=str)


def world(sizes: dict[str, Any]) -> int:
    count = 1
    for name in ("pp_size", "tp_size", "fsdp_size", "dp_replicate_size"):
        count *= sizes.get(name, 1)
    return count


@pytest.fixture(scope="module")
def expected() -> Any:
    return one_process(MODEL, **FEW)


def test_curve_is_that_of_one_process(
    ranks: RankPool, sizes: dict[str, Any], expected: Any
) -> None:
    for found in ranks.run(on_rank, sizes, MODEL, FEW, world=world(sizes), timeout=240):
        check_same(found, expected)


WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pp_size": 2, "fsdp_size": 2, "ep_size": 2}, {"label_smoothing_factor": 0.1}),
    (
        {"pp_size": 2, "fsdp_size": 2, "ep_size": 2, "pp_schedule": "zero_bubble"},
        {"gradient_checkpointing": True},
    ),
    (
        {"pp_size": 2, "fsdp_size": 2, "ep_size": 2, "pp_schedule": "interleaved_1f1b"},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    ),
]


def test_other_ways_to_train(ranks: RankPool, all_layouts: bool) -> None:
    for sizes, changes in WAYS if all_layouts else WAYS[:1]:
        few = FEW | changes
        expected = one_process(MODEL, **copy.deepcopy(few))
        for found in ranks.run(on_rank, sizes, MODEL, few, world=world(sizes), timeout=240):
            check_same(found, expected)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"pp_schedule": "zero_bubble", "fsdp_mixed_precision": True}, {}),
        ({"pp_schedule": "1f1b"}, {"bf16": True, "use_cpu": True}),
    ],
    ids=["mixed precision", "autocast"],
)
def test_bf16_follows_the_curve(
    ranks: RankPool, layout: dict[str, Any], changes: dict[str, Any], expected: Any
) -> None:
    sizes = {"pp_size": 2, "fsdp_size": 2, "ep_size": 2, **layout}
    for found in ranks.run(on_rank, sizes, MODEL, FEW | changes, world=4, timeout=120):
        # bf16 keeps 8 bits of each factor.
        assert found.loss == pytest.approx(expected.loss, rel=1e-2)
        assert found.loss != expected.loss


def test_auxiliary_loss_is_the_mean_over_micro_batches(ranks: RankPool) -> None:
    count = 4
    coefficient = AUXILIARY["router_aux_loss_coef"]
    # transformers adds the auxiliary losses of the micro-batches that it accumulates.
    each = MODEL | AUXILIARY | {"router_aux_loss_coef": coefficient / count}
    steps = FEW["gradient_accumulation_steps"] * count
    expected = one_process(
        each,
        **FEW
        | {
            "gradient_accumulation_steps": steps,
            "per_device_train_batch_size": GLOBAL_BATCH // count,
        },
    )
    sizes = {"pp_size": 2, "tp_size": 2, "ep_size": 2, "pp_micro_batches": count}
    for found in ranks.run(on_rank, sizes, MODEL | AUXILIARY, FEW, world=4, timeout=240):
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.norm == pytest.approx(expected.norm, rel=1e-3)
        assert found.tokens == expected.tokens


def test_auxiliary_loss_is_that_of_the_batch_where_all_forwards_come_first(ranks: RankPool) -> None:
    expected = one_process(MODEL | AUXILIARY, **FEW)
    sizes = {"pp_size": 2, "fsdp_size": 2, "ep_size": 2, "pp_schedule": "gpipe"}
    for found in ranks.run(on_rank, sizes, MODEL | AUXILIARY, FEW, world=4, timeout=240):
        check_same(found, expected)


SHORT = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 1}


def short_epoch(rank: int | None) -> list[tuple[float, float, int]]:
    """Loss, norm and tokens of a batch of eight samples and one of a single one."""
    model, data = build(**MODEL), Sentences(GLOBAL_BATCH + 1)
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, GLOBAL_BATCH, use_cpu=True, **SHORT)
        if rank is None:
            trainer = transformers.Trainer(model, args, train_dataset=data)
        else:
            layout = DistributedConfig(pp_size=2)
            trainer = EPTrainer(parallelize(model, layout), args, train_dataset=data)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(log["loss"], log["grad_norm"], log["num_input_tokens_seen"]) for log in logs]


def test_a_last_batch_that_is_not_divisible_is_filled_up(ranks: RankPool) -> None:
    expected = short_epoch(None)
    for found in ranks.run(short_epoch, world=2):
        for log, other in zip(found, expected, strict=True):
            assert log == pytest.approx(other, rel=1e-4)
