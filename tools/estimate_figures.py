"""Figures of `expert_parallel.estimate`: Qwen3-30B-A3B on 8 GPUs, native transformers beside ours.

Each runs in a process of its own, since a simulation starts and ends `torch.distributed`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

GIB = 1 << 30
LAYOUTS = {"tp8": (8, 1), "tp4_fsdp2": (4, 2), "tp2_fsdp4": (2, 4)}
"""TP and FSDP sizes of the published table."""
SIZES = {**LAYOUTS, "fsdp8": (1, 8)}
"""Those and one more, where native transformers has no expert parallelism."""
PUBLISHED_GIB = {"tp8": 38.6, "tp4_fsdp2": 34.2, "tp2_fsdp4": 32.3}
PUBLISHED_RATE = {"tp8": 3485, "tp4_fsdp2": 2900, "tp2_fsdp4": 2830}
CONDITIONS = (
    "simulated on fake tensors; Qwen3-30B-A3B, micro-batch 1, sequence 2048, bf16 with full gradients and "
    "AdamW states in bf16, H100 preset"
)


def qwen3_30b_a3b(**changes: Any) -> Any:
    """The model of the published table."""
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return Qwen3MoeConfig(**sizes | changes)


def our_layout(layout: str) -> Any:
    """The configuration that is best for the layout."""
    from ep_mesh import DistributedConfig

    tp, fsdp = SIZES[layout]
    return DistributedConfig(tp_size=tp, fsdp_size=fsdp, ep_size=8, enable_sequence_parallel=True)


def ours(layout: str, checkpointing: bool = True, **changes: Any) -> dict[str, Any]:
    """Our estimate with the settings that are best for the layout; `changes`: of the model's sizes."""
    from expert_parallel.estimate import estimate

    return estimate(
        qwen3_30b_a3b(**changes),
        our_layout(layout),
        sequence_length=2048,
        gradient_checkpointing=checkpointing,
        experts_recompute="none" if checkpointing else "gate_up",
    ).to_dict()


def native(
    layout: str, checkpointing: bool = True, implementation: str = "all_reduce", **changes: Any
) -> Any:
    """The same step of native transformers 5.24, followed by the same tracker."""
    from expert_parallel.estimate._compat import FakeTensorMode, without_tracing
    from expert_parallel.estimate.report import estimate_of
    from expert_parallel.estimate.simulate import run_step
    from expert_parallel.estimate.tracker import Tracker

    with contextlib.ExitStack() as stack:
        shared = native_model(layout, checkpointing, implementation, "cpu", **changes)
        model, mesh, setting, parameters = stack.enter_context(shared)
        stack.enter_context(_local_products(LAYOUTS[layout][0]))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        tracker = Tracker(mesh, fake=fake)
        stack.enter_context(without_tracing())
        stack.enter_context(fake)
        stack.enter_context(tracker.following(model))
        model.to_empty(device="cpu")
        step = run_step(model, tracker, setting, parameters)
    return estimate_of(setting, step).to_dict()


@contextlib.contextmanager
def native_model(
    layout: str, checkpointing: bool, implementation: str, device: str, **changes: Any
) -> Iterator[tuple[Any, Any, Any, int]]:
    """Native transformers' model, sharded on the meta device over ranks that are not there.

    With it a mesh of ours, what is to be run, and how many parameters there are.
    """
    import torch
    import transformers
    from transformers.distributed import DistributedConfig as NativeConfig

    from ep_mesh import DistributedConfig
    from expert_parallel.estimate import DEVICES
    from expert_parallel.estimate.simulate import Setting
    from expert_parallel.meta import build_on_meta

    tp, fsdp = LAYOUTS[layout]
    setting = Setting(
        model=qwen3_30b_a3b(dtype=torch.bfloat16, **changes),
        config=DistributedConfig(tp_size=tp, fsdp_size=fsdp, ep_size=tp, tp_plan={}),
        sequence_length=2048,
        micro_batch=1,
        gradient_checkpointing=checkpointing,
        dtype=torch.bfloat16,
        routing="balanced",
        device=DEVICES["h100"],
        seed=0,
        experts_recompute="none",
    )
    kind = transformers.Qwen3MoeForCausalLM
    model = build_on_meta(setting.model)
    parameters = sum(p.numel() for p in model.parameters())
    config = NativeConfig(tp_size=tp, fsdp_size=fsdp, ep_size=tp, ep_implementation=implementation)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(tp * fsdp)}
    with (
        ranks_that_are_not_there(setting.config, device) as mesh,
        _without_tp_rules(kind),
        mock.patch.dict("os.environ", ranks),
    ):
        config, _, native_mesh = kind.prepare_distribute_model(config)
        yield kind.maybe_distribute_model(model, config, native_mesh), mesh, setting, parameters


@contextlib.contextmanager
def ranks_that_are_not_there(config: Any, device: str) -> Iterator[Any]:
    """A mesh of them, seen from the first."""
    import torch.distributed as dist

    from ep_mesh import ParallelMesh
    from expert_parallel.estimate._compat import start_fake_group

    start_fake_group(config.world_size, 0)
    try:
        yield ParallelMesh(config.layout, device)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _without_tp_rules(kind: Any) -> Iterator[None]:
    """Experts alone, as the table says: 5.24 refuses the `tp_plan={}` that asks for it."""
    resolve = kind._resolve_parallel_plans

    def resolved(self: Any, config: Any) -> Any:
        _, *others = resolve(self, config)
        return {}, *others

    with mock.patch.object(kind, "_resolve_parallel_plans", resolved):
        yield


@contextlib.contextmanager
def _local_products(ranks: int) -> Iterator[None]:
    """Under `all_reduce` a rank's experts multiply their share of the rows that they are given."""
    from expert_parallel.estimate import operators

    whole = operators._FLOPS["_grouped_mm"]

    def part(*args: Any) -> float:
        return whole(*args) / ranks

    with mock.patch.dict(operators._FLOPS, {"_grouped_mm": part}):
        yield


def isolated(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function of this module gives in a process of its own."""
    call = json.dumps([function.__name__, args, kwargs])
    done = subprocess.run(
        [sys.executable, __file__, call], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def _figure(
    value: float, unit: str, reference: str, conditions: str, **more: Any
) -> dict[str, Any]:
    return {
        "value": value,
        "unit": unit,
        "reference": reference,
        "conditions": f"{CONDITIONS}; {conditions}",
        **more,
    }


def _peak(found: dict[str, Any]) -> dict[str, Any]:
    peak = found["peak"]
    return {
        "phase": peak["phase"],
        "GiB": {kind: round(size / GIB, 2) for kind, size in peak["by_kind"].items()},
    }


def figures() -> dict[str, Callable[[], dict[str, Any]]]:
    """All figures by name."""
    made: dict[str, Callable[[], dict[str, Any]]] = {}
    for layout in LAYOUTS:
        _add_layout(made, layout)
    made["simulated_peak_gib_tp8_no_checkpointing"] = _no_checkpointing
    made["estimated_unique_tokens_per_s_per_gpu_4096"] = _long_sequences
    made["estimated_two_hops_speedup"] = _two_hops
    made["plan_seconds_qwen3_30b"] = _plan_seconds
    return made


def at_4096(fused: bool) -> dict[str, Any]:
    """The fastest step of sequences of 4096 over 8 FSDP ranks that leaves a tenth of 80 GiB free."""
    from ep_mesh import DistributedConfig
    from expert_parallel.estimate import estimate

    choices: list[dict[str, Any]] = []
    for ep, batch in itertools.product((2, 4, 8), (1, 2)):
        found = estimate(
            qwen3_30b_a3b(),
            DistributedConfig(fsdp_size=8, ep_size=ep),
            sequence_length=4096,
            micro_batch=batch,
            gradient_checkpointing=False,
            fused_operators=fused,
            sampled=True,
        )
        choice = {
            "layout": f"fsdp=8, ep={ep}, micro-batch {batch}",
            "unique": found.unique_tokens_per_second_per_device,
            "peak_GiB": found.peak.bytes / GIB,
            "kernels": sum(found.kernels.values()),
            "milliseconds": 1000 * found.time.seconds,
        }
        if choice["peak_GiB"] < 72:
            choices.append(choice)
    return max(choices, key=lambda choice: choice["unique"])


def two_nodes() -> dict[str, dict[str, float]]:
    """Milliseconds of a step over two nodes, by implementation and number of chunks."""
    from ep_mesh import DistributedConfig
    from expert_parallel.estimate import estimate

    found: dict[str, dict[str, float]] = {}
    for name, chunks in itertools.product(("all_to_all", "all_to_all_hierarchical"), (1, 2)):
        step = estimate(
            qwen3_30b_a3b(),
            DistributedConfig(fsdp_size=16, ep_size=16, ep_implementation=name),
            sequence_length=2048,
            micro_batch=4,
            ep_options={"num_chunks": chunks},
            sampled=True,
        )
        found.setdefault(name, {})[f"{chunks} chunk{'s' * (chunks > 1)}"] = round(
            1000 * step.time.seconds, 1
        )
    return found


def _two_hops() -> dict[str, Any]:
    """A step over two nodes in one hop between ranks, over one in two hops."""
    found = isolated(two_nodes)
    one, two = (found[name]["1 chunk"] for name in found)
    return {
        "value": one / two,
        "unit": "ratio",
        "reference": "1: no gain",
        "conditions": f"{CONDITIONS.replace('micro-batch 1', 'micro-batch 4')}; fsdp=16, ep=16 on two nodes "
        "of 8, 400 Gbit/s a device between them, gradient checkpointing; an estimate",
        "milliseconds": found,
    }


def found_layouts() -> dict[str, Any]:
    """What a search of 8 devices finds, and the seconds that it takes."""
    from expert_parallel.estimate import search

    start = time.perf_counter()
    found = search(qwen3_30b_a3b(), 8, sequence_length=2048, memory_bytes=80 * GIB)
    best = found.choices[0]
    return {
        "seconds": time.perf_counter() - start,
        "choices": len(found.choices),
        "best": best.code,
        "peak_GiB": best.estimate.peak.bytes / GIB,
        "unique": best.estimate.unique_tokens_per_second_per_device,
    }


def _plan_seconds() -> dict[str, Any]:
    """How long a search of all layouts takes."""
    found = isolated(found_layouts)
    seconds = found.pop("seconds")
    return _figure(seconds, "s", "at most 60", "8 devices of 80 GiB, all layouts", **found)


def _long_sequences() -> dict[str, Any]:
    """Unique tokens/s/GPU of sequences of 4096, with fused norms and rotary embeddings and without."""
    found, before = isolated(at_4096, True), isolated(at_4096, False)
    value = found.pop("unique")
    return {
        "value": value,
        "unit": "tokens/s/GPU",
        "reference": "published for NeMo Automodel on 8 H100: 12040",
        "conditions": f"{CONDITIONS.replace('micro-batch 1, sequence 2048', 'sequence 4096')}; no gradient "
        "checkpointing, peak below 72 GiB; an estimate",
        "speedup": value / before["unique"],
        **found,
        "without_fused_operators": before,
    }


def _no_checkpointing() -> dict[str, Any]:
    """The peak of a step without gradient checkpointing, ours and native transformers'."""
    mine, theirs = isolated(ours, "tp8", False), isolated(native, "tp8", False)
    return _figure(
        mine["peak"]["bytes"] / GIB,
        "GiB",
        f"native transformers, simulated: {theirs['peak']['bytes'] / GIB:.1f}",
        "tp=8, ep=8, sequence parallel, experts_recompute=gate_up, no gradient checkpointing",
        **_peak(mine),
    )


def _add_layout(made: dict[str, Callable[[], dict[str, Any]]], layout: str) -> None:
    tp, fsdp = LAYOUTS[layout]
    settings = f"tp={tp}, fsdp={fsdp}, ep=8, sequence parallel, gradient checkpointing"

    def native_peak() -> dict[str, Any]:
        """The peak of native transformers' step; the published one beside it."""
        found = isolated(native, layout)
        return _figure(
            found["peak"]["bytes"] / GIB,
            "GiB",
            f"published: {PUBLISHED_GIB[layout]}",
            f"native transformers, all_reduce, tp={tp}, fsdp={fsdp}, ep={tp}, gradient checkpointing",
            **_peak(found),
        )

    def peak() -> dict[str, Any]:
        """The peak of our step; the published one beside it."""
        found = isolated(ours, layout)
        reference = f"published for native transformers: {PUBLISHED_GIB[layout]}"
        return _figure(found["peak"]["bytes"] / GIB, "GiB", reference, settings, **_peak(found))

    def rate() -> dict[str, Any]:
        """Estimated tokens/s/GPU, every rank's own tokens counted as the table counts, and unique ones."""
        found = isolated(ours, layout)
        return _figure(
            found["tokens_per_second_per_device"],
            "tokens/s/GPU",
            f"published for native transformers: {PUBLISHED_RATE[layout]}",
            f"{settings}; an estimate",
            unique=round(found["unique_tokens_per_second_per_device"]),
            bottleneck=found["time"]["bottleneck"],
            milliseconds={
                name: round(1000 * found["time"][name], 1)
                for name in ("seconds", "kernels", "link_exposed", "host_exposed", "host")
            },
        )

    def kernels() -> dict[str, Any]:
        """Kernels that a rank launches in a step, ours; native transformers' beside it."""
        mine, theirs = isolated(ours, layout), isolated(native, layout)
        return _figure(
            sum(mine["kernels"].values()),
            "kernels",
            f"native transformers, simulated: {sum(theirs['kernels'].values())}",
            settings,
            phases=mine["kernels"],
            native_phases=theirs["kernels"],
        )

    made[f"native_simulated_peak_gib_{layout}"] = native_peak
    made[f"simulated_peak_gib_{layout}"] = peak
    made[f"estimated_tokens_per_s_per_gpu_{layout}"] = rate
    made[f"kernels_per_step_{layout}"] = kernels


if __name__ == "__main__":
    _name, _args, _kwargs = json.loads(sys.argv[1])
    print(json.dumps(globals()[_name](*_args, **_kwargs)))
