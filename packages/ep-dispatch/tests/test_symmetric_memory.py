import pytest
import torch

NAME = "symmetric_memory"


@pytest.mark.parametrize(("world", "ep", "tp"), [(2, 2, 1), (4, 4, 1), (4, 4, 2), (4, 2, 2), (4, 2, 1)])
def test_equals_one_process(ranks, moe, world, ep, tp):
    cases = [
        moe.Case(name=NAME, world=world, ep=ep, tp=tp, tokens=tokens[: world // tp], routing=routing)
        for routing in ("random", "one", "repeated", "first", "skipped")
        for tokens in ((13, 6, 0, 11),)
    ]
    ranks.run(moe.check_all, cases, world=world)
