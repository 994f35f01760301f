"""`ep doctor` names everything that can or can't run here, and why."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch
import transformers
from typer.testing import CliRunner

from ep_dispatch import AllToAll, EPImplementationInterface
from expert_parallel.cli import app, doctor


def run(monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "400")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    return result.output


def test_versions_and_backends(monkeypatch):
    text = run(monkeypatch)
    assert re.search(rf"torch +{re.escape(torch.__version__)}", text)
    assert re.search(rf"transformers +{re.escape(transformers.__version__)}", text)
    assert re.search(r"gloo +yes", text)


def test_every_registered_implementation_is_named(monkeypatch):
    text = run(monkeypatch)
    for name in EPImplementationInterface.names():
        assert re.search(rf"{name} +(yes|no)", text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without a GPU says")
def test_what_cannot_run_says_why(monkeypatch):
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    text = run(monkeypatch)
    assert re.search(
        r"deepgemm_megamoe +no +a CUDA GPU of compute capability 10\.0.*deep_gemm", text
    )
    assert re.search(r"deep_gemm +no .*got cpu; deep_gemm cannot be imported", text)
    assert re.search(r"cuda +no +no GPU", text)
    assert re.search(r"nccl +no", text)


def test_mega_moe_with_the_chip_and_the_library(monkeypatch):
    library = types.ModuleType("deep_gemm")
    for name in (
        "fp8_fp4_mega_moe",
        "get_symm_buffer_for_mega_moe",
        "transform_sf_into_required_layout",
        "transform_weights_for_mega_moe",
    ):
        setattr(library, name, None)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    found = {finding.name: finding for finding in doctor.implementations()}
    assert found["deepgemm_megamoe"].works


def test_kernels_say_who_computes_and_why(monkeypatch):
    text = run(monkeypatch)
    assert re.search(r"bfloat16 on \w+ +yes +(grouped_mm|loop): ", text)
    assert re.search(r"float64 on \w+ +yes +loop: .*float64", text)


def test_an_implementation_of_ones_own_is_listed(monkeypatch):
    class Mine(AllToAll):
        pass

    EPImplementationInterface.register("mine_for_doctor", Mine)
    assert re.search(r"mine_for_doctor +yes +registered by you", run(monkeypatch))
