"""Files written piece by piece are files that safetensors reads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ep_plans import safetensors_file
from ep_plans.safetensors_file import FileWriter, flush, layout, row_pieces

TENSORS = {
    "bool": torch.tensor([True, False, True]),
    "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
    "float8": torch.randn(3, 5).to(torch.float8_e4m3fn),
    "double": torch.randn(2, 2, dtype=torch.float64),
    "long": torch.arange(7),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 4),
    "transposed": torch.randn(3, 4).t(),
}


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with FileWriter(path, TENSORS, {"format": "pt"}) as writer:
        for name in layout(TENSORS):
            writer.write(TENSORS[name])
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert {*opened.keys()} == {*TENSORS}
        for name, tensor in TENSORS.items():
            found = opened.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(found.double(), tensor.double()), name


def test_a_tensor_in_pieces_is_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensor = torch.randn(10, 3)
    with FileWriter(path, {"t": tensor}, {}) as writer:
        rows = list(row_pieces(tensor.shape, 4, limit=40))
        assert rows == [(0, 3), (3, 6), (6, 9), (9, 10)]
        for start, end in rows:
            writer.write(tensor[start:end])
    with safe_open(path, "pt") as opened:
        assert torch.equal(opened.get_tensor("t"), tensor)


def test_rows_larger_than_the_limit_go_one_by_one() -> None:
    assert list(row_pieces((3, 100), 4, limit=10)) == [(0, 1), (1, 2), (2, 3)]


def test_wide_tensors_lie_aligned() -> None:
    assert layout(TENSORS)[:2] == ["double", "long"]
    first = safetensors_file.header(TENSORS, {})
    assert len(first) % 8 == 0


def test_a_full_disk_is_told_before_data_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        FileWriter(tmp_path / "a.safetensors", TENSORS, {})


def test_a_file_system_without_reservation_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with FileWriter(tmp_path / "a.safetensors", {"t": torch.ones(3)}, {}) as writer:
        writer.write(torch.ones(3))
    with safe_open(tmp_path / "a.safetensors", "pt") as opened:
        assert opened.get_tensor("t").sum() == 3


def test_a_dtype_without_a_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"t: safetensors files cannot hold torch.complex128"):
        FileWriter(tmp_path / "a", {"t": torch.zeros(2, dtype=torch.complex128)}, {})


@pytest.mark.parametrize(
    ("number", "told"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.EINVAL, False)]
)
def test_a_disk_that_fails_is_told_and_one_that_cannot_be_asked_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: bool
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if told:
        with pytest.raises(OSError, match=os.strerror(number)):
            flush(tmp_path)
    else:
        flush(tmp_path)
