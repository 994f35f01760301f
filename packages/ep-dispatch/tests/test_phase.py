"""An error of a collective names the rank, the group, the layer and the phase."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from ep_dispatch import AllToAll
from ep_dispatch.phase import Phase

PHASES = ["counts", "slots", "dispatch", "combine", "combine, in backward"]


def test_a_rank_that_stays_away(ranks, moe):
    """The other's timeout tells where it waited, in forward and backward."""

    def run(rank):
        notes = []
        for stops in PHASES:
            # A group of its own, since a timeout ends it; it knows itself how long to wait.
            group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
            experts = moe.Experts(4).double()
            implementation = AllToAll(experts, num_local_experts=4, ep_group=group)
            implementation.layer = "model.layers.7.mlp.experts"
            _, inputs = moe.whole_inputs(moe.Case(world=2, ep=2, tp=1, tokens=(5, 4)))
            hidden, ids, weights, cotangent = inputs[rank]
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
    assert len(waited) == len(PHASES)
    for phase, note in zip(PHASES, waited, strict=True):
        assert f"phase: {phase}." in note
        assert "rank 0, in the EP group of ranks [0, 1], layer model.layers.7.mlp.experts" in note


def test_a_layer_without_a_name():
    with pytest.raises(ValueError, match="lost") as caught, Phase("dispatch"):
        raise ValueError("lost")
    (note,) = caught.value.__notes__
    assert "the only rank, layer (not named), phase: dispatch." in note
