"""EP equals one process: every legal layout, even and uneven, sparse and dense routing."""

import pytest
import torch

LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (3, 3, 3), (4, 4, 2), (5, 5, 1), (6, 6, 3), (7, 7, 7)] + [
    (8, ep, tp) for tp in (1, 2, 4, 8) for ep in (1, 2, 4, 8) if ep % tp == 0
]  # fmt: skip


NAMES = ["all_to_all", "auto", "all_reduce"]


@pytest.mark.parametrize(
    ("name", "world", "ep", "tp"),
    [
        (n, *layout)
        for n in NAMES
        for layout in LAYOUTS
        if n != "all_reduce" or layout[1] == layout[2]
    ],
)
def test_equals_one_process(ranks, moe, name, world, ep, tp):
    tokens = [13, 6, 9, 1, 4, 17, 3, 8]
    case = moe.Case(world=world, ep=ep, tp=tp, name=name, experts=2 * ep, top_k=2,
                    tokens=tuple(tokens[: world // tp]))  # fmt: skip
    ranks.run(moe.check, case, world=world)


@pytest.mark.parametrize("name", ["all_to_all", "all_reduce"])
def test_routing(ranks, moe, name):
    """Whatever the router chooses: one expert for all, repeated ids, skipped slots, K = 1 to E."""
    tp, tokens = (2, (13, 6, 9, 11)) if name == "all_to_all" else (4, (13, 6))
    cases = [
        moe.Case(name=name, tp=tp, tokens=tokens, routing=routing)
        for routing in ("one", "repeated", "first", "skipped")
    ]
    cases += [moe.Case(name=name, tp=tp, tokens=tokens, top_k=k) for k in range(1, 9)]
    ranks.run(moe.check_all, cases)


def test_few_tokens(ranks, moe):
    """Slices that are short, empty or all empty: decoding, a batch without tokens, none at all."""
    cases = [
        moe.Case(ep=ep, tp=tp, tokens=tokens[: 8 // tp], sequence_parallel=sp)
        for ep, tp in ((4, 2), (8, 2), (8, 8), (8, 1), (4, 4))
        for tokens in ((1,) * 8, (0, 3, 0, 1, 0, 0, 2, 0), (0,) * 8, (5, 0, 7, 9, 3, 3, 3, 3))
        for sp in (False, True)
    ]
    cases += [moe.Case(name="all_reduce", ep=4, tp=4, tokens=t) for t in ((1, 1), (0, 1), (0, 0))]
    ranks.run(moe.check_all, cases, timeout=120)


def test_frozen_parts(ranks, moe):
    """Any subset of hidden states, routing weights and experts may need a gradient."""
    subsets = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]
    cases = [
        moe.Case(name=name, ep=ep, tp=tp, tokens=(7, 2, 0, 5)[: 8 // tp], routing=routing,
                 hidden_grad=a, weights_grad=b, experts_grad=c)
        for a, b, c in subsets
        for name, ep, tp in (("all_to_all", 4, 2), ("all_to_all", 4, 4), ("all_reduce", 4, 4))
        for routing in ("random", "first")
    ]  # fmt: skip
    ranks.run(moe.check_all, cases, timeout=120)


def test_parts_frozen_on_some_ranks_only(ranks, moe):
    """Ranks whose tensors need no gradient still take part in the backward of those that do."""
    cases = [
        moe.Case(ep=ep, tp=tp, tokens=(7, 2, 0, 5, 3, 1, 4, 6)[: 8 // tp], routing=routing,
                 hidden_grad=hidden, experts_grad=experts, frozen_batches=batches, frozen_ranks=frozen)
        for ep, tp in ((8, 2), (4, 1), (4, 2))
        for batches, frozen in (((0, 3), ()), ((1,), (0, 2, 3)), ((0, 1, 2, 3), (0, 1, 6, 7)))
        for hidden, experts in ((True, True), (False, True), (True, False))
        for routing in ("random", "first")
    ]  # fmt: skip
    ranks.run(moe.check_all, cases, timeout=120)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(ranks, moe, dtype):
    """Each dtype to its rounding, with routing weights of the same dtype and in float32."""
    cases = [
        moe.Case(
            name=name, ep=4, tp=tp, dtype=dtype, weights_dtype=wide, tokens=(19, 8, 3, 6)[: 8 // tp]
        )
        for name, tp in (("all_to_all", 2), ("all_reduce", 4))
        for wide in (None, torch.float32)
    ]
    ranks.run(moe.check_all, cases)
