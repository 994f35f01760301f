"""Lazy tensors: operations on them give what they give on real ones, and read no more than needed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_plans.boxes import Box, lengths, numel
from expert_parallel.lazy import Constant, LazyTensor, Node, by_row, materialize


class Counted(Node):
    """A tensor in memory that counts the elements read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.tensor, self.read_elements = tensor, 0

    def read(self, box: Box, out: torch.Tensor) -> None:
        self.read_elements += numel(box)
        Constant(self.tensor).read(box, out)


def lazy(*tensors: torch.Tensor) -> tuple[list[LazyTensor], list[Counted]]:
    nodes = [Counted(tensor) for tensor in tensors]
    return [LazyTensor(node) for node in nodes], nodes


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def random_box(shape: torch.Size, rng: random.Random) -> Box:
    box = []
    for size in shape:
        cuts = sorted(rng.sample(range(size + 1), min(size + 1, 4)))
        box.append(tuple((cuts[i], cuts[i + 1]) for i in range(0, len(cuts) - 1, 2)))
    return tuple(box)


def taken(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, intervals in enumerate(box):
        parts = [tensor.narrow(dim, low, high - low) for low, high in intervals]
        tensor = torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)
    return tensor


def gate_up(*parts: torch.Tensor) -> torch.Tensor:
    half = len(parts) // 2
    return torch.cat([torch.stack(parts[:half]), torch.stack(parts[half:])], dim=1)


def interleaved(tensor: torch.Tensor) -> torch.Tensor:
    shape = tensor.shape
    split = tensor.reshape(shape[0], shape[1] // 2, 2, shape[2])
    return split.transpose(1, 2).reshape(shape).contiguous()


# Each as the weight conversions of some model families do it.
OPERATIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "merge experts": (gate_up, [(3, 5)] * 8),
    "chunk": (lambda t: torch.chunk(t, 3, 0), [(10, 4)]),
    "split": (lambda t: torch.split(t, [2, 5, 3], 0), [(10, 4)]),
    "transpose": (lambda t: torch.transpose(t, 1, 2).contiguous(), [(3, 4, 5)]),
    "t": (lambda t: t.T, [(7, 3)]),
    "permute": (lambda t: t.permute(2, 0, 1), [(3, 4, 5)]),
    "interleave": (interleaved, [(3, 8, 5)]),
    "rope": (lambda t: t.view(2, 4, 2, 5).transpose(1, 2).reshape(16, 5), [(16, 5)]),
    "split experts": (lambda t: [c.squeeze(0) for c in torch.chunk(t, 4, 0)], [(4, 3, 5)]),
    "unbind": (lambda t: t.unbind(1), [(4, 3)]),
    "cast": (lambda t: t.unsqueeze(1).to(torch.bfloat16).float(), [(4, 3)]),
    "narrow": (lambda t: torch.narrow(t, 1, 1, 2)[1:3, None], [(4, 3)]),
    "strided": (lambda t: t[::2], [(7, 3)]),
    "indexed": (lambda t: t[:, [0, 2]].flatten(0, 1), [(4, 3, 5)]),
    "padded": (lambda t: torch.cat([t, t.new_zeros(2, 3)], 0), [(4, 3)]),
    "arithmetic": (lambda t, s: t * s[:, None] + 1, [(4, 3), (4,)]),
    "clone": (lambda t: t.clone().detach(), [(4, 3)]),
    "scalar": (lambda t: t * 2, [()]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_lazy_tensors_is_the_operation(name: str) -> None:
    operation, shapes = OPERATIONS[name]
    tensors = [numbers(*shape) + 100 * i for i, shape in enumerate(shapes)]
    expected, found = operation(*tensors), operation(*lazy(*tensors)[0])
    pairs = (
        [(expected, found)]
        if isinstance(expected, torch.Tensor)
        else list(zip(expected, found, strict=True))
    )
    rng = random.Random(0)
    for real, made in pairs:
        assert isinstance(made, LazyTensor)
        assert (made.shape, made.dtype) == (real.shape, real.dtype)
        assert torch.equal(materialize(made), real)
        for _ in range(10):
            box = random_box(real.shape, rng)
            out = torch.full(lengths(box), torch.nan)
            made.read(box, out)
            assert torch.equal(out, taken(real.float(), box))


def test_reading_two_experts_of_eight_reads_these() -> None:
    tensors, nodes = lazy(*[numbers(6, 4) for _ in range(16)])
    made = gate_up(*tensors)
    out = torch.empty(2, 12, 4)
    made.read((((2, 4),), ((0, 12),), ((0, 4),)), out)
    assert [node.read_elements for node in nodes] == [0, 0, 24, 24, 0, 0, 0, 0] * 2


def test_a_packed_shard_of_merged_experts_reads_its_rows() -> None:
    tensors, nodes = lazy(*[numbers(6, 4) for _ in range(16)])
    out = torch.empty(8, 4, 4)
    gate_up(*tensors).read((((0, 8),), ((2, 4), (8, 10)), ((0, 4),)), out)
    assert {node.read_elements for node in nodes} == {8}


def test_a_fused_projection_reads_the_head_rows_of_each_part() -> None:
    (fused,), (node,) = lazy(numbers(12, 5))
    query, key, value = torch.chunk(fused, 3, 0)
    for part, start in ((query, 0), (key, 4), (value, 8)):
        out = torch.empty(2, 5)
        part.read((((2, 4),), ((0, 5),)), out)
        assert torch.equal(out, node.tensor[start + 2 : start + 4])
    assert node.read_elements == 3 * 2 * 5


def test_an_interleaved_expert_weight_is_read_by_expert() -> None:
    (fused,), (node,) = lazy(numbers(8, 6, 5))
    out = torch.empty(2, 6, 3)
    interleaved(fused).read((((4, 6),), ((0, 6),), ((1, 4),)), out)
    assert node.read_elements == 2 * 6 * 3
    assert torch.equal(out, interleaved(node.tensor)[4:6, :, 1:4])


def test_a_cast_in_between_rounds() -> None:
    value = torch.tensor([1.0 + 2**-12])
    made = LazyTensor(Constant(value)).to(torch.bfloat16).to(torch.float32)
    assert materialize(made).item() == 1.0


def test_an_operation_in_place_reads_at_once() -> None:
    (source,), _ = lazy(numbers(2, 3))
    target = torch.zeros(2, 3)
    target[:] = source
    assert torch.equal(target, numbers(2, 3))
    assert source.sum().item() == 15.0


def test_a_function_of_rows_reads_the_rows() -> None:
    (first, second), nodes = lazy(numbers(6, 4), numbers(6))
    made = by_row(lambda a, b: (a * b[:, None]).t().contiguous().t(), first, second)
    assert made.shape == (6, 4)
    out = torch.empty(3, 2)
    made.read((((1, 2), (4, 6)), ((1, 3),)), out)
    whole = numbers(6, 4) * numbers(6)[:, None]
    assert torch.equal(out, whole[[1, 4, 5], 1:3])
    assert [node.read_elements for node in nodes] == [3 * 4, 3]


def test_meta_output_goes_the_same_way_without_data() -> None:
    tensors, nodes = lazy(*[numbers(6, 4) for _ in range(4)])
    made = interleaved(gate_up(*tensors)) * 2
    made.read((((0, 1),), ((0, 12),), ((0, 4),)), torch.empty(1, 12, 4, device="meta"))
    assert {node.read_elements for node in nodes} == {24}
