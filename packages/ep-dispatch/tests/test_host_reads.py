"""How often the host waits for a device. Counted on CPUs, by what would make it wait on a GPU.

While the host waits, nothing further is launched: not the next layer's all-gather, no shared expert.
"""

import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

# Read by Python from the memory of a CPU tensor, with no operator that a dispatch mode would see.
READS = {"tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__"}
TRAFFIC = {"alltoall_base_", "_allgather_base_"}
MAKERS = {"tensor", "as_tensor", "new_tensor", "from_numpy", "scalar_tensor"}


class Waits:
    """Names, in order, what would make the host wait; also all-to-alls, which would not.

    Of three kinds: values read in Python; operators whose output's values or shape depend on values
    (`item`, `nonzero`, a mask as an index, ...), which torch marks by tags; and copies between
    devices that are not declared non-blocking, from lists too.
    """

    def __init__(self):
        self.seen = []
        self.modes = _Functions(self.seen), _Operators(self.seen)

    def __enter__(self):
        for mode in self.modes:
            mode.__enter__()
        return self.seen

    def __exit__(self, *error):
        for mode in reversed(self.modes):
            mode.__exit__(*error)


class _Functions(TorchFunctionMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, blocking = getattr(func, "__name__", ""), not kwargs.get("non_blocking")
        places = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, str | torch.device)]
        moves = name in ("cpu", "cuda") or (name == "to" and places) or name == "new_tensor"
        makes = name in MAKERS and kwargs.get("device") is not None
        if name in READS or ((moves or makes) and blocking):
            self.seen.append(name)
            with torch._C.DisableTorchFunction():  # `item` reads by an operator too: one read
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if name == "index":
            depends = any(x is not None and x.dtype is torch.bool for x in args[1])
        elif name == "repeat_interleave":
            depends = kwargs.get("output_size") is None
        if func.namespace == "c10d" or (depends and name != "_local_scalar_dense"):
            self.seen.append(name)
        return func(*args, **kwargs)


def scale(rows, ids, weights):
    """Experts that ask nobody."""
    return rows * weights.sum(1, keepdim=True)


def waits_of_a_step(rank, moe, case, checkpointed=False):
    """What a forward and its backward wait for, all-to-alls told too."""
    implementation, _ = moe.build(case, rank, experts_forward=scale, experts=None)
    _, inputs = moe.whole_inputs(case)
    hidden, ids, weights, cotangent = inputs[rank // case.tp]
    x, w = hidden.requires_grad_(), weights.requires_grad_()
    call = implementation
    if checkpointed:
        more = {"use_reentrant": False, "preserve_rng_state": False}
        call = functools.partial(checkpoint, implementation, **more)
    with Waits() as forward:
        out = call(x, ids, w)
    with Waits() as backward:
        out.backward(cotangent)
    return forward, backward


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tokens", [(13, 6, 9, 11, 1, 2, 3, 4), (0, 6, 0, 11, 0, 2, 0, 0)])
def test_the_host_waits_once_in_a_step_after_the_counts(ranks, moe, tp, tokens):
    """As late as possible: the counts have been exchanged, and no row can be sent without them."""
    case = moe.Case(tp=tp, tokens=tokens[: 8 // tp])
    for forward, backward in ranks.run(waits_of_a_step, moe, case):
        traffic = ["alltoall_base_"] * 3  # slots' weights and rows; rows there; rows back
        gathers = ["_allgather_base_"] * (tp > 1)
        assert forward == ["alltoall_base_", "tolist", *traffic, *gathers]
        assert set(backward) <= TRAFFIC


def test_not_again_in_the_recomputation(ranks, moe):
    for forward, backward in ranks.run(waits_of_a_step, moe, moe.Case(), True):
        assert forward.count("tolist") == 1
        assert set(backward) <= TRAFFIC


def test_in_two_hops_once_for_each(ranks, moe):
    case = moe.Case(ep=8, tp=2, name="all_to_all_hierarchical", settings=(("ranks_per_node", 4),))
    for forward, backward in ranks.run(waits_of_a_step, moe, case):
        assert [name for name in forward if name not in TRAFFIC] == ["tolist"] * 2
        assert set(backward) <= TRAFFIC


def test_all_reduce_waits_for_nothing(ranks, moe):
    """But for its look at the ids, which it takes on a CPU only."""
    for forward, backward in ranks.run(waits_of_a_step, moe, moe.Case(name="all_reduce", tp=4)):
        assert forward == ["item", "item", "allreduce_"]
        assert backward == ["allreduce_", "allreduce_"]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: int(x[0]),
        lambda x: bool(x.any()),
        lambda x: [0] * x[0],
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.to(device=torch.device("cpu")),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 1),
        lambda x: x[x > 1],
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 1),
        lambda x: x.repeat_interleave(x),
        lambda x: torch.bincount(x),
        lambda x: torch.equal(x, x),
        lambda x: x.new_tensor([1]),
        lambda x: torch.tensor([1], device=x.device),
    ],
)
def test_what_would_wait_is_seen(wait):
    with Waits() as seen:
        wait(torch.tensor([1, 2, 3]))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "go_on",
    [
        lambda x: x[x] + x.to(torch.float32).sum(),
        lambda x: torch.tensor([1]).to(x.device, non_blocking=True),
        lambda x: x.repeat_interleave(x, output_size=5),
        lambda x: torch.zeros_like(x).scatter_(0, x - 1, 1).masked_fill(x > 1, 0).cumsum(0),
        lambda x: x.sort(stable=True),
    ],
)
def test_what_would_not_wait_is_not(go_on):
    with Waits() as seen:
        go_on(torch.tensor([1, 2, 2])[:3] - torch.tensor([0, 0, 0]))
    assert seen == []
