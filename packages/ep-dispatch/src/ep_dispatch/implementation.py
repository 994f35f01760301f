"""The base class of all implementations, and the registry that names them.

T = tokens of this rank, H = hidden size, K = experts per token, E = experts of a layer, P = ranks of
the EP group, R = rows that reach this rank's experts, J = slots that a row carries.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .agreement import Notice
from .collectives import chunk_bounds, gather_over_group, group_rank, group_size
from .dtensor import like_input, local_inputs
from .links import split_linked
from .phase import Phase

__all__ = [
    "MEGAMOE",
    "EPImplementation",
    "EPImplementationInterface",
    "ExpertsForward",
    "add_shared",
]

ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(rows [R, H], local_expert_ids [R, J] int64, weights [R, J]) -> [R, H]`, the weighted sum of the
outputs of each row's experts. A slot with id `num_local_experts` is skipped: it contributes exactly
zero and its weight gets exactly zero gradient."""

MEGAMOE = "deepgemm_megamoe"
"""The experts implementation (and the EP implementation) of DeepGEMM Mega MoE."""


class EPImplementation:
    """How the tokens of one experts module reach their experts. One object per experts module.

    Subclass it, override `forward`, and register the class by name (`EPImplementationInterface`).
    Gradients must reach every rank that holds a token, routing weights included: use the functions
    of `ep_dispatch.collectives`, which autograd differentiates.

    Args:
        experts_forward: runs this rank's experts on rows, see `ExpertsForward`.
        num_local_experts: E / P, the experts that each rank of the EP group owns.
        ep_group: the ranks that own distinct experts, rank p owning experts
            `p * num_local_experts` and following. None: one rank.
        tp_group: the ranks that hold the same batch, all of them in `ep_group`. None: this rank alone.
        sequence_parallel: the ranks of `tp_group` hold slices of the batch already, so that nothing
            is sliced or gathered.
        experts: the experts module, for its configuration, and for its parameters: a rank whose
            experts get no row still gives them a gradient (zeros), so that reductions of gradients
            find the same parameters on every rank. None: the module that `experts_forward` is, or is a
            method of; if there is none, `experts_forward` itself must use its parameters when it gets
            no row.

    Raises:
        ValueError: the groups do not fit together or do not fit the implementation.
    """

    needs_shared_batch: ClassVar[bool] = False
    """Whether every rank of the EP group must hold the same batch (`ep_size == tp_size`)."""

    runs_megamoe_experts: ClassVar[bool] = False
    """Whether experts configured for DeepGEMM Mega MoE can run through it."""

    layer: str | None = None
    """The full name of the experts module, for messages; whoever builds the model sets it."""

    def __init__(
        self,
        experts_forward: ExpertsForward,
        *,
        num_local_experts: int,
        ep_group: ProcessGroup | None = None,
        tp_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        experts: nn.Module | None = None,
    ) -> None:
        if num_local_experts < 1:
            raise ValueError(
                f"num_local_experts must be at least 1, got {num_local_experts}: the experts of a "
                "layer divided by the ranks of the EP group."
            )
        self.experts_forward = experts_forward
        self.experts = experts if experts is not None else _module_of(experts_forward)
        self.num_local_experts = num_local_experts
        self.ep_group, self.ep_size, self.ep_rank = (
            ep_group,
            group_size(ep_group),
            group_rank(ep_group),
        )
        self.tp_group, self.tp_size, self.tp_rank = (
            tp_group,
            group_size(tp_group),
            group_rank(tp_group),
        )
        self.sequence_parallel = sequence_parallel
        self.num_experts = num_local_experts * self.ep_size
        members = _members_in(tp_group, ep_group)
        # The first of the EP ranks that hold the same tokens as this one.
        self._first_of_batch = self.ep_rank if sequence_parallel else min(members)
        self.shares_batch = self.ep_size == self.tp_size and not (
            sequence_parallel and self.tp_size > 1
        )
        if self.needs_shared_batch and not self.shares_batch:
            raise ValueError(
                f"{type(self).__name__} needs every rank of the EP group to hold the same batch "
                f"(ep_size == tp_size, no sequence parallelism), got ep_size={self.ep_size}, "
                f"tp_size={self.tp_size}, sequence_parallel={sequence_parallel}; use "
                'ep_implementation="all_to_all" or "auto".'
            )
        if uses_megamoe(self.experts) and not self.runs_megamoe_experts:
            raise ValueError(
                f'experts_implementation="{MEGAMOE}" moves the tokens inside its kernel, so it runs '
                f'with ep_implementation="auto" or "{MEGAMOE}" only, got {type(self).__name__}.'
            )

    @classmethod
    def options(cls) -> list[str]:
        """The settings that the class has beside those of every implementation, by name."""
        common = inspect.signature(EPImplementation.__init__).parameters
        classes = [c for c in reversed(cls.__mro__) if issubclass(c, EPImplementation)]
        found = [p for c in classes for p in inspect.signature(c.__init__).parameters.values()]
        own = [p.name for p in found if p.kind is p.KEYWORD_ONLY and p.name not in common]
        return list(dict.fromkeys(own))

    def __call__(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        shared_experts: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run the experts on this rank's tokens.

        Args:
            hidden_states: [T, H], float64, float32, float16 or bfloat16; the ranks of `tp_group`
                hold the same T tokens, or each its slice with `sequence_parallel`. A DTensor on the
                ranks of `tp_group` is accepted too.
            top_k_index: [T, K] int64 or int32, global expert ids; the same id may occur twice, and
                -1 skips a slot.
            top_k_weights: [T, K], any of the float dtypes.
            shared_experts: `[T, H] -> [T, H]`, the experts that every token takes: called once with the
                hidden states, and its output is added. `all_to_all` (and `auto`, where it takes that)
                calls it while the rows travel to the routed experts; their gradients travel while it
                runs backward. If it communicates, then on all ranks of the EP group alike.

        Returns:
            [T, H] of the hidden states' dtype: the weighted sum over each token's experts. A DTensor
            with the placement of `hidden_states` if that was one.
        """
        group, sharded = self.tp_group, self.sequence_parallel
        local = local_inputs((hidden_states, top_k_index, top_k_weights), group, sharded)
        if shared_experts is None:
            out = self.forward(*local)
        elif "shared_experts" in inspect.signature(self.forward).parameters:
            out = self.forward(*local, shared_experts=shared_experts)  # type: ignore[call-arg]
        else:
            out = add_shared(self.forward(*local), shared_experts(local[0]))
        return like_input(out, hidden_states, sharded)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What a subclass does: as `__call__`, with plain tensors.

        One that runs shared experts itself takes the keyword `shared_experts` too.
        """
        raise NotImplementedError(f"{type(self).__name__} must override `forward`.")

    @property
    def _slices(self) -> bool:
        """Whether this rank dispatches a slice of a batch that it holds whole."""
        return self.tp_size > 1 and not self.sequence_parallel

    def _slice(self, num_tokens: int) -> tuple[int, int]:
        """First and last (excluded) of the tokens that this rank dispatches."""
        if not self._slices:
            return 0, num_tokens
        return chunk_bounds(num_tokens, self.tp_size, self.tp_rank)

    def _split(
        self, link: Tensor | None, x: Tensor, need: bool, phase: str
    ) -> tuple[Tensor | None, Tensor]:
        """This rank's slice of `x` [T, ...]. If that needs no gradient, the link passes by."""
        if not self._slices:
            return link, x
        assert self.tp_group is not None
        inner, chunk = split_linked(link if need else None, x, self.tp_group, self.phase(phase))
        return link if inner is None else inner, chunk

    def _gather(self, rows: Tensor, num_tokens: int) -> Tensor:
        """The tokens of all slices."""
        if not self._slices:
            return rows
        with self.phase("combine"):
            return gather_over_group(rows, self.tp_group, size=num_tokens)

    def _device(self) -> torch.device:
        """Where tensors are that the group can send."""
        if self.ep_group is not None and dist.get_backend(self.ep_group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _notice(self, top_k_weights: Tensor, hidden_states: Tensor | None) -> Notice:
        """What the other ranks must know of a call. Without hidden states: as if they need gradients."""
        width, dtype, wants_grad = 0, None, True
        if hidden_states is not None:
            width, dtype = hidden_states.shape[1], hidden_states.dtype
            wants_grad = hidden_states.requires_grad
        return Notice(
            rank=self.ep_rank,
            grad=torch.is_grad_enabled(),
            hidden=wants_grad,
            weights=top_k_weights.requires_grad,
            experts=self.experts_need_grad(),
            tokens=top_k_weights.shape[0],
            batch=self._first_of_batch,
            width=width,
            dtype=dtype,
            weights_dtype=top_k_weights.dtype,
        )

    def run_experts(self, rows: Tensor, local_expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Call `experts_forward` and check the shape of what it gives back."""
        out = self.experts_forward(rows, local_expert_ids, weights)
        if out.shape != rows.shape:
            raise ValueError(
                f"experts_forward must give one row of output per row of input, {list(rows.shape)}, "
                f"got {list(out.shape)}."
            )
        return out

    def phase(self, name: str) -> Phase:
        """A context for a collective, which names it in an error."""
        return Phase(name, self.ep_group, self.layer)

    def expert_parameters(self) -> list[nn.Parameter]:
        """The experts' parameters that need a gradient, as they are now (FSDP2 swaps them)."""
        if self.experts is None:
            return []
        return [p for p in self.experts.parameters() if p.requires_grad]

    def experts_need_grad(self) -> bool:
        """Whether a gradient of the experts' parameters may be wanted; True if they are not known."""
        return self.experts is None or any(p.requires_grad for p in self.experts.parameters())

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_local_experts={self.num_local_experts}, "
            f"ep={self.ep_rank}/{self.ep_size}, tp={self.tp_rank}/{self.tp_size}, "
            f"sequence_parallel={self.sequence_parallel})"
        )


def add_shared(output: Tensor, shared: Tensor) -> Tensor:
    """The output of the routed experts [T, H] and that of the shared ones.

    Raises:
        ValueError: they are not of one shape.
    """
    if shared.shape != output.shape:
        raise ValueError(
            f"shared_experts must give one row of output per token, {list(output.shape)}, got "
            f"{list(shared.shape)}."
        )
    return output + shared.to(output.dtype)


def _module_of(function: object) -> nn.Module | None:
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _members_in(tp_group: ProcessGroup | None, ep_group: ProcessGroup | None) -> Sequence[int]:
    """The EP ranks of the TP group's members."""
    if tp_group is None or group_size(tp_group) == 1:
        return [group_rank(ep_group)]
    tp_ranks = dist.get_process_group_ranks(tp_group)
    ep_ranks = [dist.get_rank()] if ep_group is None else dist.get_process_group_ranks(ep_group)
    if not set(tp_ranks) <= set(ep_ranks):
        raise ValueError(
            f"the ranks that hold one batch must lie in one EP group (ep_size is a multiple of "
            f"tp_size), got tp ranks {tp_ranks} and ep ranks {ep_ranks}."
        )
    return [ep_ranks.index(rank) for rank in tp_ranks]


def uses_megamoe(experts: nn.Module | None) -> bool:
    """Whether the experts' configuration selects DeepGEMM Mega MoE."""
    config = getattr(experts, "config", None)
    return getattr(config, "_experts_implementation", None) == MEGAMOE


class EPImplementationInterface:
    """The registry of implementations: a name to a class. Shared by the process.

    `DistributedConfig(ep_implementation="my_ep")` looks a name up here.
    """

    _classes: ClassVar[dict[str, type[EPImplementation]]] = {}
    _built_in: ClassVar[set[str]] = set()

    @classmethod
    def register(cls, name: str, implementation: object) -> None:
        """Give `implementation` a name. Registering a name of one's own again replaces it.

        Raises:
            TypeError: not a subclass of `EPImplementation`.
            ValueError: the name of a built-in implementation.
        """
        if not (isinstance(implementation, type) and issubclass(implementation, EPImplementation)):
            raise TypeError(
                f"register({name!r}, ...) takes a subclass of EPImplementation, got {implementation!r}."
            )
        if name in cls._built_in:
            raise ValueError(
                f"{name!r} is a built-in implementation and cannot be replaced; choose another name."
            )
        cls._classes[name] = implementation

    @classmethod
    def get(cls, name: str) -> type[EPImplementation]:
        """The class of that name.

        Raises:
            ValueError: no such name; the error lists those there are.
        """
        if name not in cls._classes:
            near = difflib.get_close_matches(str(name), cls._classes, n=1)
            raise ValueError(
                f"ep_implementation={name!r} names no registered implementation; known are "
                f"{', '.join(map(repr, cls.names()))}{f' (did you mean {near[0]!r}?)' if near else ''}. "
                "Register one's own with EPImplementationInterface.register(name, cls)."
            )
        return cls._classes[name]

    @classmethod
    def names(cls) -> list[str]:
        """All names, in the order of registration."""
        return list(cls._classes)

    @classmethod
    def _register_built_in(cls, **classes: type[EPImplementation]) -> None:
        for name, implementation in classes.items():
            cls.register(name, implementation)
        cls._built_in.update(classes)
