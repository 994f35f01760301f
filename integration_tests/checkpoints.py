"""Checkpoints made for a test, of any size, and what loading one costs each rank."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

FORMS = ("per_expert", "fused")


def moe_config(**changes: Any) -> transformers.PreTrainedConfig:
    """A Qwen3-MoE of which nearly all is experts."""
    sizes = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
    }
    return transformers.Qwen3MoeConfig(**sizes | changes)


def tensors(config: Any, form: str) -> Iterator[tuple[str, torch.Size]]:
    """Names and shapes of a checkpoint of `config` with fused or with single experts."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if form == "fused" or ".experts." not in name:
            yield name, parameter.shape
            continue
        prefix = name.rpartition(".")[0]
        for expert in range(config.num_experts):
            hidden, inner = config.hidden_size, config.moe_intermediate_size
            if name.endswith("gate_up_proj"):
                yield f"{prefix}.{expert}.gate_proj.weight", torch.Size((inner, hidden))
                yield f"{prefix}.{expert}.up_proj.weight", torch.Size((inner, hidden))
            else:
                yield f"{prefix}.{expert}.down_proj.weight", torch.Size((hidden, inner))


def write_checkpoint(
    path: Path, config: Any, form: str, *, file_bytes: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Write a checkpoint in files of about `file_bytes` with an index; its size in bytes.

    The values are different random numbers for each tensor, cheap to make.
    """
    path.mkdir(parents=True)
    config.save_pretrained(path)
    base = torch.randn((1 << 20) + 7, generator=torch.Generator().manual_seed(0)).mul(0.02)
    base = base.to(dtype)
    files: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}
    total = held = 0

    def write() -> None:
        name = f"model-{len(files):05d}.safetensors"
        save_file(files[-1], path / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(files[-1], name))
        files[-1].clear()

    for index, (name, shape) in enumerate(tensors(config, form)):
        shift = (index * 7919) % base.numel()
        numel = shape.numel()
        values = base.roll(shift).repeat(-(-numel // base.numel()))[:numel].reshape(shape)
        size = numel * dtype.itemsize
        if held + size > file_bytes and files[-1]:
            write()
            files.append({})
            held = 0
        files[-1][name] = values.contiguous()
        held, total = held + size, total + size
    write()
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(index_text)
    return total


@dataclass(frozen=True)
class Cost:
    """What loading cost one rank, in bytes.

    Attributes:
        shards: what its parameters and buffers hold.
        read: taken out of the files.
        memory: the most anonymous memory during the load, above what was there before.
        seconds: how long it took.
    """

    shards: int
    read: int
    memory: int
    seconds: float


def load_cost(rank: int, path: str, sizes: dict[str, Any], warm: str) -> Cost:
    """Load on this rank and measure; `warm` is a small checkpoint, loaded before for the imports."""
    from expert_parallel import AutoModelForCausalLM, load_report

    AutoModelForCausalLM.from_pretrained(warm, distributed_config=sizes)
    with _AnonymousMemory() as memory:
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=sizes)
    held = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        held += local.numel() * local.element_size()
    report = load_report(model)
    assert report is not None
    return Cost(held, report.bytes_read, memory.peak, report.seconds)


def save_cost(rank: int, path: str, sizes: dict[str, Any], target: str, original: bool) -> Cost:
    """Load a checkpoint on this rank and measure saving it; nothing is read."""
    from expert_parallel import AutoModelForCausalLM, save_pretrained

    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=sizes)
    start = time.perf_counter()
    with _AnonymousMemory() as memory:
        save_pretrained(model, target, save_original_format=original)
    return Cost(0, 0, memory.peak, time.perf_counter() - start)


class _AnonymousMemory:
    """The peak of this process's anonymous resident memory inside the block, above its start."""

    def __enter__(self) -> Self:
        gc.collect()
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what comes
        self._start = _anonymous()
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, _anonymous() - self._start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, _anonymous() - self._start)


def _anonymous() -> int:
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this system tells no anonymous memory")
