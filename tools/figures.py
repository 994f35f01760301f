"""Measure a figure that the documentation gives: `python tools/figures.py NAME`.

A figure is a function that measures and returns plain data; the command prints it as one line of JSON.
`--list` names them; `--full` takes all cases where a figure has a sample of them. Run it in the environment of `nox -s dev`; on a machine that does nothing else,
where times are measured.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import estimate_figures

Figure = Callable[[], dict[str, Any]]
FIGURES: dict[str, Figure] = {}
PLAIN = ("layouts_checked", "rank_pool", "load_cost", "checkpoint_cost")
"""Figures that compare nothing."""
TOLD = (
    "exchange_alone",
    "fsdp2",
    "bytes_ratio",
    "seconds",
    "bound",
    "milliseconds",
    "kib_per_token",
    "activation_ratio",
    "activation_MB",
    "activation_ratio_recompute",
    "rss_ratio",
    "rss_MB",
    "unique",
    "bottleneck",
    "apart_from",
    "worst_float64",
    "speedup",
    "cpu_speedup",
)
"""What the page tells of a figure beside its value."""
TABLE = "| figure | value | against | conditions | measured |\n| --- | --- | --- | --- | --- |\n"


def figure(function: Figure) -> Figure:
    """Register a figure."""
    FIGURES[function.__name__] = function
    return function


@figure
def layouts_checked() -> dict[str, Any]:
    """How many layouts of up to 64 ranks there are: the property tests of ep-mesh go through all."""
    from ep_mesh import Layout, legal_ep_sizes

    sizes = range(1, 65)
    layouts = [
        Layout(tp=tp, fsdp=fsdp, dp_replicate=replicas, pp=pp, ep=ep)
        for tp in sizes
        for fsdp in sizes
        if tp * fsdp <= 64
        for replicas in sizes
        if tp * fsdp * replicas <= 64
        for pp in sizes
        if tp * fsdp * replicas * pp <= 64
        for ep in legal_ep_sizes(tp, fsdp)
    ]
    return {"layouts": len(layouts), "ranks": sum(layout.world_size for layout in layouts)}


@figure
def rank_pool() -> dict[str, Any]:
    """What the multi-rank tests wait for: the first start of 8 ranks, a further one, and a call."""
    from ep_testing import RankPool

    pool = RankPool()
    start = time.perf_counter()
    pool.run(int)
    first = time.perf_counter() - start
    pool.close()
    start = time.perf_counter()
    pool.run(int)
    further = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(50):
        pool.run(int)
    call = (time.perf_counter() - start) / 50
    pool.close()
    return {"first_s": first, "further_s": further, "call_ms": 1000 * call}


@figure
def load_cost() -> dict[str, Any]:
    """Load and save 2 GB on 8 ranks: bytes read and host memory of a rank against its share."""
    import tempfile
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration_tests"))
    import checkpoints

    from ep_testing import RankPool

    sizes = {"tp_size": 2, "fsdp_size": 4, "ep_size": 4}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        small = checkpoints.moe_config(
            hidden_size=64, vocab_size=128, moe_intermediate_size=32, num_hidden_layers=1
        )
        warm = Path(folder) / "warm"
        checkpoints.write_checkpoint(warm, small, "fused", file_bytes=1 << 30)
        for form in checkpoints.FORMS:
            path = Path(folder) / form
            config = checkpoints.moe_config()
            size = checkpoints.write_checkpoint(path, config, form, file_bytes=300 << 20)
            pool = RankPool()
            costs = pool.run(checkpoints.load_cost, str(path), sizes, str(warm), timeout=500)
            original = form == "per_expert"
            target = str(Path(folder) / "saved")
            saves = pool.run(checkpoints.save_cost, str(path), sizes, target, original, timeout=500)
            pool.close()
            result[form] = {
                "checkpoint_MB": round(size / 1e6),
                "share_MB": round(max(cost.shards for cost in costs) / 1e6, 1),
                "read_MB": round(max(cost.read for cost in costs) / 1e6, 1),
                "memory_MB": round(max(cost.memory for cost in costs) / 1e6, 1),
                "seconds": round(max(cost.seconds for cost in costs), 1),
                "save_memory_first_rank_MB": round(saves[0].memory / 1e6, 1),
                "save_memory_others_MB": round(max(cost.memory for cost in saves[1:]) / 1e6, 1),
                "save_seconds": round(saves[0].seconds, 1),
            }
    return result


def ratio(value: float, reference: str, conditions: str, **more: Any) -> dict[str, Any]:
    """A figure that compares ours with something else."""
    return {
        "value": value,
        "unit": "ratio",
        "reference": reference,
        "conditions": f"{conditions}; 8 gloo ranks of one thread each",
        **more,
    }


def on_ranks(fn: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
    """What a function gives on each of 8 ranks."""
    from ep_testing import RankPool

    pool = RankPool()
    try:
        return pool.run(fn, *args, timeout=timeout)
    finally:
        pool.close()


@figure
def rows_over_optimum_ep8() -> dict[str, Any]:
    """Rows that cross between ranks over the distinct (token, other rank) pairs, in any workload."""
    import moe_layer

    sent, needed = map(
        sum, zip(*on_ranks(moe_layer.crossing_rows, moe_layer.SMALL, 8), strict=True)
    )
    return ratio(
        sent / needed,
        "distinct (token, other rank) pairs",
        f"{moe_layer.SMALL}; uniform, one hot expert, one hot rank and repeated ids",
    )


def _layer_figures(ep: int) -> None:
    def wire() -> dict[str, Any]:
        """Bytes between ranks in a MoE layer's forward and backward, over transformers' all_to_all."""
        import moe_layer

        theirs, ours = map(
            sum, zip(*on_ranks(moe_layer.wire_bytes, moe_layer.QWEN3_30B, ep), strict=True)
        )
        return ratio(ours / theirs, "transformers all_to_all", str(moe_layer.QWEN3_30B))

    def saved(recompute: str = "none") -> dict[str, Any]:
        """Bytes kept for backward by a MoE layer, over transformers' all_to_all with grouped_mm."""
        import moe_layer

        sizes = moe_layer.QWEN3_30B
        found = on_ranks(moe_layer.saved_bytes, sizes, ep, recompute)
        theirs, ours = (sum(pair) / (8 * sizes.tokens * 1024) for pair in zip(*found, strict=True))
        return ratio(
            ours / theirs,
            "transformers all_to_all with grouped_mm",
            f"{sizes}; recompute={recompute}",
            kib_per_token=[round(theirs, 1), round(ours, 1)],
        )

    def times(bf16: bool) -> tuple[list[float], str]:
        import moe_layer

        sizes = moe_layer.QWEN3_30B if bf16 else moe_layer.SMALL
        return on_ranks(moe_layer.layer_times, sizes, ep)[0], str(sizes)

    def speedup(bf16: bool = False) -> dict[str, Any]:
        """A MoE layer's forward and backward: seconds of transformers' all_to_all over ours."""
        (theirs, ours, _), sizes = times(bf16)
        return ratio(
            theirs / ours,
            "transformers all_to_all",
            sizes,
            seconds=[round(theirs, 3), round(ours, 3)],
        )

    def over_gemm() -> dict[str, Any]:
        """A MoE layer's seconds over those of its grouped GEMMs alone, on the same slots."""
        (_, ours, gemms), sizes = times(False)
        return ratio(
            ours / gemms, "its six grouped GEMMs", sizes, seconds=[round(gemms, 3), round(ours, 3)]
        )

    FIGURES[f"wire_bytes_ratio_ep{ep}"] = wire
    FIGURES[f"saved_bytes_ratio_ep{ep}"] = saved
    FIGURES[f"saved_bytes_ratio_ep{ep}_recompute"] = _named(saved, "gate_up")
    FIGURES[f"layer_speedup_ep{ep}"] = speedup
    FIGURES[f"layer_speedup_ep{ep}_bf16"] = _named(speedup, True)
    FIGURES[f"layer_over_gemm_ep{ep}"] = over_gemm


def _named(function: Callable[..., dict[str, Any]], *args: Any) -> Figure:
    found = functools.partial(function, *args)
    found.__doc__ = function.__doc__
    return found


@figure
def decode_speedup() -> dict[str, Any]:
    """A decoding step of a MoE layer, the worst of some batches: transformers' all_reduce over ours.

    Ranks that share cores are placed anew by each start, which moves a step by a tenth: the mean of three.
    """
    from statistics import mean

    import moe_layer

    sizes = (1, 4, 16, 32)
    starts = [on_ranks(decode_steps, sizes) for _ in range(3)]
    wall = {n: [mean(ranks[0][n][i] for ranks in starts) for i in (0, 1)] for n in sizes}
    cpu = {
        n: [mean(rank[n][i] for ranks in starts for rank in ranks) for i in (2, 3)] for n in sizes
    }
    return ratio(
        min(theirs / ours for theirs, ours in wall.values()),
        "transformers all_reduce",
        f"{moe_layer.SMALL}, but {list(sizes)} tokens shared by all ranks; tp=8, ep=8, no gradients; "
        "the mean of three starts",
        speedup={n: round(theirs / ours, 3) for n, (theirs, ours) in wall.items()},
        milliseconds={n: [round(1000 * x, 2) for x in pair] for n, pair in wall.items()},
        cpu_speedup={n: round(theirs / ours, 3) for n, (theirs, ours) in cpu.items()},
    )


def decode_steps(rank: int, sizes: tuple[int, ...]) -> dict[int, list[float]]:
    """The times of decoding steps by the number of tokens."""
    import moe_layer

    return {n: moe_layer.decode_times(rank, moe_layer.SMALL, n) for n in sizes}


@figure
def two_node_speedup() -> dict[str, Any]:
    """A MoE layer between two emulated nodes with 1 Gbit/s: transformers' all_to_all over ours in two hops."""
    import moe_layer
    import two_nodes

    times = two_nodes.two_node_times()
    layer, exchange = (x["transformers"] / x["all_to_all_hierarchical"] for x in times.values())
    return ratio(
        layer,
        "transformers all_to_all",
        f"{moe_layer.SMALL}; ep=8 over two network namespaces, 4 ranks each, {two_nodes.RATE}",
        exchange_alone=round(exchange, 2),
        seconds={
            kind: {name: round(value, 3) for name, value in found.items()}
            for kind, found in times.items()
        },
    )


@figure
def torchtitan_exchange_speedup() -> dict[str, Any]:
    """Dispatch and combine in torchtitan's MoE, forward and backward: its own dispatcher over ours."""
    import moe_layer
    import torchtitan_exchange

    found = on_ranks(torchtitan_exchange.measure, moe_layer.SMALL)
    theirs, ours = found[0][0]
    sent = [sum(rank[1][i] for rank in found) for i in (0, 1)]
    return ratio(
        theirs / ours,
        "torchtitan 0.3.0's all-to-all dispatcher",
        f"{moe_layer.SMALL}; ep=8, experts that compute nothing",
        bytes_ratio=round(sent[1] / sent[0], 3),
        milliseconds=[round(1000 * theirs, 1), round(1000 * ours, 1)],
    )


@figure
def pipeline_matrix_failures() -> dict[str, Any]:
    """Layouts, schedules and ways to train over pipeline stages that differ from one process."""
    import pipeline_matrix

    return pipeline_matrix.failures(whole="--full" in sys.argv)


@figure
def wire_error() -> dict[str, Any]:
    """The error that narrower rows on the wire cost: the worst row's, of the output and of its gradient."""
    import moe_layer
    import torch

    sizes = moe_layer.Sizes(256, 128, 32, 4, 64, torch.float64)
    found = on_ranks(moe_layer.wire_errors, sizes)
    errors = {key: [max(one[key][i] for one in found) for i in range(2)] for key in found[0]}
    return {
        "value": errors["bfloat16, uniform"][0],
        "unit": "relative error",
        "reference": "the same layer with rows in float64",
        "conditions": f"bfloat16 wire, output, uniform rows; {sizes}; ep=8; 8 gloo ranks",
        "errors": {key: [float(f"{x:.2g}") for x in pair] for key, pair in errors.items()},
    }


@figure
def compile_step_speedup() -> dict[str, Any]:
    """A training step as written over one with layers compiled by inductor, on 2 ranks."""
    import tempfile

    import moe_step

    from ep_testing import RankPool

    pool = RankPool()
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        moe_step.write_checkpoint(Path(folder))
        for name, layout in {"tp2": {"tp_size": 2}, "fsdp2": {"fsdp_size": 2}}.items():
            found = pool.run(moe_step.compiled_seconds, folder, layout, 2, world=2, timeout=500)[0]
            seconds[name] = {key: round(value, 3) for key, value in found.items()}
    pool.close()
    return {
        "value": seconds["tp2"]["as written"] / seconds["tp2"]["compiled"],
        "unit": "ratio",
        "reference": "the same step as it is written",
        "conditions": f"tp=2, ep=2: {moe_step.DEFAULT}; 2 gloo ranks of one thread each",
        "fsdp2": seconds["fsdp2"]["as written"] / seconds["fsdp2"]["compiled"],
        "seconds": seconds,
    }


def _step_figure(layout: str) -> Figure:
    def step_speedup() -> dict[str, Any]:
        """A training step of a small Qwen3-MoE: native transformers' seconds over ours, and memory."""
        import tempfile

        import moe_step

        sizes = moe_step.LAYOUTS[layout]
        with tempfile.TemporaryDirectory() as folder:
            moe_step.write_checkpoint(Path(folder))
            seconds = on_ranks(moe_step.step_seconds, folder, sizes)[0]
            free = seconds.pop(moe_step.FREE)
            best = {
                who: min(
                    (name for name in seconds if name.startswith(who)), key=seconds.__getitem__
                )
                for who in ("native", "ours")
            }
            memory = {}  # of the fastest of each, in processes of their own
            for who, name in best.items():
                ep = moe_step.ep_of(name)
                found = on_ranks(moe_step.step_memory, folder, sizes, ep, who == "ours")
                memory[who] = list(zip(*found, strict=True))
        peak = {who: max(found[0]) for who, found in memory.items()}
        kept = {who: sum(found[1]) for who, found in memory.items()}
        recomputed = sum(memory["ours"][2])
        return ratio(
            seconds[best["native"]] / seconds[best["ours"]],
            "native transformers, its best implementation",
            f"{layout}: {moe_step.DEFAULT}",
            seconds={name: round(value, 3) for name, value in seconds.items()},
            bound=seconds[best["native"]] / free,
            activation_ratio=kept["ours"] / kept["native"],
            activation_MB=[round(kept[who] / 8e6, 1) for who in best],
            activation_ratio_recompute=recomputed / kept["native"],
            rss_ratio=peak["ours"] / peak["native"],
            rss_MB=[round(peak[who] / 1e6) for who in best],
        )

    return step_speedup


for _ep in (8, 4, 2):
    _layer_figures(_ep)
for _layout in ("tp8", "tp4_fsdp2", "tp2_fsdp4", "fsdp8"):
    FIGURES[f"step_speedup_{_layout}"] = _step_figure(_layout)
FIGURES.update(estimate_figures.figures())


def _checkpoint_figures() -> None:
    import checkpoint_figures
    import loss_curves
    import random_kills

    full = "--full" in sys.argv
    for name, function in {**checkpoint_figures.FIGURES, **random_kills.FIGURES}.items():
        FIGURES[name] = _named(function, full)
    FIGURES["loss_curves"] = _named(loss_curves.loss_curves, full)


_checkpoint_figures()


def rounded(value: Any) -> Any:
    """Floats to four places, tiny ones as they are."""
    return round(value, 4) if isinstance(value, float) and abs(value) > 1e-3 else value


def plain(value: Any) -> str:
    """A value as the page tells it: without quotes, brackets around what is inside."""
    if isinstance(value, list):
        return " and ".join(map(plain, value))
    if not isinstance(value, dict):
        return str(value)
    inner = {k: f"({plain(v)})" if isinstance(v, dict | list) else v for k, v in value.items()}
    return ", ".join(f"{k} {v}" for k, v in inner.items())


def write_page(found: list[dict[str, Any]]) -> None:
    """Put figures into the table of docs/performance.md; rows of the others are kept."""
    page = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
    text = page.read_text(encoding="utf-8")
    head, mark, rest = text.partition(TABLE)
    rows = {row.split("`")[1]: row for row in rest.splitlines() if row.startswith("| `")}
    for figure in found:
        value, conditions = figure["value"], figure["conditions"]
        more = {k: v for k, v in figure.items() if k in TOLD}
        told = "; ".join([figure["reference"], *(f"{k}: {plain(v)}" for k, v in more.items())])
        date = time.strftime("%Y-%m-%d")
        rows[figure["name"]] = f"| `{figure['name']}` | {value} | {told} | {conditions} | {date} |"
    ordered = [rows[name] for name in FIGURES if name in rows]
    page.write_text(head + mark + "\n".join(ordered) + "\n", encoding="utf-8")


def measured(name: str) -> dict[str, Any]:
    """One figure, floats to four places."""
    return {"name": name} | {k: rounded(v) for k, v in FIGURES[name]().items()}


def main() -> None:
    """Print one figure, or the names of all; or measure all that compare, for the page."""
    names = [name for name in sys.argv[1:] if name != "--full"]
    if names == ["--list"]:
        for known, function in FIGURES.items():
            print(f"{known}: {(function.__doc__ or '').splitlines()[0]}")
    elif names[:1] == ["--all"] and set(names[1:]) <= set(FIGURES):
        for name in names[1:] or [n for n in FIGURES if n not in PLAIN]:
            found = measured(name)
            print(json.dumps(found), flush=True)
            write_page([found])
    elif len(names) == 1 and names[0] in FIGURES:
        print(json.dumps(measured(names[0])))
    else:
        sys.exit(
            "usage: python tools/figures.py NAME; --list names them; --all [NAME ...] measures those "
            "that compare, and puts them into docs/performance.md"
        )


if __name__ == "__main__":
    main()
