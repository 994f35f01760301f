"""A MoE layer between two emulated nodes: two network namespaces of this machine, 4 ranks each.

They are joined by a virtual link of 1 Gbit/s. Needs root, and `ip` and `tc` (iproute2) on Linux. What is set
up is removed again.

    python tools/two_nodes.py        prints what `two_node_speedup` of tools/figures.py prints
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

RATE, REPEATS = "1gbit", 5
NODES = ("epnode0", "epnode1")
TIMEOUT = 240.0


def ip(*words: str) -> None:
    """Run `ip`, and tell what it says if it fails."""
    run = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"`ip {' '.join(words)}` failed: {run.stderr.strip()}")


@contextlib.contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Two namespaces and the link between them; gives their addresses."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        raise RuntimeError("two emulated nodes need Linux, root, and `ip` and `tc` (iproute2).")
    try:
        for node in NODES:
            ip("netns", "add", node)
        ip("link", "add", "eplink0", "netns", NODES[0], "type", "veth",
           "peer", "name", "eplink1", "netns", NODES[1])  # fmt: skip
        addresses = []
        for number, node in enumerate(NODES):
            inside = ("netns", "exec", node)
            ip(*inside, "ip", "link", "set", "lo", "up")
            ip(*inside, "ip", "addr", "add", f"10.211.0.{number + 1}/24", "dev", f"eplink{number}")
            ip(*inside, "ip", "link", "set", f"eplink{number}", "up")
            ip(*inside, "tc", "qdisc", "add", "dev", f"eplink{number}", "root", "tbf",
               "rate", RATE, "burst", "128kb", "latency", "50ms")  # fmt: skip
            addresses.append(f"10.211.0.{number + 1}")
        yield addresses
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", node], capture_output=True, check=False)


def two_node_times() -> dict[str, dict[str, float]]:
    """Median seconds of forward and backward: transformers' all_to_all, ours, and in two hops.

    Of the whole "layer", and of the "exchange" alone, with experts that compute nothing.
    """
    with two_nodes() as addresses:
        ranks = []
        for number, node in enumerate(NODES):
            command = ["ip", "netns", "exec", node, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes=2", "--nproc-per-node=4", f"--node-rank={number}"]
            command += [f"--master-addr={addresses[0]}", "--master-port=29533", __file__, "rank"]
            env = os.environ | {"GLOO_SOCKET_IFNAME": f"eplink{number}", "OMP_NUM_THREADS": "1"}
            ranks.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        try:
            told = [rank.communicate(timeout=TIMEOUT) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(errors[-3000:] for _, errors in told))
    found: dict[str, dict[str, float]] = json.loads(told[0][0].splitlines()[-1])
    return found


class Nothing:
    """Experts that give back what they get."""

    num_experts = 0

    def forward(self, rows: Tensor, local_expert_ids: Tensor, weights: Tensor) -> Tensor:
        """As transformers calls experts."""
        return rows.clone()

    def grouped(self, rows: Tensor, *slots: Tensor) -> Tensor:
        """As ep-dispatch does."""
        return rows.clone()


def on_a_rank() -> None:
    """Measure, and print from rank 0."""
    sys.path.insert(0, str(Path(__file__).parent))
    import moe_layer
    from transformers.distributed.expert_parallel import AllToAllEP

    from ep_dispatch import AllToAll, HierarchicalAllToAll
    from ep_kernels import module_experts_forward

    dist.init_process_group("gloo")
    rank, sizes = dist.get_rank(), moe_layer.SMALL
    ep_mesh, tp_mesh = moe_layer.meshes(8)
    given = moe_layer.inputs(rank, sizes)
    module, nothing = moe_layer.experts_module(sizes, 8), Nothing()
    nothing.num_experts = sizes.experts // 8
    found = {}
    for kind, experts, forward in (
        ("layer", module, module_experts_forward(module)),
        ("exchange", nothing, nothing),
    ):
        settings: Any = {
            "num_local_experts": sizes.experts // 8,
            "ep_group": dist.group.WORLD,
            "experts": module,
        }
        layers: dict[str, Any] = {
            "transformers": AllToAllEP(experts, ep_mesh, tp_mesh),
            "all_to_all": AllToAll(forward, **settings),
            "all_to_all_hierarchical": HierarchicalAllToAll(forward, **settings),
        }
        work = [lambda f=f: moe_layer.step(module, f, given) for f in layers.values()]
        times = moe_layer.timed(rank, work, REPEATS)
        found[kind] = dict(zip(layers, times, strict=True))
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads must not outlive Python


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        on_a_rank()
    else:
        from figures import FIGURES

        print(json.dumps(FIGURES["two_node_speedup"]()))
