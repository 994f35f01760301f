"""One rank's error is everyone's."""

from __future__ import annotations

from ep_testing import RankPool
from expert_parallel.agreement import OtherRankError, all_or_none


def outcome(rank: int, failing: int | None) -> str:
    try:
        with all_or_none("Reading"):
            if rank == failing:
                raise OSError("disk on fire")
    except (OSError, OtherRankError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_all_ranks_raise_if_one_does(ranks: RankPool) -> None:
    told = ranks.run(outcome, 2, world=4)
    assert told[2] == "OSError: disk on fire"
    others = {told[0], told[1], told[3]}
    assert others == {"OtherRankError: Reading failed on rank 2: OSError: disk on fire"}


def test_nobody_raises_if_none_does(ranks: RankPool) -> None:
    assert ranks.run(outcome, None, world=4) == ["fine"] * 4


def test_a_single_process_raises_its_own() -> None:
    assert outcome(0, 0) == "OSError: disk on fire"
