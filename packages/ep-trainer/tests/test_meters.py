"""Meters: what they count is what one process counts, and what they tell of it."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import math
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainingArguments

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import local, parallelize
from ep_testing import RankPool
from ep_trainer import EPTrainer, ExpertLoad, JsonLines, Memory, Meter, Speed
from ep_trainer.meters import heatmap, speed
from ep_trainer.meters.balance import layer_load, lost_share, waiting_factor, worst_layers
from ep_trainer.meters.base import Collector
from ep_trainer.meters.routes import Routes
from ep_trainer.moe_layers import MoELayer

EXPERTS, LENGTH, ROWS = 8, 7, 16
MASKED = {
    "model.layers.*.mlp.gate": "ep_router",
    "model.layers.*.mlp.experts": "moe_tp_experts",
}


def build(layers: int = 2, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=4,
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            initializer_range=0.5,
            **changes,
        )
    )


def rows(number: int = ROWS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(64, (number, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_of(folder: Any, model: nn.Module, meters: list[Any], **changes: Any) -> EPTrainer:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "learning_rate": 0.0,  # so that every step routes as the first
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "log_level": "error",
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    return EPTrainer(
        model,
        TrainingArguments(**values | changes),
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=meters,
    )


def sharded(sizes: dict[str, Any]) -> nn.Module:
    config = DistributedConfig(**sizes)
    return parallelize(build(), ParallelMesh(config.layout), config)


def routes_of(model: nn.Module) -> dict[str, list[list[int]]]:
    """The ids that each experts module gets, row by row, watched from now on."""
    seen: dict[str, list[list[int]]] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if module.training:
                seen.setdefault(name, []).extend(args[1].tolist())

        return hook

    for name, module in model.named_modules():
        if name.endswith("experts"):
            module.register_forward_pre_hook(watch(name))
    return seen


# -- counting


def expected_counts() -> Tensor:
    """Of one process that takes each row once, by layer."""
    model = build().train()
    seen = routes_of(model)
    with torch.no_grad():
        model(input_ids=torch.stack([row["input_ids"] for row in rows()]))
    counts = [Counter(itertools.chain.from_iterable(ids)) for ids in seen.values()]
    return torch.tensor([[found[expert] for expert in range(EXPERTS)] for found in counts])


def count(rank: int, folder: str, sizes: dict[str, Any], changes: dict[str, Any]) -> Any:
    load = ExpertLoad()
    model = sharded(sizes)
    seen = routes_of(model)
    trainer = trainer_of(folder, model, [load], eval_strategy="steps", eval_steps=2, **changes)
    # A forward without gradients in the middle of a step, as of a reference model, counts nowhere.
    step = trainer.training_step

    def with_a_look(*args: Any, **kwargs: Any) -> Any:
        before = {name: list(ids) for name, ids in seen.items()}
        with torch.no_grad():
            model.train()(input_ids=torch.full((2, LENGTH), 5))
        seen.clear()
        seen.update(before)
        return step(*args, **kwargs)

    trainer.training_step = with_a_look
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    totals = torch.stack([load._totals[name] for name in load.layers])
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(load.history) == len(logs)
    assert not load._handles
    return totals, logs, seen, load.loads


TP_EP = {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}
REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}
SAMPLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TP_EP | {"ep_plan": MASKED}, {"gradient_accumulation_steps": 2}),
    (TP_EP, REENTRANT),
    ({"fsdp_size": 4, "ep_size": 4}, {"gradient_checkpointing": True}),
    (TP_EP | {"enable_sequence_parallel": True, "ep_size": 4}, {}),
]
REST: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TP_EP, {"gradient_accumulation_steps": 2}),
    (TP_EP, {"gradient_checkpointing": True}),
    ({"fsdp_size": 4, "ep_size": 4}, REENTRANT),
    ({"tp_size": 2, "fsdp_size": 2}, {}),
    ({"tp_size": 2, "fsdp_size": 2, "enable_sequence_parallel": True}, {}),
    ({"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}, {}),
    ({"tp_size": 4, "ep_size": 4}, {}),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A sample of the ways to train; with `--all-layouts` all."""
    if "counted" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--all-layouts")
        metafunc.parametrize("counted", SAMPLE + (REST if whole else []), ids=str)


def test_each_token_of_training_counts_once(
    ranks: RankPool, tmp_path: Path, counted: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    sizes, changes = counted
    found = ranks.run(count, str(tmp_path), sizes, changes, world=4)
    expected = expected_counts()
    for totals, logs, _, loads in found:
        assert torch.equal(totals.long(), expected)
        assert logs[0]["expert_load_max"] >= 1
        assert ("expert_rank_load_max" in logs[0]) == (sizes.get("ep_size", 1) > 1)
        assert [load.layer for load in loads] == [
            f"model.layers.{layer}.mlp.experts" for layer in range(2)
        ]


def test_bytes_sent_are_those_that_the_routing_needs(ranks: RankPool, tmp_path: Path) -> None:
    """A token goes once to each other rank that has experts of it; a TP rank sends its half."""
    sizes = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}
    found = ranks.run(count, str(tmp_path), sizes, {}, world=4)
    copies = 0
    for rank, (_, _, seen, _) in enumerate(found):
        for ids in seen.values():
            for place, chosen in enumerate(ids):
                sender = place % (2 * LENGTH) // LENGTH  # of a batch of two rows
                if sender == rank % 2:
                    copies += len({expert // 2 for expert in chosen} - {rank})
    sent = sum(log["expert_gb_sent"] for log in found[0][1]) * 4 * 1e9
    assert sent == pytest.approx(copies * 16 * 4 * 4, rel=1e-3), "float32 rows of 16, four passes"
    assert found[0][1] == found[3][1]


def layer_of(num_experts: int, **where: int) -> MoELayer:
    return MoELayer("experts", nn.Module(), nn.Module(), num_experts, spread=True, **where)


@pytest.mark.parametrize("masked", [False, True])
def test_counting_waits_for_no_device(masked: bool) -> None:
    """Fake tensors have no values: reading one, as a host synchronization does, would raise."""
    layer = layer_of(8, first=4, masked=4) if masked else layer_of(8)
    routes = Routes(layer) if masked else Routes(layer, ranks=2, own=1, slices=(2, 1))
    with FakeTensorMode():
        ids = torch.empty(5, 2, dtype=torch.int64)
        for _ in range(2):
            routes.add(torch.empty(5, 16), ids)
        counts, sent = routes.take()
        assert counts is not None
        assert (sent is None) == masked


def test_ids_that_mean_no_expert_count_nowhere() -> None:
    routes = Routes(layer_of(4), ranks=2)
    routes.add(torch.ones(3, 1), torch.tensor([[0, -1], [-1, 3], [2, 3]]))
    counts, sent = routes.take()
    assert counts is not None
    assert counts.tolist() == [1, 0, 1, 2]
    assert sent is not None
    assert sent.item() == 2 * 4 * 4, "two tokens, four passes of one float32"
    masked = Routes(layer_of(4, first=2, masked=2))
    masked.add(None, torch.tensor([[0, 2], [1, 1]]))
    counts, sent = masked.take()
    assert counts is not None
    assert counts.tolist() == [0, 0, 1, 2]
    assert sent is None
    assert masked.take() == (None, None)


def stages(rank: int) -> Any:
    """Two stages: each rank has one layer, and a third rank none."""
    torch.manual_seed(rank)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module() for _ in range(12)])
    here = {0: 2, 1: 10}.get(rank)
    if here is not None:
        experts = nn.Module()
        experts.weight = nn.Parameter(torch.ones(4, 1, 1))
        experts.num_experts = 4
        experts.forward = lambda hidden, ids: hidden  # type: ignore[method-assign]
        model.layers[here].experts = experts
    load, pace = ExpertLoad(), Speed(peak=1e12)
    collect = Collector()
    for meter in (load, pace):
        meter.on_train_begin(SimpleNamespace(), None, None, model=model)
    logs = []
    for _ in range(2):
        if here is not None:
            model.layers[here].experts(torch.ones(3, 1), torch.tensor([[0, 1], [0, 2], [0, 1]]))
        logs.append(collect([load, pace], torch.device("cpu")))
    return load.layers, load.shares, logs[-1]


def test_a_rank_that_has_some_of_the_layers_knows_all(ranks: RankPool) -> None:
    for layers, shares, logs in ranks.run(stages, world=3):
        assert layers == ["layers.2.experts", "layers.10.experts"]
        assert torch.allclose(shares, torch.tensor([[3, 2, 1, 0]] * 2).double() / 6)
        assert logs["expert_load_max"] == 2.0
        assert logs["experts_idle"] == 2


class ThreeOrTwo(Meter):
    def sums(self) -> Tensor:
        return torch.ones(3 - dist.get_rank(), dtype=torch.float64)


def differing(rank: int, folder: str) -> list[str]:
    told = []
    model = sharded({"fsdp_size": 2, "ep_size": 2})
    for meters in ([Memory(), *([ExpertLoad()] if rank else [])], [ThreeOrTwo()]):
        try:
            trainer_of(folder, model, meters, max_steps=1).train()
        except ValueError as error:
            told.append(str(error))
    return told


def test_ranks_with_different_meters_are_told(ranks: RankPool, tmp_path: Path) -> None:
    for which, sizes in ranks.run(differing, str(tmp_path), world=2):
        assert "rank 0 measures Memory, rank 1 Memory, ExpertLoad: give" in which
        assert "ThreeOrTwo of 3 numbers, rank 1 ThreeOrTwo of 2 numbers: give" in sizes


# -- what the counts say


def test_balance_of_a_layer() -> None:
    even = layer_load("a", torch.full((4,), 5.0).double(), torch.full((2,), 10.0).double(), 2)
    assert even is not None
    assert (even.max_over_mean, even.idle, even.rank_max_over_mean) == (1, 0, 1)
    assert even.entropy == pytest.approx(1)
    alone = layer_load("a", torch.tensor([0, 7.0, 0, 0]).double(), torch.tensor([7.0, 0]), 2)
    assert alone is not None
    assert (alone.max_over_mean, alone.idle, alone.rank_max_over_mean) == (4, 3, 2)
    assert alone.entropy == pytest.approx(0)
    # Two groups of two; the ranks of another stage got nothing and do not count.
    groups = torch.tensor([3.0, 1, 2, 2, 0, 0])
    some = layer_load("a", torch.tensor([3.0, 5]).double(), groups, 2)
    assert some is not None
    assert some.rank_max_over_mean == 1.5
    assert some.entropy == pytest.approx(
        -(3 / 8 * math.log(3 / 8) + 5 / 8 * math.log(5 / 8)) / math.log(2)
    )
    assert layer_load("a", torch.zeros(4), torch.zeros(2), 2) is None
    assert [load.max_over_mean for load in worst_layers([even, alone, some], 2)] == [4, 1.25]


def test_the_cost_of_imbalance_is_what_a_clock_would_say() -> None:
    generator = torch.Generator().manual_seed(1)
    rows_LW = torch.randint(1, 50, (5, 6), generator=generator).double()
    rest, per_row = 400.0, 1.0  # seconds
    # Both groups have the same work in all, so that they have one balanced time.
    rows_LW[0, 0] += rows_LW[:, 3:].sum() - rows_LW[:, :3].sum() + 60
    rows_LW[0, 3] += 60
    balanced = rows_LW[:, :3].sum().item() / 3
    slowest = max(
        sum(max(layer[first : first + 3]) for layer in rows_LW.tolist()) for first in (0, 3)
    )
    share = balanced * per_row / (rest + balanced * per_row)
    lost = (slowest - balanced) / (rest + slowest)
    assert lost_share(waiting_factor(rows_LW, 3), share) == pytest.approx(lost)
    assert lost_share(1.0, share) == 0


def warned(rank: int, folder: str, skewed: bool) -> Any:
    load = ExpertLoad(worst=1, warn_above=0.05 if skewed else 1.0)
    model = sharded({"fsdp_size": 2, "ep_size": 2})
    if skewed:
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                here = parameter.data
                local(here).zero_()  # ties, which the first experts win
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = trainer_of(folder, model, [load], max_steps=2)
        trainer.train()
    told = [str(each.message) for each in seen if "Imbalance" in str(each.message)]
    return told, [entry for entry in trainer.state.log_history if "loss" in entry][-1]


def test_costly_imbalance_is_told_once_with_numbers(ranks: RankPool, tmp_path: Path) -> None:
    (first, log), (other, _) = ranks.run(warned, str(tmp_path), True, world=2)
    assert len(first) == 1
    assert not other, "rank 0 alone tells it"
    assert "2.00 times the rows of the mean" in first[0]
    assert "model.layers.0.mlp.experts" in first[0]
    assert log["expert_imbalance_cost"] > 0.05
    name = "expert_load/model.layers.0.mlp.experts"
    assert (log[f"{name}/max"], log[f"{name}/idle"], log[f"{name}/rank_max"]) == (4.0, 6, 2.0)
    assert log["expert_load_max"] == 4.0
    assert log["experts_idle"] == 12
    (quiet, _), _ = ranks.run(warned, str(tmp_path), False, world=2)
    assert not quiet


@pytest.mark.parametrize(
    "wrong",
    [{"warn_above": 2}, {"experts_share": -0.1}, {"worst": -1}],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ExpertLoad(**wrong)


def test_speeds_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="peak"):
        Speed(0)
    with pytest.raises(ValueError, match="recomputed"):
        Speed(recomputed=3)


# -- speed and memory


def test_speed_counts_tokens_operations_and_training_time(monkeypatch: Any) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    meter = Speed(peak=1e9)
    model = build(layers=1)
    collect = Collector()
    meter.on_train_begin(SimpleNamespace(gradient_checkpointing=True), None, None, model=model)
    assert collect([meter], torch.device("cpu")) == {}, "no rate before there is a time"
    for length in (8, 4):
        meter.count(16.0, length)
    clock[0] += 3
    meter.on_step_end()
    clock[0] += 50
    meter.on_evaluate()
    clock[0] += 7
    meter.on_save()
    clock[0] += 1
    found = collect([meter], torch.device("cpu"))
    assert found["tokens_per_second_per_rank"] == 8.0, "32 tokens in 4 s"
    # By hand: q, k, v, o of 16 x 16; 2 experts of 3 matrices of 16 x 8; router 16 x 8; head 16 x 64.
    weights = 2 * (4 * 16 * 16 + 2 * 3 * 16 * 8 + 16 * 8 + 16 * 64)
    scores = [2 * 4 * (4 + 4) * (length + 1) / 2 for length in (8, 4)]
    forward = sum(16 * (weights + score) for score in scores)
    again = forward - 32 * 2 * 16 * 64
    assert found["tflops_per_rank"] == round(3 * forward / 4 / 1e12, 4)
    assert found["mfu"] == pytest.approx(3 * forward / 4 / 1e9, abs=1e-4)
    assert found["hfu"] == pytest.approx((3 * forward + again) / 4 / 1e9, abs=1e-4)


def pace(rank: int, folder: str) -> Any:
    meter, memory = Speed(), Memory()
    model = sharded(TP_EP)
    trainer = trainer_of(folder, model, [meter, memory], max_steps=3)
    held = []
    memory_hook = memory.on_optimizer_step

    def look(*args: Any, **kwargs: Any) -> None:
        parts = [local(p) for p in model.parameters()]
        held[:] = [sum(part.numel() for part in parts) * 4 / 1e9]
        memory_hook(*args, **kwargs)

    memory.on_optimizer_step = look  # type: ignore[method-assign]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logs, memory.kinds, held[0], memory.per_rank


def test_speed_and_memory_in_training(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(pace, str(tmp_path), world=4)
    for rank, (logs, kinds, held, per_rank) in enumerate(found):
        assert logs == found[0][0], "all ranks tell the same"
        assert "tokens_per_second_per_rank" not in logs[0]
        last = logs[-1]
        unique, batch = last["tokens_per_second_per_rank"], last["batch_tokens_per_second"]
        assert batch == pytest.approx(2 * unique, rel=0.01, abs=0.2), "a TP pair shares a batch"
        assert "mfu" not in last, "nothing is known of a CPU"
        _, parameters, gradients, states = kinds[rank].tolist()
        assert parameters == pytest.approx(held, rel=1e-6)
        assert gradients == pytest.approx(held, rel=1e-6)
        assert states == pytest.approx(2 * held, rel=0.05), "AdamW, and its step counts"
        assert per_rank == kinds[:, 0].tolist()
        assert last["peak_memory_gb"] == round(max(per_rank), 3)
        assert last["peak_memory_mean_gb"] == round(sum(per_rank) / 4, 3)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("some accelerator", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert speed.peak_flops(name) == peak


# -- files


def written(rank: int, folder: str) -> Any:
    load = ExpertLoad(picture=Path(folder, "pictures", "load.png"))
    file = Path(folder, "logs", "metrics.jsonl")
    model = sharded({"fsdp_size": 2, "ep_size": 2})
    trainer = trainer_of(
        folder, model, [load, JsonLines(file, [load])], max_steps=2, eval_strategy="steps"
    )
    trainer.train()
    dist.barrier()
    return len(trainer.state.log_history)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_line_per_log_and_a_picture(ranks: RankPool, tmp_path: Path) -> None:
    logs = ranks.run(written, str(tmp_path), world=2)[0]
    lines = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").open()]
    assert len(lines) == logs
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    layers = lines[0]["expert_layers"]
    assert list(layers) == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert set(layers["model.layers.0.mlp.experts"]) == {"max", "entropy", "idle", "rank_max"}
    assert (tmp_path / "pictures/load.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = {"max_steps": 2, "report_to": ["tensorboard"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
        trainer_of(tmp_path, build(), [ExpertLoad(), Memory(), Speed()], **args).train()
    folder = next(path.parent for path in tmp_path.rglob("events.out.tfevents.*"))
    events = EventAccumulator(str(folder)).Reload()
    for name in ("expert_load_max", "memory_optimizer_gb", "tflops_per_rank"):
        assert events.Scalars(f"train/{name}"), name


def test_lines_are_appended_and_hold_json(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "metrics.jsonl"
    state = SimpleNamespace(is_world_process_zero=True, global_step=3, epoch=0.5)
    logs = {"loss": math.nan, "norm": torch.tensor(2.5), "inf": math.inf, "text": "é"}
    for _ in range(2):
        JsonLines(file).on_log(None, state, None, logs=logs)
    state.is_world_process_zero = False
    JsonLines(file).on_log(None, state, None, logs=logs)
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    entry = json.loads(lines[1], parse_constant=pytest.fail)
    assert entry | {"time": 0} == {
        "step": 3,
        "epoch": 0.5,
        "time": 0,
        "loss": None,
        "norm": 2.5,
        "inf": None,
        "text": "é",
    }


def test_a_missing_matplotlib_is_told_before_training(monkeypatch: Any) -> None:
    monkeypatch.setattr(heatmap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        ExpertLoad(picture="load.png")
    ExpertLoad()


def test_a_copied_meter_is_not_needed_to_train_twice(tmp_path: Path) -> None:
    """The second training begins anew."""
    load = ExpertLoad()
    model = build()
    for _ in range(2):
        trainer_of(tmp_path, copy.deepcopy(model), [load], max_steps=2).train()
        assert load.total_shares is not None
        assert load._totals[load.layers[0]].sum() == 2 * 2 * LENGTH * 2
        assert len(load.history) == 2
