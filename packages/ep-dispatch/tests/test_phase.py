"""An error of a collective names the rank, the group, the layer and the phase; a full memory its rows."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ep_dispatch import AllReduce, AllToAll
from ep_dispatch.phase import Phase

PHASES = {
    AllToAll: ["counts", "slots", "dispatch", "combine", "combine, in backward"],
    AllReduce: ["combine", "dispatch, in backward"],
}


@pytest.mark.parametrize("kind", PHASES, ids=lambda kind: kind.__name__)
def test_a_rank_that_stays_away(ranks, moe, kind):
    """The other's timeout tells where it waited, in forward and backward."""
    phases, tp = PHASES[kind], 2 if kind is AllReduce else 1

    def run(rank):
        notes = []
        for stops in phases:
            # A group of its own, since a timeout ends it; it knows itself how long to wait.
            group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
            experts = moe.Experts(4).double()
            tp_group = {"tp_group": group} if tp == 2 else {}
            implementation = kind(experts, num_local_experts=4, ep_group=group, **tp_group)
            implementation.layer = "model.layers.7.mlp.experts"
            _, inputs = moe.whole_inputs(moe.Case(world=2, ep=2, tp=tp, tokens=(5, 4)))
            hidden, ids, weights, cotangent = inputs[rank // tp]
            if rank == 1:
                enter = Phase.__enter__

                def leave(phase, stops=stops, enter=enter):
                    if phase.name == stops:
                        raise InterruptedError
                    enter(phase)

                Phase.__enter__ = leave
            try:
                out = implementation(hidden.requires_grad_(), ids, weights.requires_grad_())
                out.backward(cotangent)
            except InterruptedError:
                notes.append(None)
            except RuntimeError as error:
                notes.append(" ".join(error.__notes__))
            finally:
                if rank == 1:
                    Phase.__enter__ = enter
            dist.barrier()
        return notes

    waited, _ = ranks.run(run, world=2)
    for phase, note in zip(phases, waited, strict=True):
        assert f"phase: {phase}." in note
        assert "rank 0, in the EP group of ranks [0, 1], layer model.layers.7.mlp.experts" in note


def test_a_layer_without_a_name():
    with pytest.raises(ValueError, match="lost") as caught, Phase("dispatch"):
        raise ValueError("lost")
    (note,) = caught.value.__notes__
    assert "the only rank, layer (not named), phase: dispatch." in note


@pytest.mark.parametrize("settings", [{}, {"num_chunks": 2}, {"max_rows": 4}], ids=str)
def test_a_full_memory_tells_how_many_rows_came(ranks, moe, settings):
    """All tokens go to the first rank, whose experts then find no memory."""

    def run(rank):
        class Large(moe.Experts):
            def forward(self, rows, ids, weights):
                raise torch.OutOfMemoryError("CUDA out of memory.")

        implementation = AllToAll(
            Large(4).double(), num_local_experts=4, ep_group=dist.group.WORLD, **settings
        )
        implementation.layer = "model.layers.7.mlp.experts"
        case = moe.Case(world=2, ep=2, tp=1, tokens=(5, 4), routing="first")
        hidden, ids, weights, _ = moe.whole_inputs(case)[1][rank]
        warns = pytest.warns() if "max_rows" in settings else moe.nullcontext()
        with warns, pytest.raises(torch.OutOfMemoryError) as caught:
            implementation(hidden, ids, weights)
        return " ".join(caught.value.__notes__)

    first, second = ranks.run(run, world=2)
    assert "layer model.layers.7.mlp.experts: 9 rows for 27 slots came to rank 0" in first
    assert "which sent 5 rows itself" in first
    assert "0 rows for 0 slots came to rank 1" in second
