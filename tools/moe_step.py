"""A training step of a whole model, ours beside native transformers: one checkpoint, layout and batch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

VOCABULARY = 1024
LAYOUTS: dict[str, dict[str, int]] = {
    "tp8": {"tp_size": 8},
    "tp4_fsdp2": {"tp_size": 4, "fsdp_size": 2},
    "tp2_fsdp4": {"tp_size": 2, "fsdp_size": 4},
    "fsdp8": {"fsdp_size": 8},
}
FREE = "no exchange"


@dataclass(frozen=True)
class Sizes:
    """Of a Qwen3-MoE, and of the batch of a data shard."""

    hidden: int = 512
    intermediate: int = 256
    experts: int = 64
    top_k: int = 8
    layers: int = 2
    batch: int = 2
    length: int = 512

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, {self.experts} experts of {self.intermediate}, top-{self.top_k}, "
            f"{self.layers} layers, {self.batch} x {self.length} tokens per data rank"
        )


DEFAULT = Sizes()


class Run(NamedTuple):
    """A sharded model with its batch: a forward to the loss; and a step of forward, backward, AdamW."""

    model: torch.nn.Module
    loss: Callable[[], Tensor]
    step: Callable[[], None]


def write_checkpoint(folder: Path, sizes: Sizes = DEFAULT) -> None:
    """A Qwen3-MoE with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=sizes.hidden // 8,
        intermediate_size=2 * sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def ep_sizes(layout: dict[str, int]) -> list[int]:
    """The EP sizes worth comparing: that of the TP group, and that of all ranks."""
    return sorted({layout.get("tp_size", 1), 8} - {1})


def no_exchange() -> str:
    """The name of an implementation whose rows stay where they are: what a free exchange would take.

    Each rank's experts get as many rows and slots as with an even routing, though not the right ones.
    """
    from ep_dispatch import EPImplementation, EPImplementationInterface

    class NoExchange(EPImplementation):
        def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            tokens = hidden_states.shape[0]
            own = slice(
                tokens * self.tp_rank // self.tp_size, tokens * (self.tp_rank + 1) // self.tp_size
            )
            local = index[own] % self.num_local_experts
            out = self.run_experts(hidden_states[own], local, weights[own]).to(hidden_states.dtype)
            return torch.nn.functional.pad(out, (0, 0, own.start, tokens - own.stop))

    EPImplementationInterface.register("no_exchange", NoExchange)
    return "no_exchange"


def build(
    folder: str,
    layout: dict[str, int],
    ep: int,
    *,
    ours: bool,
    implementation: str = "auto",
    recompute: str = "none",
    shape: Sizes = DEFAULT,
) -> Run:
    """Ours, by an implementation, or the native one.

    `recompute`: whether ours computes the experts' first projection again in backward.
    """
    from transformers import AutoModelForCausalLM as Native
    from transformers.distributed import DistributedConfig as NativeConfig

    from ep_mesh import DistributedConfig
    from expert_parallel import AutoModelForCausalLM

    sizes = {**layout, "ep_size": ep}
    config = DistributedConfig(**sizes, ep_implementation=implementation)
    model: Any
    if ours:
        model = AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=config, experts_recompute=recompute
        )
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
    ids = torch.randint(3, VOCABULARY, (shape.batch, shape.length), generator=generator)
    ids = ids.to(model.device)

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
    """Seconds of a step of each implementation and EP size.

    Medians of the fastest of ours and of the native ones, in turns with ours if rows travelled for nothing.
    """
    steps: dict[str, Callable[[], None]] = {}
    for ep in ep_sizes(layout):
        for ours in (False, True):
            name = f"{'ours' if ours else 'native'} ep={ep}"
            steps[name] = build(folder, layout, ep, ours=ours).step
    timed_in_turns(steps, 1)  # of which the first of each does more
    times = timed_in_turns(steps, 1)
    both = {name: steps[name] for who in ("native", "ours") for name in [fastest(times, who)]}
    ep = ep_of(fastest(times, "ours"))
    free = build(folder, layout, ep, ours=True, implementation=no_exchange()).step
    free()
    times |= timed_in_turns({**both, FREE: free}, repeats)
    gc.collect()
    return {name: median(found) for name, found in times.items()}


def compiled_seconds(
    rank: int, folder: str, layout: dict[str, int], ep: int, repeats: int = 7
) -> dict[str, float]:
    """Seconds of a step as written and with compiled layers, medians in turns; and of compiling them."""
    from ep_plans import compile_layers

    plain, compiled = (build(folder, layout, ep, ours=True) for _ in range(2))
    compile_layers(compiled.model)
    steps = {"as written": plain.step, "compiled": compiled.step}
    first = timed_in_turns(steps, 1)
    times = {name: median(found) for name, found in timed_in_turns(steps, repeats).items()}
    return {**times, "first compiled": first["compiled"][0]}


def ep_of(name: str) -> int:
    """The EP size in a name of `step_seconds`."""
    return int(name.partition(" ep=")[2])


def fastest(times: dict[str, list[float]], who: str) -> str:
    """The fastest of ours or of the native ones, by the first rank's clock."""
    name = [min((n for n in times if n.startswith(who)), key=lambda n: median(times[n]))]
    dist.broadcast_object_list(name)
    return name[0]


def timed_in_turns(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, all ranks together."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    return times


def step_memory(rank: int, folder: str, layout: dict[str, int], ep: int, ours: bool) -> list[int]:
    """The most memory that the rank's process ever held, and bytes that a forward keeps for backward.

    That of loading and of the libraries included: one implementation in a process. Ours also: what a
    forward keeps with `experts_recompute="gate_up"`.
    """
    run = build(folder, layout, ep, ours=ours)
    run.step()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    found = [1024 * int(peak), kept_bytes(run)]
    if ours:
        del run
        gc.collect()
        found.append(kept_bytes(build(folder, layout, ep, ours=True, recompute="gate_up")))
    return found


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
