"""The law of pipelines: a step over stages equals a step of one process on the same global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from dispatching import dispatching
from equality import MAX_NORM, all_float64, by_mesh, relative_error
from tiny_models import build, qwen3_moe
from torch import Tensor, nn

from ep_kernels import module_experts_forward
from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import clip_grad_norm_, full_tensor, parallelize
from ep_trainer import PipelineRunner, RouterZLoss

SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble", "gpipe")
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp_size": 2},
    "pp4": {"pp_size": 4},
    "pp2-tp2": {"pp_size": 2, "tp_size": 2},
    "pp2-tp2-ep2": {"pp_size": 2, "tp_size": 2, "ep_size": 2},
    "pp2-tp2-ep2-sp": {
        "pp_size": 2,
        "tp_size": 2,
        "ep_size": 2,
        "enable_sequence_parallel": True,
    },
    "pp2-fsdp2-ep2": {"pp_size": 2, "fsdp_size": 2, "ep_size": 2},
    "pp2-tp2-fsdp2-ep2": {"pp_size": 2, "tp_size": 2, "fsdp_size": 2, "ep_size": 2},
    "pp2-tp2-fsdp2-ep4": {"pp_size": 2, "tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    "pp2-dp2-fsdp2-ep2": {"pp_size": 2, "dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
}
DENSE = {"mlp_only_layers": [1, 3]}  # every other layer
TIED = {"tie_word_embeddings": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "auxiliary": {"aux": True, "kinds": {"padded": True}, "changes": DENSE},
    "tied": {"changes": TIED, "kinds": {"packed": True}, "lengths": [6, 9]},
    "recompute": {"checkpointing": True, "aux": True, "micro_batches": 2},
    "accumulate": {"changes": TIED, "lengths": [6, 5], "reduce_last": True},
    "z-loss": {"z_loss": True, "changes": TIED, "kinds": {"packed": True}, "lengths": [6, 9]},
    "both losses": {"z_loss": True, "aux": True, "kinds": {"padded": True}, "changes": DENSE},
    "reduce each": {"changes": TIED, "lengths": [6, 6], "reduce_each": True},
}
SAMPLE = (
    ("pp2-fsdp2-ep2", "1f1b", "auxiliary"),
    ("pp2-fsdp2-ep2", "gpipe", "auxiliary"),
    ("pp2-fsdp2-ep2", "interleaved_1f1b", "reduce each"),
    ("pp2-fsdp2-ep2", "zero_bubble", "recompute"),
    ("pp2-tp2-ep2", "zero_bubble", "both losses"),
    ("pp2-tp2-ep2-sp", "1f1b", "z-loss"),
    ("pp2-tp2-fsdp2-ep4", "interleaved_1f1b", "plain"),
    ("pp2-dp2-fsdp2-ep2", "zero_bubble", "accumulate"),
    ("pp4", "1f1b", "tied"),
)
Case = tuple[str, str, str]
"""A layout, a schedule, a way to train."""


def cases(whole: bool) -> list[Case]:
    """The cases to run: a sample, or all that go together."""
    if not whole:
        return list(SAMPLE)
    return [
        (layout, schedule, way)
        for layout, sizes in LAYOUTS.items()
        for schedule in SCHEDULES
        for way, options in WAYS.items()
        # Weights' gradients come late; routers that see slices give no auxiliary loss.
        if not (way == "reduce each" and (schedule == "zero_bubble" or "fsdp_size" not in sizes))
        and not ("enable_sequence_parallel" in sizes and "aux" in options)
    ]


def world_of(case: Case) -> int:
    """How many ranks a case needs."""
    return DistributedConfig(**LAYOUTS[case[0]]).world_size


def compare(rank: int, case: Case) -> dict[str, float]:
    """Check a case in float64; the worst errors."""
    torch.set_num_threads(1)
    layout, schedule, way = case
    options = dict(WAYS[way])
    sizes = dispatching(**LAYOUTS[layout], pp_schedule=schedule)
    if sizes["pp_size"] == 4:
        options["changes"] = {"num_hidden_layers": 8} | options.get("changes", {})
        options["micro_batches"] = ROWS  # 1F1B needs as many as there are stages
    with all_float64():
        return check_pipeline(sizes, **options)


ROWS, LENGTH = 4, 6
COEFFICIENT = 0.3


def global_batch(
    shards: int, *, length: int = LENGTH, seed: int = 1, **kinds: bool
) -> dict[str, Tensor]:
    """A batch of every data shard, `[shards * ROWS, length]`, shard by shard.

    Labels are spread unevenly over the rows, one row has none. `padded`: masks and positions of rows
    padded on either side; `packed`: positions that start again within a row.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = shards * ROWS
    ids = torch.randint(3, 96, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : (3 * row) % (length + 1)] = -100
    labels[1] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kinds.get("padded"):
        mask = torch.ones_like(ids)
        for row in range(rows):
            pad = row % 3
            mask[row, :pad] = 0
        batch["attention_mask"] = mask
        batch["labels"] = labels.masked_fill(mask == 0, -100)
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if kinds.get("packed"):
        batch["position_ids"] = torch.cat(
            [torch.arange(length // 2), torch.arange(length - length // 2)]
        ).repeat(rows, 1)
    return batch


def rows_of(batch: Mapping[str, Tensor], shard: int) -> dict[str, Tensor]:
    """The batch of a data shard."""
    return {name: value[shard * ROWS : (shard + 1) * ROWS] for name, value in batch.items()}


def reference(
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    shards: int,
    micro_batches: int,
    *,
    aux: bool,
    z_loss: bool,
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], float]:
    """One process on the whole batch; its auxiliary loss is the mean of those of global micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    losses = []
    router_loss = RouterZLoss(model, COEFFICIENT, None) if z_loss else None
    for batch in batches:
        items = batch["labels"][:, 1:].ne(-100).sum()
        loss = model(**batch, use_cache=False, num_items_in_batch=items).loss
        if router_loss is not None:
            tokens = router_loss.count([batch], items.device)
            loss = loss + router_loss.of(batch, tokens)
        if aux:
            size = ROWS // micro_batches
            for index in range(micro_batches):
                rows = [
                    shard * ROWS + index * size + i for shard in range(shards) for i in range(size)
                ]
                part = {k: v[rows] for k, v in batch.items()}
                own = model(**part, use_cache=False, output_router_logits=True).aux_loss
                loss = loss + COEFFICIENT / micro_batches * own
        loss.backward()
        losses.append(loss.item())
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return losses, grads, {n: p.detach().clone() for n, p in model.named_parameters()}, float(norm)


def check_pipeline(
    sizes: dict[str, Any],
    *,
    changes: Mapping[str, Any] | None = None,
    kinds: Mapping[str, bool] | None = None,
    tolerance: float = 1e-10,
    aux: bool = False,
    z_loss: bool = False,
    checkpointing: bool = False,
    lengths: Sequence[int] = (LENGTH,),
    micro_batches: int = ROWS,
    reduce_last: bool = False,
    **options: Any,
) -> dict[str, float]:
    """On each rank: losses, gathered gradients, norm and a clipped AdamW step; the worst errors."""
    settings = {"num_hidden_layers": 4, "router_aux_loss_coef": COEFFICIENT} | dict(changes or {})
    config = DistributedConfig(pp_micro_batches=micro_batches, **sizes)
    batches = [
        global_batch(config.dp_size, length=length, seed=seed, **kinds or {})
        for seed, length in enumerate(lengths)
    ]
    losses, grads, stepped, norm = reference(
        build(qwen3_moe(**settings)),
        batches,
        config.dp_size,
        1 if config.pp_schedule == "gpipe" else micro_batches,
        aux=aux,
        z_loss=z_loss,
    )
    mesh = ParallelMesh(config.layout)
    model = build(qwen3_moe(**settings))
    model = parallelize(model, mesh, config, experts_forward=module_experts_forward)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    router_loss = RouterZLoss(model, COEFFICIENT, mesh) if z_loss else None
    runner = PipelineRunner(model, z_loss=router_loss, **options)
    optimizer = torch.optim.AdamW(by_mesh(model), lr=1e-2, eps=1e-6, foreach=False)
    shard = mesh.layout.batch_of(mesh.rank)
    worst = {"loss": 0.0}
    for index, (batch, expected) in enumerate(zip(batches, losses, strict=True)):
        mine: dict[str, Any] = rows_of(batch, shard)
        if aux:
            mine["output_router_logits"] = True
        reduce = not reduce_last or index == len(batches) - 1
        loss = runner.step(mine | {"use_cache": False}, reduce=reduce)
        worst["loss"] = max(worst["loss"], abs(loss.item() - expected) / abs(expected))
    parameters = dict(model.named_parameters())
    missing = [name for name, p in parameters.items() if p.grad is None and name in grads]
    assert not missing, f"no gradient for {missing}"
    scale = max(g.norm().item() for g in grads.values())
    errors = {
        name: (full_tensor(p.grad) - grads[name]).norm().item()
        / max(grads[name].norm().item(), 1e-4 * scale)
        for name, p in parameters.items()
    }
    bad = {name: error for name, error in errors.items() if not error < tolerance}
    assert not bad, f"gradients differ: {bad}"
    worst["grad"] = max(errors.values())
    worst["norm"] = abs(float(clip_grad_norm_(model.parameters(), MAX_NORM)) - norm) / norm
    optimizer.step()
    worst["step"] = max(relative_error(full_tensor(p), stepped[n]) for n, p in parameters.items())
    late = {key: value for key, value in worst.items() if not value < tolerance}
    assert not late, f"{late} above {tolerance}"
    return worst
