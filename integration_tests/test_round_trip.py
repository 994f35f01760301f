"""Loading and saving sharded gives back the files of a family, whatever its weight conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from ep_testing import RankPool
from expert_parallel import load_report, save_pretrained
from expert_parallel.loading import load

LAYOUT = {"tp_size": 2, "fsdp_size": 4, "ep_size": 2}  # legal with either generation of plans
# Conversions that cut, interleave, pad or reorder, and that rename only.
SAMPLE = (
    "Inkling2LoopTextConfig",
    "Inkling2TextConfig",
    "LaraMiniConfig",
    "SarvamMoEConfig",
    "JambaConfig",
    "Llama4TextConfig",
    "MiniMaxM2Config",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A sample of families; with `--all-layouts` all."""
    whole = metafunc.config.getoption("--all-layouts")
    names = [name for name in families.family_names() if whole or name in SAMPLE]
    metafunc.parametrize("name", names)


def round_trip(
    rank: int, model_class: Any, config: Any, source: str, target: str
) -> tuple[int, int]:
    """Load and save; the elements read, and the elements that this rank holds."""
    # Given, since some families share the model class of another one.
    model = load(model_class.from_pretrained, source, config=config, distributed_config=LAYOUT)
    save_pretrained(model, target)
    kept = {id(t): t for t in model.state_dict(keep_vars=True).values()}.values()
    held = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in kept)
    report = load_report(model)
    assert report is not None
    return report.bytes_read, held


def contents(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_the_files_come_back(ranks: RankPool, name: str, tmp_path: Path) -> None:
    model = families.build(name).model.to(torch.float32)
    model.save_pretrained(tmp_path / "first")
    # Once through transformers: it may drop or cast what the tiny model had.
    cls, config = type(model), model.config
    cls.from_pretrained(tmp_path / "first", config=config).save_pretrained(tmp_path / "plain")
    source, target = str(tmp_path / "plain"), str(tmp_path / "ours")
    costs = ranks.run(round_trip, cls, config, source, target)
    expected, found = contents(tmp_path / "plain"), contents(tmp_path / "ours")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
    # 4 bytes an element; an interleaved or padded weight may be read whole.
    assert all(read <= 1.1 * 4 * held for read, held in costs)
