"""The examples run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def torchrun(name, ranks=4):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(EXAMPLES / name)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_moe_block():
    out = torchrun("moe_block.py")
    losses = [float(x) for x in re.findall(r"loss (\S+) on one", out)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert "equal; each rank holds" in out


def test_moe_block_gains_ep_in_about_ten_lines():
    code = (EXAMPLES / "moe_block.py").read_text()
    marked = [line for line in code.splitlines() if "# EP" in line]
    assert len(marked) <= 10


def test_my_ep():
    out = torchrun("my_ep.py")
    loads = [int(x) for x in re.findall(r"\d+", out)]
    assert len(loads) == 8
    assert sum(loads) == 4 * 10 * 2
