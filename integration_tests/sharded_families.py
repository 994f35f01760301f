"""A family's checkpoint, loaded sharded, against the unsharded model."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from families import Family, build
from torch import Tensor

from ep_mesh import DistributedConfig
from ep_plans import full_tensor
from ep_testing.pool import RankPool
from expert_parallel.loading import load

LAYOUTS = {
    "tp=2, fsdp=4, ep=4": {"tp_size": 2, "fsdp_size": 4, "ep_size": 4},
    "tp=1, fsdp=8, ep=8": {"tp_size": 1, "fsdp_size": 8, "ep_size": 8},
}


@dataclass(frozen=True)
class Expected:
    """What one process computes.

    Attributes:
        losses: of each batch.
        gradients: of their mean, by parameter; None for a parameter that is not reached.
    """

    losses: list[float]
    gradients: dict[str, Tensor | None]


def compare(pool: RankPool, name: str, sizes: dict[str, int], timeout: float = 120) -> None:
    """The loss and all gradients of eight ranks equal those of one process.

    The family's tiny model is saved, and loaded sharded by every rank, each of which runs its
    own batch. Errors are relative to the norm of the expected gradient or, if that is very small,
    to a ten-thousandth of the largest one's.

    Raises:
        AssertionError: what differs, and how much; as RankError, what the ranks raised.
    """
    family = build(name)
    config = DistributedConfig(**sizes, ep_plan=dispatching(family.model))
    expected = one_process(family, config.dp_size)
    with tempfile.TemporaryDirectory() as folder:
        transformers.logging.disable_progress_bar()
        family.model.save_pretrained(folder)
        errors = pool.run(
            _errors, name, type(family.model), Path(folder), config, expected, timeout=timeout
        )
    worst = {part: max(error[part] for error in errors) for part in errors[0]}
    wrong = {part: error for part, error in worst.items() if not error < family.tolerance}
    assert not wrong, f"differs from one process: {wrong}"


def dispatching(model: transformers.PreTrainedModel) -> dict[str, str] | None:
    """Overrides that let a plan of the masking generation, which needs ep == tp, run in any layout."""
    base = "" if model.base_model is model else f"{model.base_model_prefix}."
    modules = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_modules()}
    masking = {
        f"{base}{key}": "ep_dispatch_experts"
        for key, style in (model.config.base_model_ep_plan or {}).items()
        if style == "moe_tp_experts"
        and f"{base}{key}" in modules  # Ernie VL's has rules that match nothing
        and not isinstance(model.config, transformers.Llama4TextConfig)  # ours replaces its plan
    }
    return masking or None


def one_process(family: Family, batches: int) -> Expected:
    """Run every batch on the unsharded model."""
    losses = []
    for batch in range(batches):
        loss = family.loss(family.inputs(batch))
        (loss / batches).backward()
        losses.append(loss.item())
    return Expected(losses, {part: p.grad for part, p in family.model.named_parameters()})


def _errors(
    rank: int,
    name: str,
    model_class: type[Any],
    folder: Path,
    config: DistributedConfig,
    expected: Expected,
) -> dict[str, float]:
    transformers.logging.set_verbosity_error()
    model = load(
        model_class.from_pretrained,
        folder,
        distributed_config=config,
        dtype="auto",
        attn_implementation="eager",
    )
    family = Family(name, model)
    family.set_mode()
    shard = config.layout.batch_of(rank)
    loss = family.loss(family.inputs(shard))
    loss.backward()
    wanted_loss = expected.losses[shard]
    errors = {"loss": abs(loss.item() - wanted_loss) / abs(wanted_loss)}
    least = 1e-4 * max(float(g.norm()) for g in expected.gradients.values() if g is not None)
    for part, parameter in model.named_parameters():
        wanted, found = expected.gradients[part], parameter.grad
        if found is None:
            errors[part] = 0.0 if wanted is None or not wanted.any() else float("inf")
            continue
        found = full_tensor(found)
        wanted = torch.zeros_like(found) if wanted is None else wanted
        assert found.shape == wanted.shape, f"{part}: {found.shape}, not {wanted.shape}"
        errors[part] = float((found - wanted).norm()) / max(float(wanted.norm()), least)
    return errors
