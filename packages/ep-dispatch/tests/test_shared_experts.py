"""Shared experts beside the routed ones: called once, added, differentiated, while rows travel."""

import pytest
import torch

SETTINGS = [
    ("all_to_all", 2, ()),
    ("all_to_all", 2, (("num_chunks", 2),)),
    ("all_to_all", 1, (("max_rows", 4),)),
    ("all_to_all_hierarchical", 1, (("ranks_per_node", 2),)),
    ("auto", 4, ()),
    ("all_reduce", 4, ()),
]


@pytest.mark.filterwarnings("ignore:.*max_rows")
def test_added_to_the_output(ranks, moe):
    def run(rank, name, tp, settings):
        tokens = (7, 3, 2, 5)[: 4 // tp]
        case = moe.Case(world=4, ep=4, tp=tp, name=name, tokens=tokens, settings=settings)
        whole, inputs = moe.whole_inputs(case)
        implementation, _ = moe.build(case, rank, whole)
        hidden, ids, weights, cotangent = inputs[rank // tp]
        torch.manual_seed(3)
        shared = torch.nn.Linear(8, 8, dtype=torch.float64)
        calls = []

        def forward(x):
            calls.append(x.shape)
            return shared(x)

        leaves = [hidden.requires_grad_(), weights.requires_grad_(), *shared.parameters()]
        out = implementation(hidden, ids, weights, shared_experts=forward)
        found = torch.autograd.grad(out, leaves, cotangent)
        assert calls == [hidden.shape]
        reference = moe.reference(whole, hidden, ids, weights) + shared(hidden)
        expected = torch.autograd.grad(reference, leaves, cotangent)
        assert moe.error(out, reference) < 1e-12
        for mine, theirs in zip(found, expected, strict=True):
            assert moe.error(mine, theirs) < 1e-12
        with torch.no_grad():
            out = implementation(hidden, ids, weights, shared_experts=forward)
        assert moe.error(out, reference) < 1e-12

    for name, tp, settings in SETTINGS:
        ranks.run(run, name, tp, settings, world=4)


@pytest.mark.parametrize("chunks", [1, 2])
def test_runs_while_rows_travel(ranks, moe, chunks):
    """Between the start of the first exchange of rows and its end."""

    def run(rank):
        case = moe.Case(world=2, ep=2, tp=1, tokens=(5, 4), settings=(("num_chunks", chunks),))
        implementation, _ = moe.build(case, rank)
        _, inputs = moe.whole_inputs(case)
        events = []

        def shared(x):
            events.append("shared")
            return x

        with moe.exchanges(events):
            implementation(*inputs[rank][:3], shared_experts=shared)
        rows = [event for event in events if not event.startswith("torch.")]
        assert rows[:3] == ["start", "shared", "end"]
        assert rows.count("shared") == 1

    ranks.run(run, world=2)


def test_wrong_shape(moe):
    case = moe.Case(world=1, ep=1, tp=1, tokens=(4,))
    implementation, _ = moe.build(case, 0)
    _, [(hidden, ids, weights, _)] = moe.whole_inputs(case)
    with pytest.raises(ValueError, match=r"row of output per token, \[4, 8\], got \[4, 1\]"):
        implementation(hidden, ids, weights, shared_experts=lambda x: x[:, :1])
