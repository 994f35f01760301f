"""A program that communicates until its last line ends without an abort."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
import torch.distributed as dist
from ep_mesh import Layout, ParallelMesh


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=mesh.group("fsdp"))
        return grad


mesh = ParallelMesh(Layout(fsdp=4))
for _ in range(3):
    Reduce.apply(torch.ones(1000, requires_grad=True)).sum().backward()
"""


def test_a_last_collective_does_not_abort_the_exit(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for _ in range(3):  # without the pause, about every second run aborts
        done = subprocess.run(
            [*command, "--nproc-per-node=4", str(file)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
