"""Wrong inputs and layouts: an error that says what, on every rank, and no rank left waiting."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from ep_dispatch import AllReduce, AllToAll, Auto, EPImplementation, EPImplementationInterface

X, IDS, W = torch.zeros(5, 8), torch.zeros(5, 2, dtype=torch.long), torch.zeros(5, 2)

WRONG = {
    "hidden_states must be .T, H.* got float32 .1, 5, 8.": (X[None], IDS, W),
    "hidden_states must be .* got int64": (X.long(), IDS, W),
    "top_k_index must be .T, K. with K >= 1": (X, IDS[:, 0], W[:, 0]),
    "top_k_index must be .* got int64 .5, 0.": (X, IDS[:, :0], W[:, :0]),
    "top_k_index must hold int64 or int32 expert ids, got float32": (X, W, W),
    "top_k_weights must have the shape of top_k_index": (X, IDS, W[:, :1]),
    "top_k_weights must be float64, float32": (X, IDS, IDS),
    "one row per token": (X[:4], IDS, W),
    "global expert ids 0 to 3 .* from 0 to 4": (X, IDS + torch.arange(5)[:, None], W),
    "global expert ids 0 to 3 .* from -2 to -2": (X, IDS - 2, W),
    "on one device": (X, IDS.to("meta"), W.to("meta")),
    "must be tensors .T, K., got list": (X, [[0, 1]] * 5, W),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("kind", [AllToAll, AllReduce, Auto])
def test_wrong_inputs(kind, message):
    implementation = kind(lambda rows, ids, weights: rows, num_local_experts=4)
    with pytest.raises(ValueError, match=message):
        implementation(*WRONG[message])


def test_one_rank_is_wrong(ranks, moe):
    """The rank says why, the others say which rank; nobody hangs, and the group still works."""

    def run(rank, message):
        case = moe.Case(tp=1, ep=8, tokens=(5,) * 8, experts=32, top_k=2, dtype=torch.float32)
        implementation, _ = moe.build(case, rank)
        x, ids, w = WRONG[message] if rank == 3 else (X, IDS, W)
        if rank == 3 and "global" in message:
            ids = ids + 28 if "0 to 4" in message else ids
        with pytest.raises(
            ValueError if rank == 3 else RuntimeError,
            match=message.replace("0 to 3", "0 to 31").replace("0 to 4", "28 to 32")
            if rank == 3
            else r"ranks \[3\] of the EP group refused",
        ):
            implementation(x, ids, w)
        assert implementation(X, IDS, W).shape == (5, 8)

    for message in WRONG:
        if "device" not in message:
            ranks.run(run, message)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("all_to_all", ({"wire_dtype": torch.bfloat16}, {})),
        ("all_to_all", ({"max_rows": 4}, {})),
        ("all_to_all", ({"max_rows": 4}, {"max_rows": 9})),
        ("symmetric_memory", ({"max_rows_per_pair": 4}, {})),
    ],
)
def test_ranks_with_different_settings(ranks, name, settings):
    def run(rank):
        layer = EPImplementationInterface.get(name)(
            lambda rows, ids, weights: rows,
            num_local_experts=2,
            ep_group=dist.group.WORLD,
            **settings[rank],
        )
        with pytest.raises(RuntimeError, match="must have one wire_dtype and one bound on rows"):
            layer(X, IDS, W)

    ranks.run(run, world=2)


def test_ranks_that_do_not_fit_together(ranks, moe):
    def run(rank):
        case = moe.Case(tp=2, ep=4, dtype=torch.float32)
        implementation, _ = moe.build(case, rank)
        odd = rank % 4 == 1
        with pytest.raises(
            RuntimeError, match="ranks that share a batch must hold the same tokens"
        ):
            implementation(X[: 5 - odd], IDS[: 5 - odd], W[: 5 - odd])
        with pytest.raises(RuntimeError, match="one width and dtype"):
            implementation(X.to(torch.bfloat16 if odd else torch.float32), IDS, W)
        with pytest.raises(RuntimeError, match="one width and dtype"):
            implementation(X[:, : 8 - odd], IDS, W)
        with pytest.raises(RuntimeError, match="one width and dtype"):
            implementation(X, IDS, W.double() if odd else W)
        with torch.set_grad_enabled(odd), pytest.raises(RuntimeError, match="one grad mode"):
            implementation(X, IDS, W)

    ranks.run(run)


def test_layouts_that_do_not_fit(ranks, moe):
    def run(rank):
        for case in (moe.Case(name="all_reduce", ep=4, tp=2),
                     moe.Case(name="all_reduce", ep=4, tp=4, sequence_parallel=True)):  # fmt: skip
            with pytest.raises(ValueError, match=r"same batch \(ep_size == tp_size.*all_to_all"):
                moe.build(case, rank)
        with pytest.raises(ValueError, match="must lie in one EP group"):
            moe.build(moe.Case(ep=2, tp=4), rank)
        with pytest.raises(ValueError, match="must lie in one EP group"):
            moe.build(moe.Case(ep=1, tp=4), rank)

    ranks.run(run)


def test_experts_that_give_back_the_wrong_shape():
    implementation = AllToAll(lambda rows, ids, weights: rows[:, :4], num_local_experts=4)
    with pytest.raises(ValueError, match=r"one row of output per row of input, \[10, 8\]"):
        implementation(X, IDS, W)


def test_low_level_shapes():
    implementation = AllToAll(lambda rows, ids, weights: rows, num_local_experts=4)
    plan = implementation.prepare(IDS, W)
    with pytest.raises(ValueError, match=r"\[5, H\], one row for each token that the plan"):
        implementation.dispatch(X[:4], plan)
    received, ticket = implementation.dispatch(X, plan)
    with pytest.raises(ValueError, match=r"\[5, 8\], got \[4, 8\]"):
        implementation.combine(received.rows[:4], ticket)


def test_number_of_experts():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        AllToAll(lambda rows, ids, weights: rows, num_local_experts=0)


def test_registry():
    class Mine(AllToAll):
        pass

    names = EPImplementationInterface.names()
    assert names[:6] == [
        "auto",
        "all_to_all",
        "all_to_all_hierarchical",
        "all_reduce",
        "deepgemm_megamoe",
        "symmetric_memory",
    ]
    EPImplementationInterface.register("mine", Mine)
    assert EPImplementationInterface.get("mine") is Mine
    EPImplementationInterface.register("mine", AllReduce)
    assert EPImplementationInterface.get("mine") is AllReduce
    with pytest.raises(
        ValueError, match=r"'all_too_all'.*known are 'auto'.*did you mean 'all_to_all'"
    ):
        EPImplementationInterface.get("all_too_all")
    with pytest.raises(ValueError, match="built-in"):
        EPImplementationInterface.register("all_to_all", Mine)
    with pytest.raises(TypeError, match="subclass of EPImplementation"):
        EPImplementationInterface.register("other", Mine(lambda *a: a[0], num_local_experts=1))
    with pytest.raises(NotImplementedError, match="override `forward`"):
        EPImplementation(lambda *a: a[0], num_local_experts=1)(X, IDS, W)


def test_an_implementation_is_pickled_and_copied():
    for name in ("all_to_all", "auto", "all_reduce", "symmetric_memory"):
        experts = torch.nn.Linear(8, 8)
        implementation = EPImplementationInterface.get(name)(experts.forward, num_local_experts=2)
        assert copy.deepcopy(implementation).num_local_experts == 2
        assert pickle.loads(pickle.dumps(implementation)).num_local_experts == 2


def test_ids_on_another_device_are_refused_by_all(ranks, moe):
    """The refusal itself goes by the device of the group, not of the wrong tensor."""

    def run(rank):
        implementation, _ = moe.build(moe.Case(), rank)
        x, w = torch.zeros(4, 8, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
        ids = torch.zeros(4, 3, dtype=torch.int64, device="meta" if rank == 1 else "cpu")
        if rank < 4:  # the EP group of the guilty one
            with pytest.raises(ValueError if rank == 1 else RuntimeError):
                implementation(x, ids, w)

    ranks.run(run)
