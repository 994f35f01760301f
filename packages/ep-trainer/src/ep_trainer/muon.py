"""Muon over sharded parameters: each matrix is whole on one rank at a time.

Muon (Keller Jordan 2024, https://kellerjordan.github.io/posts/muon) orthogonalizes the momentum of
each hidden matrix. That needs the whole matrix, of which a rank has a part. As in Moonlight (Liu et
al. 2025, arXiv 2502.16982) the state stays sharded, and as in Dion (Ahn et al. 2025, arXiv
2504.05295) the matrices are dealt out to the ranks that share them: of P matrices each of P ranks
gathers one, works on it, and sends the parts back, so no work is repeated.

[Note: which ranks share a matrix]
Of the mesh that a parameter lies on, an axis cuts its matrices (TP, FSDP of dense weights), deals out
whole ones (EP and FSDP of the experts' stacks, on their first dimension), or repeats them (HSDP
replicas). The ranks along the first and the last kind share their matrices; what each of them holds
is arithmetic. Experts that lie on EP and FSDP alone are whole where they are, and nothing moves.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from ep_mesh import ParallelMesh
from ep_plans import local, parallel_state
from ep_plans.boxes import Box, lengths, numel, pieces, whole_box
from ep_plans.sharding import DATA_AXES, cut_ranges, dim_and_packs
from ep_plans.shards import box_at
from ep_trainer.optim import split_by_mesh

_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)")


class Muon(Optimizer):
    """Muon for the hidden matrices of a model, AdamW for the rest of it, in any layout.

    Hidden matrices are weights of two dimensions and each expert's own in a stack of experts.
    Embeddings, the head, routers, norms and biases are AdamW's, as is usual, and so is a matrix with
    fewer features than TP ranks. The update of a matrix is that of `torch.optim.Muon`, the same in
    every layout. Give it to a trainer with `optimizers=(Muon(model, lr=1e-4), None)`.

    Args:
        model: sharded already, or not at all.
        lr: of both; with `adjust_lr_fn="match_rms_adamw"` one that suits AdamW suits the matrices.
        weight_decay: decoupled; of AdamW's parameters those with one dimension, and biases, have none.
        momentum: as in `torch.optim.Muon`, and so are `nesterov`, `ns_coefficients`, `eps`, `ns_steps` and
            `adjust_lr_fn`.
        betas: AdamW's, as `adam_eps` is.
        adam: names (or their beginnings) of further parameters that AdamW shall have.
        ns_dtype: what matrices travel and are orthogonalized in.

    State: `momentum_buffer` of a matrix, `exp_avg`, `exp_avg_sq` and `step` of the others; tensors
    with the shape, dtype and placement of the parameter.

    Cost of a step, of a matrix that P ranks share: its parts to one rank and back, once each in
    `ns_dtype`. Never more than one gathered matrix per rank is held.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        adam: Collection[str] = (),
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0 and 0 <= momentum < 1):
            raise ValueError(
                "Muon needs lr >= 0, weight_decay >= 0 and 0 <= momentum < 1, got "
                f"{lr}, {weight_decay} and {momentum}."
            )
        if adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn={adjust_lr_fn!r}: it is 'original' or 'match_rms_adamw'."
            )
        state = parallel_state(model)
        self._mesh: ParallelMesh | None = None if state is None else state.mesh
        self._ns_dtype = ns_dtype
        self._sharers: dict[Tensor, _Sharers] = {}
        matrices = {
            name
            for name in hidden_matrices(model)
            if not any(name == given or name.startswith(f"{given}.") for given in adam)
        }
        common = {"lr": lr, "weight_decay": weight_decay}
        muon_options = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        adam_options = {"betas": betas, "eps": adam_eps}
        super().__init__(_groups(model, matrices, common | muon_options, common | adam_options), {})
        split_by_mesh(self)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step. Every rank must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared: dict[_Sharers, list[_Matrix]] = {}
        for group in self.param_groups:
            if not group["is_muon"]:
                self._adam(group)
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    sharers, matrices = self._matrices(parameter, group)
                    shared.setdefault(sharers, []).extend(matrices)
        for sharers, matrices in shared.items():
            _update(matrices, sharers, self._ns_dtype)
        return loss

    def _matrices(self, parameter: Tensor, group: dict[str, Any]) -> tuple[_Sharers, list[_Matrix]]:
        """Move the momentum and decay the weights, which is local; give what is to be updated."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        weight, grad = local(parameter), local(parameter.grad)
        momentum: Tensor = local(state["momentum_buffer"])
        momentum.lerp_(grad, 1 - group["momentum"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        if parameter not in self._sharers:
            self._sharers[parameter] = _sharers(parameter, self._mesh)
        sharers = self._sharers[parameter]
        if parameter.ndim == 2 or len(sharers.ranks) == 1:
            parts = [(weight, grad, momentum)]
        else:
            parts = list(zip(weight, grad, momentum, strict=True))
        return sharers, [_Matrix(*part, tuple(parameter.shape[-2:]), group) for part in parts]

    def _adam(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _groups(
    model: nn.Module, matrices: Collection[str], muon: dict[str, Any], adam: dict[str, Any]
) -> list[dict[str, Any]]:
    """The groups of the parameters that train: Muon's, AdamW's, and AdamW's without weight decay."""
    kinds: list[list[nn.Parameter]] = [[], [], []]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and not name.endswith("bias")
            kinds[0 if name in matrices else 1 if decays else 2].append(parameter)
    options = (
        {**muon, "is_muon": True},
        {**adam, "is_muon": False},
        {**adam, "weight_decay": 0.0, "is_muon": False},
    )
    return [
        {**own, "params": parameters}
        for own, parameters in zip(options, kinds, strict=True)
        if parameters
    ]


def hidden_matrices(model: nn.Module) -> list[str]:
    """The names of the parameters that `Muon` orthogonalizes."""
    state = parallel_state(model)
    planned = state.plans.experts if state is not None else ()
    experts = [
        name
        for name, _ in model.named_modules()
        if name in planned or name.rpartition(".")[2] == "experts"
    ]
    outside: set[Tensor] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or name.rpartition(".")[2] in ("lm_head", "head"):
            outside.update(module.parameters())
    for get in ("get_input_embeddings", "get_output_embeddings"):
        if (found := getattr(model, get, lambda: None)()) is not None:
            outside.update(found.parameters())
    names = []
    for name, parameter in model.named_parameters():
        in_experts = any(name.startswith(f"{at}.") for at in experts)
        whole = parameter.ndim == (3 if in_experts else 2) and min(parameter.shape[-2:]) > 1
        apart = parameter in outside or name.endswith("bias")
        if not in_experts:
            apart |= _ROUTER.search(name) is not None
        if whole and not apart and not _leaves_ranks_empty(parameter):
            names.append(name)
    return names


@dataclass(frozen=True)
class _Sharers:
    """The ranks that share the matrices of a parameter.

    Attributes:
        ranks: in the order in which matrices are dealt out to them.
        boxes: of a matrix, what each of them holds.
        copies: of the ranks that hold a matrix several times over, which set each belongs to.
    """

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    copies: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Matrix:
    """This rank's part of a matrix (or of several whole ones) and how to update it."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    shape: tuple[int, ...]
    group: dict[str, Any]

    def direction(self, dtype: torch.dtype) -> Tensor:
        """What is orthogonalized."""
        if not self.group["nesterov"]:
            return self.momentum.to(dtype)
        return self.grad.lerp(self.momentum, self.group["momentum"]).to(dtype)

    def orthogonal(self, matrix: Tensor) -> Tensor:
        """The whole matrix, or several, orthogonalized."""
        group = self.group
        return orthogonalize(
            matrix, group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"]
        )

    def step(self, orthogonal: Tensor) -> None:
        """Step this rank's part along its part of the orthogonalized matrix."""
        rows, columns = self.shape
        if self.group["adjust_lr_fn"] == "original":
            ratio = math.sqrt(max(1.0, rows / columns))
        else:
            ratio = 0.2 * math.sqrt(max(rows, columns))
        self.weight.add_(orthogonal.to(self.weight.dtype), alpha=-float(self.group["lr"]) * ratio)


def orthogonalize(
    matrices: Tensor, coefficients: tuple[float, float, float], *, steps: int, eps: float
) -> Tensor:
    """About U V^T of each matrix U S V^T [A, B] or [E, A, B], by Newton-Schulz iterations in its dtype."""
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    # One rounding for each product and sum, as torch's: in bfloat16 it shows.
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result: Tensor = x.mT if tall else x
    return result


def _update(matrices: Sequence[_Matrix], sharers: _Sharers, dtype: torch.dtype) -> None:
    """Update matrices that the same ranks share, one per rank at a time."""
    if len(sharers.ranks) == 1:
        for matrix in matrices:
            if matrix.weight.numel():
                matrix.step(matrix.orthogonal(matrix.direction(dtype)))
        return
    many = len(sharers.ranks)
    for start in range(0, len(matrices), many):
        _take_turn(matrices[start : start + many], sharers, dtype)


def _take_turn(turn: Sequence[_Matrix], sharers: _Sharers, dtype: torch.dtype) -> None:
    """Gather matrix i on the i-th rank, orthogonalize it there, and send the parts back."""
    me = sharers.ranks.index(dist.get_rank())
    parts = [matrix.direction(dtype).contiguous() for matrix in turn]
    owned = turn[me] if me < len(turn) else None
    others = [peer for peer in range(len(sharers.ranks)) if peer != me]
    holders = [peer for peer in others if numel(sharers.boxes[peer])]
    owners = [peer for peer in others if peer < len(turn) and parts[peer].numel()]
    same_copy = [peer for peer in others if sharers.copies[peer] == sharers.copies[me]]

    def new_part(peer: int) -> Tensor:
        return parts[0].new_empty(lengths(sharers.boxes[peer]))

    got = {p: new_part(p) for p in holders if p in same_copy} if owned else {}
    _exchange({p: parts[p] for p in owners if p in same_copy}, got, sharers)
    back: dict[int, Tensor] = {}
    if owned is not None:
        whole = parts[me].new_empty(owned.shape)
        for peer, part in {**got, me: parts[me]}.items():
            for at, inside in _blocks(sharers.boxes[peer]):
                whole[at] = part[inside]
        whole = owned.orthogonal(whole)
        for peer in [*holders, me]:
            back[peer] = new_part(peer)
            for at, inside in _blocks(sharers.boxes[peer]):
                back[peer][inside] = whole[at]
        del whole
        owned.step(back.pop(me))
    news = {owner: torch.empty_like(parts[owner]) for owner in owners}
    _exchange(back, news, sharers)
    for owner, part in news.items():
        turn[owner].step(part)


def _blocks(box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Each contiguous block of a box: where it is in the whole matrix, and in the part."""
    for place, local_place in pieces(box):
        yield tuple(slice(*each) for each in place), tuple(slice(*each) for each in local_place)


def _exchange(send: dict[int, Tensor], receive: dict[int, Tensor], sharers: _Sharers) -> None:
    """Send a tensor to some of the sharers and receive one from some, at most one each."""
    operations = [dist.P2POp(dist.isend, t, sharers.ranks[peer]) for peer, t in send.items()]
    operations += [dist.P2POp(dist.irecv, t, sharers.ranks[peer]) for peer, t in receive.items()]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _sharers(parameter: Tensor, mesh: ParallelMesh | None) -> _Sharers:
    """See the note at the top."""
    if not isinstance(parameter, DTensor):
        ranks = (0,) if mesh is None else tuple(mesh.mesh("dp", "tp").mesh.flatten().tolist())
        whole = whole_box(parameter.shape[-2:])
        return _Sharers(ranks, (whole,) * len(ranks), tuple((rank,) for rank in ranks))
    grid, here = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert here is not None
    dealt, copied = [], []
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            copied.append(axis)
        elif dim_and_packs(placement, parameter.ndim)[0] < parameter.ndim - 2:
            dealt.append(axis)
    places = [
        place
        for place in itertools.product(*map(range, grid.shape))
        if all(place[axis] == here[axis] for axis in dealt)
    ]
    return _Sharers(
        tuple(int(grid.mesh[place]) for place in places),
        tuple(box_at(parameter, place)[-2:] for place in places),
        tuple(tuple(place[axis] for axis in copied) for place in places),
    )


def _leaves_ranks_empty(parameter: Tensor) -> bool:
    """Whether TP leaves some ranks nothing of it: those have it on another mesh than the others."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    sizes = parameter.device_mesh.shape
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate) or (names and names[axis] in DATA_AXES):
            continue
        dim, packs = dim_and_packs(placement, parameter.ndim)
        last = cut_ranges(parameter.shape[dim], sizes[axis], sizes[axis] - 1, packs)
        if sum(end - start for start, end in last) == 0:
            return True
    return False
