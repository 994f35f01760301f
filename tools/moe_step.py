"""A training step of a whole model, ours beside native transformers: one checkpoint, layout and batch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

BATCH, LENGTH, VOCABULARY = 2, 512, 1024
LAYOUTS: dict[str, dict[str, int]] = {
    "tp8": {"tp_size": 8},
    "tp4_fsdp2": {"tp_size": 4, "fsdp_size": 2},
    "tp2_fsdp4": {"tp_size": 2, "fsdp_size": 4},
    "fsdp8": {"fsdp_size": 8},
}


class Run(NamedTuple):
    """A sharded model with its batch: a forward to the loss; and a step of forward, backward, AdamW."""

    model: torch.nn.Module
    loss: Callable[[], Tensor]
    step: Callable[[], None]


def write_checkpoint(folder: Path) -> None:
    """A Qwen3-MoE of 2 layers, hidden 512, 64 experts of 256, top-8."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_experts=64,
        num_experts_per_tok=8,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def ep_sizes(layout: dict[str, int]) -> list[int]:
    """The EP sizes worth comparing: that of the TP group, and that of all ranks."""
    return sorted({layout.get("tp_size", 1), 8} - {1})


def build(folder: str, layout: dict[str, int], ep: int, *, ours: bool) -> Run:
    """Ours or the native one."""
    from transformers import AutoModelForCausalLM as Native
    from transformers.distributed import DistributedConfig as NativeConfig

    from ep_mesh import DistributedConfig
    from expert_parallel import AutoModelForCausalLM

    sizes = {**layout, "ep_size": ep}
    config = DistributedConfig(**sizes)
    model: Any
    if ours:
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    else:
        # "grouped_mm" is the fastest of transformers' implementations of experts here.
        model = Native.from_pretrained(
            folder,
            distributed_config=NativeConfig(**sizes),
            experts_implementation="grouped_mm",
        )
    model.train()
    by_mesh: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in by_mesh.values()], lr=1e-4)
    batch = config.layout.batch_of(dist.get_rank())
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)

    def loss() -> Tensor:
        out: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return out

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Run(model, loss, step)


def step_seconds(
    rank: int, folder: str, layout: dict[str, int], repeats: int = 5
) -> dict[str, float]:
    """Median seconds of a step, in turns, for each implementation and EP size."""
    steps: dict[str, Callable[[], None]] = {}
    for ep in ep_sizes(layout):
        for ours in (False, True):
            name = f"{'ours' if ours else 'native'} ep={ep}"
            steps[name] = build(folder, layout, ep, ours=ours).step
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if repeat:
                times[name].append(time.perf_counter() - start)
    gc.collect()
    return {name: median(found) for name, found in times.items()}


def step_memory(rank: int, folder: str, layout: dict[str, int], ep: int, ours: bool) -> list[int]:
    """Bytes that a forward keeps for backward, and the most memory that the rank's process ever held.

    That of loading and of the libraries included: one implementation in a process.
    """
    run = build(folder, layout, ep, ours=ours)
    run.step()
    kept = kept_bytes(run)
    run.step()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return [kept, 1024 * int(peak)]


def storages(x: Tensor) -> Iterator[torch.UntypedStorage]:
    """Those of a tensor, or of the tensors that it wraps (DTensor, a collective under way)."""
    if is_traceable_wrapper_subclass(x):
        parts = (getattr(x, name) for name in x.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, Tensor):  # a DTensor names its mesh too
                yield from storages(part)
    else:
        yield x.untyped_storage()


def kept_bytes(run: Run) -> int:
    """Bytes of the storages that autograd holds after a forward; those of parameters do not count.

    Not those that FSDP2 has gathered either, which it puts in place of a module's parameters.
    """
    # By identity: FSDP2 frees a storage, whose address another one may then have.
    parameters: dict[int, torch.UntypedStorage] = {}
    kept: dict[int, torch.UntypedStorage] = {}

    def see(module: torch.nn.Module, _: object) -> None:
        for parameter in module.parameters(recurse=False):
            parameters.update((storage._cdata, storage) for storage in storages(parameter))

    def pack(x: Tensor) -> Tensor:
        for storage in storages(x):
            if storage._cdata not in parameters:
                kept[storage._cdata] = storage
        return x

    hooks = [module.register_forward_pre_hook(see) for module in run.model.modules()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = run.loss()
    for hook in hooks:
        hook.remove()
    total = sum(storage.nbytes() for storage in kept.values())  # 0 where FSDP2 freed it
    loss.backward()
    run.model.zero_grad()
    return total
