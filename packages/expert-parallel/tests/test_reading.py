"""Reading boxes of safetensors files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from expert_parallel import reading
from expert_parallel.lazy import LazyTensor
from expert_parallel.reading import CheckpointTensor, Readers, Tally


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(
        {
            "matrix": torch.arange(60.0).view(5, 12),
            "half": torch.arange(6).to(torch.bfloat16),
            "scalar": torch.tensor(7),
            "empty": torch.zeros(0, 3),
        },
        path,
    )
    return path


def test_a_box_is_read_and_its_bytes_are_counted(file: Path) -> None:
    tally = Tally()
    with safe_open(file, "pt") as opened:
        source = LazyTensor(CheckpointTensor(opened.get_slice("matrix"), tally))
        out = torch.empty(2, 5)
        source.read((((1, 3),), ((0, 2), (6, 9))), out)
    expected = torch.arange(60.0).view(5, 12)[1:3, [0, 1, 6, 7, 8]]
    assert torch.equal(out, expected)
    assert tally.bytes == 2 * 5 * 4


def test_large_blocks_are_read_in_pieces(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE", 100)  # two rows of 48 bytes
    sizes = []
    tally = Tally()
    monkeypatch.setattr(tally, "add", lambda part: sizes.append(part.numel() * 4))
    with safe_open(file, "pt") as opened:
        source = LazyTensor(CheckpointTensor(opened.get_slice("matrix"), tally))
        out = torch.empty(5, 12)
        source.read((((0, 5),), ((0, 12),)), out)
    assert torch.equal(out, torch.arange(60.0).view(5, 12))
    assert sizes == [96, 96, 48]


@pytest.mark.parametrize("name", ["half", "scalar", "empty"])
def test_other_dtypes_and_shapes(file: Path, name: str) -> None:
    with safe_open(file, "pt") as opened:
        expected = opened.get_tensor(name)
        source = LazyTensor(CheckpointTensor(opened.get_slice(name), Tally()))
        assert (source.shape, source.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(source.node.whole(torch.device("cpu")), expected)


def test_what_was_read_outlives_the_file(file: Path) -> None:
    with safe_open(file, "pt") as opened:
        source = LazyTensor(CheckpointTensor(opened.get_slice("matrix"), Tally()))
        out = torch.empty(5, 12)
        source.read((((0, 5),), ((0, 12),)), out)
    file.write_bytes(b"\0" * file.stat().st_size)  # in place: a mapped page would show it
    assert torch.equal(out, torch.arange(60.0).view(5, 12))


def test_readers_fill_and_tell_the_first_error(file: Path) -> None:
    with safe_open(file, "pt") as opened:
        source = LazyTensor(CheckpointTensor(opened.get_slice("matrix"), Tally()))
        outs = [torch.empty(1, 12) for _ in range(5)]
        readers = Readers()
        for row, out in enumerate(outs):
            readers.fill(out, source, (((row, row + 1),), ((0, 12),)))
        readers.finish()
        assert torch.equal(torch.cat(outs), torch.arange(60.0).view(5, 12))

        readers = Readers()
        readers.fill(torch.empty(1, 7), source, (((0, 1),), ((0, 12),)))
        with pytest.raises(RuntimeError, match="size"):
            readers.finish()
