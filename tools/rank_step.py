"""A step of one rank of 8, really run: its collectives come back at once, and do nothing.

Kernels, the allocator and the host are real; what collectives would bring is not, so a loss means nothing.
Which experts a token goes to is drawn, evenly, as in the estimate. A run needs a process of its own:
`python tools/rank_step.py '["ours", "tp8", "cuda", {}]'` prints JSON; the last are changes of the model's sizes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    _root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(path) for path in sorted(_root.glob("packages/*/src"))]

import estimate_figures as figures
import torch
from torch import nn
from torch.distributed.tensor import DTensor

LENGTH = 2048
WARM_UPS = 2


@contextlib.contextmanager
def our_step(layout: str, device: str, **changes: Any) -> Iterator[Callable[[], None]]:
    """Ours, with the settings of the estimate."""
    from ep_dispatch.exchange import SlotExchange
    from expert_parallel.estimate.routes import Routes
    from expert_parallel.meta import build_on_meta
    from expert_parallel.parallel import shard_model

    config = figures.our_layout(layout)
    there = SlotExchange._there
    model = build_on_meta(figures.qwen3_30b_a3b(dtype=torch.bfloat16, **changes))
    top_k = model.config.num_experts_per_tok
    ids = functools.cache(Routes.ids)  # drawing them takes the host longer than a layer

    def arrived(this: Any, tensors: Any) -> list[torch.Tensor]:
        """Rows of slots that are there: what did not arrive could be any number."""
        return [
            x if x.is_floating_point() else _some_rows(tuple(this.receive), top_k, x)
            for x in there(this, tensors)
        ]

    with (
        figures.ranks_that_are_not_there(config, device) as mesh,
        mock.patch.object(Routes, "ids", lambda *args: ids(*args)),
        mock.patch.object(SlotExchange, "_there", arrived),
        Routes(config.layout, 0, "balanced", 0).told(),
    ):
        shard_model(model, mesh, config, own_experts=True)
        yield _step_of(model, device)


def _some_rows(slots: tuple[int, ...], top_k: int, like: torch.Tensor) -> torch.Tensor:
    """For each slot a row of its source, which sends a row for at most `top_k` slots."""
    rows = torch.cat([torch.arange(number) // top_k for number in slots])
    return rows.to(like.device, like.dtype)


@contextlib.contextmanager
def native_step(layout: str, device: str, **changes: Any) -> Iterator[Callable[[], None]]:
    """Native transformers', by `all_reduce`."""
    from expert_parallel.estimate.routing import draw_experts

    with figures.native_model(layout, True, "all_reduce", device, **changes) as (model, *_):
        config = model.config

        def chosen(router: nn.Module, args: Any, output: Any, *, ids: torch.Tensor) -> Any:
            logits, weights, _ = output
            return logits, weights, ids

        for name, module in model.named_modules():
            if name.endswith(".mlp.gate"):
                sizes = LENGTH, config.num_experts_per_tok, config.num_experts
                ids = draw_experts("balanced", *sizes, seed=0, layer=name, batch=0).to(device)
                module.register_forward_hook(functools.partial(chosen, ids=ids))
        yield _step_of(model, device)


def _step_of(model: Any, device: str) -> Callable[[], None]:
    """Forward, backward, clipping and fused AdamW, as the estimate runs them."""
    from ep_plans import clip_grad_norm_
    from ep_trainer.optim import split_by_mesh

    model.to_empty(device=device)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.normal_(0, 0.02)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    split_by_mesh(optimizer)
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64, device=device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(who: str, layout: str, device: str, changes: dict[str, Any]) -> dict[str, float]:
    """Of a step after two others: the allocator's peak; kernels and their seconds, those of torch.profiler."""
    steps = {"ours": our_step, "native": native_step}
    with steps[who](layout, device, **changes) as step:
        for _ in range(WARM_UPS):
            step()
        if device != "cuda":
            return {"peak_bytes": 0, "kernels": 0, "kernel_seconds": 0.0}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
    seen = [one for one in profiler.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    seconds = sum(one.device_time for one in seen) / 1e6
    return {"peak_bytes": peak, "kernels": len(seen), "kernel_seconds": seconds}


def isolated(*arguments: Any) -> dict[str, float]:
    """What `measure` gives in a process of its own."""
    command = [sys.executable, __file__, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(measure(*json.loads(sys.argv[1]))), flush=True)
