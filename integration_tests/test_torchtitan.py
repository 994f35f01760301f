"""ep-dispatch inside torchtitan's MoE: the numbers of its own dispatcher and of one process, fewer bytes.

T = tokens, D = model dimension, K = experts per token, E = experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from ep_dispatch.testing import WORKLOADS, KitExperts, check
from ep_testing import RankError, RankPool

try:
    from ep_dispatch.adapters import torchtitan as adapter
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

WORLD, EXPERTS, DIM, INNER, BATCH, LENGTH = 4, 8, 16, 32, 2, 8
OVERRIDE = "ep_dispatch.adapters.torchtitan.all_to_all"
NAMES = {"w1_EFD": 1, "w2_EDF": 2, "w3_EFD": 1}


class Sent(TorchDispatchMode):
    """What leaves this rank in all-to-alls: rows of width D, and bytes in all."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.name() == "c10d::alltoall_base_":
            self.count(args[1], args[4])
        elif func.name() == "_c10d_functional::all_to_all_single":
            self.count(args[0], args[2])
        return func(*args, **(kwargs or {}))

    def count(self, x: Tensor, splits: list[int]) -> None:
        sizes = list(splits) or [x.shape[0] // WORLD] * WORLD
        leaving = sum(sizes) - sizes[dist.get_rank()]
        self.bytes += leaving * math.prod(x.shape[1:]) * x.element_size()
        self.rows += leaving if x.shape[1:] == (DIM,) else 0


@dataclass(frozen=True)
class Case:
    """A layer on four ranks.

    `exact`: experts in float32; torchtitan's own compute in bfloat16. `hot`: all slots go to the first
    rank, whose two experts are all that K = 2 leaves a token.
    """

    backend: str = "partial_dtensor"
    tp: int = 1
    exact: bool = True
    hot: bool = False

    @property
    def top_k(self) -> int:
        return 2 if self.hot else 4


def layer(dispatcher: str, case: Case) -> Any:
    """The config of a MoE layer of torchtitan, as its models make it."""
    from torchtitan.models.common.config_utils import make_token_dispatcher_config
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import (
        GroupedExperts,
        MoE,
        RoutedExperts,
        TokenChoiceTopKRouter,
    )
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    if dispatcher == "local":
        dispatching = LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=case.top_k)
    else:
        dispatching = make_token_dispatcher_config(
            num_experts=EXPERTS, top_k=case.top_k, comm_backend="standard"
        )
    kind = exact_experts() if case.exact else GroupedExperts
    return MoE.Config(
        num_experts=EXPERTS,
        router=TokenChoiceTopKRouter.Config(
            num_experts=EXPERTS,
            top_k=case.top_k,
            route_norm=True,
            gate=Linear.Config(in_features=DIM, out_features=EXPERTS),
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=kind.Config(dim=DIM, hidden_dim=INNER, num_experts=EXPERTS),
            token_dispatcher=dispatching,
        ),
    )


def exact_experts() -> Any:
    """Torchtitan's experts, which cast to bfloat16, without the cast."""
    from dataclasses import dataclass

    from torchtitan.models.common.moe import GroupedExperts

    class FloatExperts(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

        def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
            weights = (
                w.to_local() if hasattr(w, "to_local") else w
                for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
            )
            parts = x_RD.split(num_tokens_per_expert_E.tolist())
            return torch.cat([
                (torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
                for x, w1, w2, w3 in zip(parts, *weights, strict=True)
            ])  # fmt: skip

    return FloatExperts


def state(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "router.gate.weight": (EXPERTS, DIM),
        "routed_experts.inner_experts.w1_EFD": (EXPERTS, INNER, DIM),
        "routed_experts.inner_experts.w2_EDF": (EXPERTS, DIM, INNER),
        "routed_experts.inner_experts.w3_EFD": (EXPERTS, INNER, DIM),
    }
    values = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    bias = torch.zeros(EXPERTS)
    bias[:2] = 10.0 * case.hot
    return values | {"expert_bias_E": bias}


@contextmanager
def backend(name: str, dims: Any) -> Iterator[None]:
    from torchtitan.distributed import utils

    before = utils.get_spmd_backend()
    utils.set_spmd_backend(name)
    try:
        with utils.get_spmd_context(parallel_dims=dims)():
            yield
    finally:
        utils.set_spmd_backend(before)


def load(moe: Any, case: Case) -> None:
    moe.tokens_per_expert_E.zero_()
    moe.load_state_dict(state(case))


def step(
    x_BLD: Tensor, cotangent_BLD: Tensor, case: Case, *, ours: bool
) -> tuple[float, dict[str, Tensor], Sent]:
    """The loss over all ranks, its gradients, and what the layer sends."""
    import spmd_types
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    parallel_dims.device_type = "cpu"  # it names CUDA where there is no accelerator
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=WORLD // case.tp, cp=1, tp=case.tp, pp=1, ep=WORLD,
        world_size=WORLD, spmd_backend=case.backend,
    )  # fmt: skip
    dims.build_mesh()
    with backend(case.backend, dims):
        config = layer("standard", case)
        set_moe_sharding_config(
            config, enable_ep=True, enable_sp=True,
            expert_param_layout={name: spmd_types.S(dim) for name, dim in NAMES.items()},
        )  # fmt: skip
        if ours:
            assert len(apply_overrides(OverrideConfig(imports=[OVERRIDE]), config)) == 1
        moe = config.build()
        assert isinstance(moe.routed_experts.token_dispatcher, adapter.EPTokenDispatcher) == ours
        load(moe, case)
        moe.parallelize(dims)
        x = x_BLD.clone().requires_grad_()
        with Sent() as sent:
            out = moe(x)
            out = out.to_local() if hasattr(out, "to_local") else out
            loss = (out * cotangent_BLD).sum()
            loss.backward()
        gradients = {name: whole(p.grad, name) for name, p in moe.named_parameters()}
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item(), gradients | {"input": x.grad}, sent


def whole(gradient: Tensor, name: str) -> Tensor:
    """A gradient over all ranks: experts by their shards, others as the sum of the ranks' parts."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    if "experts" in name:
        parts = [torch.empty_like(gradient) for _ in range(WORLD)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def alone(
    x_SBLD: Tensor, cotangent_SBLD: Tensor, case: Case
) -> tuple[float, dict[str, Tensor], Tensor]:
    """The loss and gradients of one process with the tokens of all ranks, and the owners [S, T, K]."""
    moe = layer("local", case).build()
    load(moe, case)
    x = x_SBLD.clone().requires_grad_()
    loss = (moe(x.flatten(0, 1)) * cotangent_SBLD.flatten(0, 1)).sum()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in moe.named_parameters()}
    ids = moe.router(x.flatten(0, 1), moe.expert_bias_E)[1].view(WORLD, -1, case.top_k)
    return loss.item(), gradients | {"input": x.grad}, ids // (EXPERTS // WORLD)


def compare(rank: int, case: Case) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    x, cotangent = torch.randn(2, WORLD, BATCH, LENGTH // case.tp, DIM, generator=generator)
    bound = 1e-5 if case.exact else 3e-2  # bfloat16: rounding of the experts' inputs and outputs
    expected_loss, expected, owners = alone(x, cotangent, case)
    expected["input"] = expected["input"][rank]
    elsewhere = [owners[source] != source for source in range(WORLD)]
    held = torch.nn.functional.one_hot(owners, WORLD).amax(2)  # [S, T, P]: some expert is there
    told: dict[str, Any] = {
        "slots": sum(int(mask.sum()) for mask in elsewhere),
        "rows": sum(int(held[s].sum() - held[s, :, s].sum()) for s in range(WORLD)),
    }
    # Under spmd_types torchtitan exchanges lists of tensors, which gloo takes in equal sizes only.
    for ours in (False, True) if case.backend == "partial_dtensor" else (True,):
        loss, found, sent = step(x[rank], cotangent[rank], case, ours=ours)
        assert abs(loss - expected_loss) <= bound * abs(expected_loss), ours
        assert found.keys() == expected.keys()
        for name, reference in expected.items():
            error = ((found[name] - reference).norm() / reference.norm()).item()
            assert error <= bound, f"{name}, {ours=}: {error}"
            if case.hot and "experts" in name:
                assert (found[name][2:] == 0).all(), "idle experts have gradients of zero"
        told["ours" if ours else "theirs"] = sent.rows, sent.bytes
    return told


CASES = [
    Case(backend=backend, tp=tp, exact=exact)
    for backend in ("partial_dtensor", "spmd_types")
    for tp in (1, 2)
    for exact in (True, False)
] + [Case(hot=True), Case(hot=True, exact=False), Case(hot=True, tp=2, backend="spmd_types")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_its_own_and_one_process(ranks: RankPool, case: Case) -> None:
    """Loss and gradients are equal; rows travel once per token and rank, theirs once per slot.

    There, back, and the same in backward: four exchanges of rows.
    """
    told = ranks.run(compare, case, world=WORLD, timeout=120)
    assert sum(rank["ours"][0] for rank in told) == 4 * told[0]["rows"]
    if "theirs" in told[0]:
        assert sum(rank["theirs"][0] for rank in told) == 4 * told[0]["slots"]
        bytes_ours, bytes_theirs = (sum(r[who][1] for r in told) for who in ("ours", "theirs"))
        assert told[0]["rows"] < 0.8 * told[0]["slots"]
        assert bytes_ours < bytes_theirs


def test_without_an_ep_mesh_it_is_local() -> None:
    """In one process, where torchtitan wires no EP mesh, tokens are reordered as torchtitan does it."""
    x, cotangent = torch.randn(2, BATCH, LENGTH, DIM)
    outputs = []
    for dispatcher in ("local", "ours"):
        config = layer("local", Case())
        if dispatcher == "ours":
            ours = adapter.EPTokenDispatcher.Config(num_experts=EXPERTS, top_k=Case().top_k)
            config.routed_experts.token_dispatcher = ours
        moe = config.build()
        load(moe, Case())
        moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=None)
        out = moe(x)
        out.backward(cotangent)
        outputs.append([out, *(parameter.grad for parameter in moe.parameters())])
    for found, expected in zip(*outputs, strict=True):
        assert torch.equal(found, expected)


def refuses(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    dispatcher = adapter.EPTokenDispatcher.Config(num_experts=6, top_k=2).build()
    with pytest.raises(ValueError, match="must divide the experts, got 6 experts over 4 ranks"):
        dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",)))


def test_experts_that_do_not_divide(ranks: RankPool) -> None:
    ranks.run(refuses, world=WORLD)


def conforms(rank: int, workload: str, ours: bool, *dtypes: torch.dtype) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    kind = adapter.EPTokenDispatcher if ours else AllToAllTokenDispatcher

    def build(
        experts_forward: KitExperts,
        *,
        num_local_experts: int,
        ep_group: ProcessGroup | None,
        tp_group: ProcessGroup | None,
    ) -> Any:
        def call(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
            experts = num_local_experts * WORLD
            dispatcher = kind.Config(num_experts=experts, top_k=ids_TK.shape[1]).build()
            dispatcher.wire_meshes(ep_mesh=mesh)
            counts_E = torch.bincount(ids_TK[ids_TK >= 0], minlength=experts)
            rows_RD, counts_e, metadata = dispatcher.dispatch(x_TD, scores_TK, ids_TK, counts_E)
            ids_R = torch.arange(num_local_experts).repeat_interleave(counts_e)[:, None]
            out_RD = experts_forward(rows_RD, ids_R, torch.ones_like(ids_R, dtype=x_TD.dtype))
            return dispatcher.combine(out_RD, metadata, x_TD)

        return call

    with backend("partial_dtensor", None):
        check(build, workload, ep_group=mesh.get_group(), dtypes=dtypes)


SKIPS = pytest.mark.xfail(
    raises=RankError, strict=True, reason="torchtitan 0.3 has no skipped slots: it sends each one"
)
PAIRS = [(ours, workload) for ours in (True, False) for workload in WORKLOADS]


@pytest.mark.parametrize(
    ("ours", "workload"),
    [pytest.param(o, w, marks=SKIPS if (o, w) == (False, "skipped") else ()) for o, w in PAIRS],
)
def test_conforms(ranks: RankPool, ours: bool, workload: str) -> None:
    dtypes = (torch.float32, torch.float64) if ours else (torch.float32,)
    ranks.run(conforms, workload, ours, *dtypes, world=WORLD)


@pytest.mark.xfail(
    raises=RankError, strict=True, reason="torchtitan weights rows in float32, whatever their dtype"
)
def test_theirs_conforms_in_float64(ranks: RankPool) -> None:
    ranks.run(conforms, "balanced", False, torch.float64, world=WORLD)
