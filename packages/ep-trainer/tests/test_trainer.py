"""A tiny Qwen3-MoE on four ranks: tp=2, fsdp=2, ep=2. The curves are in `integration_tests`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainingArguments

from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import parallelize
from ep_testing import RankPool
from ep_trainer import EPTrainer

SIZES = {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}
LENGTH = 6


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Row i begins with the token i + 1, others follow; the labels are the tokens."""

    def __init__(self, size: int, lengths: tuple[int, ...] = (LENGTH,)) -> None:
        self.size, self.lengths = size, lengths

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.size:
            raise IndexError(index)  # what ends `for row in rows`
        length = self.lengths[index % len(self.lengths)]
        ids = (index + 7 * index * torch.arange(length) + 11 * torch.arange(length)) % 63 + 1
        return {"input_ids": ids, "labels": ids.clone()}


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __init__(self, size: int) -> None:
        self.rows = Rows(size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.rows[index] for index in range(len(self.rows)))


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    padded = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": padded, "labels": padded.masked_fill(padded == 0, -100)}


def sharded(sizes: dict[str, int] = SIZES, **changes: Any) -> nn.Module:
    config = DistributedConfig(**sizes)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=4,
            num_experts=8,
            num_experts_per_tok=2,
            **changes,
        )
    )
    return parallelize(model, ParallelMesh(config.layout), config)


def arguments(folder: str, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "log_level": "error",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**values | changes)


def seen(trainer: EPTrainer, epochs: int = 1) -> list[list[int]]:
    """The rows of each batch of this rank."""
    loader = trainer.get_train_dataloader()
    return [
        [int(row[0]) - 1 for row in batch["input_ids"]] for _ in range(epochs) for batch in loader
    ]


# -- data


def batches_of(rank: int, folder: str, changes: dict[str, Any], size: int) -> list[list[int]]:
    torch.manual_seed(rank)  # generators that were used differently on each rank
    torch.rand(rank)
    data = Rows(size, lengths=(3, 6, 4))
    trainer = EPTrainer(sharded(), arguments(folder, **changes), pad, data)
    return seen(trainer, epochs=2)


SAMPLERS = [
    {},
    {"accelerator_config": {"use_seedable_sampler": False}},
    {"train_sampling_strategy": "sequential"},
    {"train_sampling_strategy": "group_by_length"},
    {"train_sampling_strategy": "batch_rebalance", "dataloader_drop_last": True},
    {"accelerator_config": {"split_batches": True}},
]


@pytest.mark.parametrize("changes", SAMPLERS, ids=str)
def test_tp_ranks_share_a_batch_and_shards_split_the_data(
    ranks: RankPool, tmp_path: Any, changes: dict[str, Any]
) -> None:
    size = 16
    found = ranks.run(batches_of, str(tmp_path), changes, size, world=4)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]
    steps = len(found[0]) // 2
    for epoch in range(2):
        rows = [
            row
            for shard in (found[0], found[2])
            for batch in shard[epoch * steps : (epoch + 1) * steps]
            for row in batch
        ]
        assert sorted(rows) == list(range(size)), "each row once an epoch"
    if "sequential" in changes.values():
        assert [found[0][0], found[2][0], found[0][1]] == [[0, 1], [2, 3], [4, 5]]
    elif not changes:
        assert found[0][:steps] != found[0][steps:], "shuffled anew"


def stream_of(rank: int, folder: str) -> list[list[int]]:
    return seen(EPTrainer(sharded(), arguments(folder), pad, Stream(8)))


def test_an_iterable_dataset_is_split_by_shard(ranks: RankPool, tmp_path: Any) -> None:
    found = ranks.run(stream_of, str(tmp_path), world=4)
    assert found == [[[0, 1], [4, 5]]] * 2 + [[[2, 3], [6, 7]]] * 2


class Noisy(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(1, 64, (LENGTH,))
        return {"input_ids": ids, "labels": ids}


def train_noisy(rank: int, folder: str) -> None:
    torch.manual_seed(rank)
    trainer = EPTrainer(sharded(), arguments(folder), pad, Noisy(16))
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="different batches"):
        trainer.train()


def test_data_that_differs_between_tp_ranks_is_refused(ranks: RankPool, tmp_path: Any) -> None:
    ranks.run(train_noisy, str(tmp_path), world=4)


# -- evaluation and prediction


def predict(rank: int, folder: str, size: int, objects: bool) -> tuple[Any, ...]:
    def metrics(prediction: Any) -> dict[str, float]:
        return {"rows": len(prediction.label_ids), "first": float(prediction.label_ids[0][0])}

    args = arguments(folder, eval_use_gather_object=objects)
    trainer = EPTrainer(sharded(), args, pad, Rows(8), Rows(size), compute_metrics=metrics)
    output = trainer.predict(Rows(size))
    evaluation = trainer.evaluate()
    return output.predictions.shape, output.label_ids[:, 0].tolist(), evaluation, output.metrics


@pytest.mark.parametrize(("size", "steps"), [(8, 2), (9, 3), (3, 1), (1, 1)])
def test_each_sample_is_predicted_once_and_in_order(
    ranks: RankPool, tmp_path: Any, size: int, steps: int
) -> None:
    for shape, labels, evaluation, metrics in ranks.run(
        predict, str(tmp_path), size, False, world=4
    ):
        assert shape == (size, LENGTH, 64)
        assert labels == list(range(1, size + 1))
        assert evaluation["eval_rows"] == size
        speed = evaluation["eval_steps_per_second"] * evaluation["eval_runtime"]
        assert speed == pytest.approx(steps, rel=0.1)
        assert metrics["test_loss"] == pytest.approx(evaluation["eval_loss"])


def eval_loss(rank: int, folder: str, size: int) -> float:
    trainer = EPTrainer(sharded(), arguments(folder), pad, eval_dataset=Rows(size, (3, 6)))
    return trainer.evaluate()["eval_loss"]


def test_the_last_batch_counts_no_sample_twice(ranks: RankPool, tmp_path: Any) -> None:
    # Of a global batch of four, three are real: as one process computes it on those three.
    torch.manual_seed(0)
    found = ranks.run(eval_loss, str(tmp_path), 3, world=4)
    model = ranks.run(local_losses, world=1)[0]
    assert found == pytest.approx([model] * 4, rel=1e-5)


def losses_of_both(rank: int, folder: str) -> list[float]:
    trainer = EPTrainer(sharded({"tp_size": 2, "ep_size": 2}), arguments(folder), pad)
    return [trainer.evaluate(data)["eval_loss"] for data in (Rows(3), Stream(3))]


def test_the_last_batch_of_a_stream_weighs_as_many_samples_as_it_has(
    ranks: RankPool, tmp_path: Any
) -> None:
    for rows, stream in ranks.run(losses_of_both, str(tmp_path), world=2):
        assert stream == pytest.approx(rows, rel=1e-6)


def local_losses(rank: int) -> float:
    model = sharded({"tp_size": 1}).eval()
    data = Rows(3, (3, 6))
    batch = pad([data[index] for index in range(3)])
    with torch.no_grad():
        return float(model(**batch).loss)


# -- losses and gradients


def mean_losses(rank: int, folder: str) -> list[float]:
    means = []
    for every in (1, 2):  # of three steps
        args = arguments(folder, logging_steps=every)
        means.append(EPTrainer(sharded(), args, pad, Rows(16, (3, 6, 4))).train().training_loss)
    return means


def test_the_mean_loss_counts_all_shards_also_since_the_last_log(
    ranks: RankPool, tmp_path: Any
) -> None:
    found = ranks.run(mean_losses, str(tmp_path), world=4)
    for each, rarely in found:
        assert [each, rarely] == pytest.approx([found[0][0]] * 2, rel=1e-6)


def train_with_nan(rank: int, folder: str) -> list[float]:
    model = sharded()
    trainer = EPTrainer(model, arguments(folder), pad, Rows(16), on_nonfinite="ignore")
    if rank == 2:
        weight = next(p for n, p in model.named_parameters() if "experts" in n)
        weight.register_post_accumulate_grad_hook(
            lambda p: p.grad.to_local().view(-1)[:1].fill_(float("nan"))
        )
    norms: list[float] = []
    step = trainer.clip_gradients

    def clip(model: nn.Module, max_norm: float) -> Tensor:
        norms.append(float(step(model, max_norm)))
        return torch.tensor(norms[-1])

    trainer.clip_gradients = clip
    trainer.train()
    return norms


def test_a_gradient_that_is_not_finite_on_one_rank_is_so_for_all(
    ranks: RankPool, tmp_path: Any
) -> None:
    for norms in ranks.run(train_with_nan, str(tmp_path), world=4):
        assert all(math.isnan(norm) for norm in norms)


def groups_of(rank: int, folder: str, optim: str) -> list[tuple[int, float, int]]:
    trainer = EPTrainer(sharded(), arguments(folder, weight_decay=0.1, optim=optim), pad, Rows(16))
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    names = {p: n for n, p in trainer.model.named_parameters()}
    found = []
    for group in optimizer.param_groups:
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
        decays = {not ("norm" in names[p] or "bias" in names[p]) for p in group["params"]}
        assert decays == {group["weight_decay"] > 0}
        found.append((len(meshes), group["weight_decay"], len(group["params"])))
    assert sum(count for _, _, count in found) == len(names)
    return found


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_an_optimizer_group_lies_on_one_mesh(ranks: RankPool, tmp_path: Any, optim: str) -> None:
    for groups in ranks.run(groups_of, str(tmp_path), optim, world=4):
        assert len(groups) > 2
        assert {meshes for meshes, _, _ in groups} == {1}


# -- accelerate


def build(rank: int, folder: str) -> tuple[Any, ...]:
    args = arguments(folder)  # without use_cpu, as on a laptop
    trainer = EPTrainer(sharded(), args, pad, Rows(16))
    mirror = trainer.accelerator.parallelism_config
    return (
        args.world_size,
        args.process_index,
        (mirror.tp_size, mirror.dp_shard_size, mirror.dp_replicate_size),
        trainer.accelerator.tensor_parallel_rank,
        trainer.accelerator.data_parallel_shard_rank,
        trainer.get_total_train_batch_size(args),
    )


def test_accelerate_sees_the_sizes_on_cpu_ranks_too(ranks: RankPool, tmp_path: Any) -> None:
    found = ranks.run(build, str(tmp_path), world=4)
    assert found == [(4, rank, (2, 2, 1), rank % 2, rank // 2, 4) for rank in range(4)]


def refuse(rank: int, folder: str) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is given back)
        EPTrainer(sharded(), arguments(folder, fp16_full_eval=True), pad, Rows(16))
    return str(error.value)


def test_what_cannot_work_is_refused_at_construction(ranks: RankPool, tmp_path: Any) -> None:
    assert all("fp16_full_eval" in text for text in ranks.run(refuse, str(tmp_path), world=4))


def unsharded(rank: int, folder: str) -> str:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is given back)
        EPTrainer(model, arguments(folder), pad, Rows(16))
    return str(error.value)


def test_a_model_that_nobody_sharded_is_refused_on_several_ranks(
    ranks: RankPool, tmp_path: Any
) -> None:
    assert all("not sharded" in text for text in ranks.run(unsharded, str(tmp_path), world=2))
