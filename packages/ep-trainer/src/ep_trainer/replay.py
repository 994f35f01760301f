"""Router replay: the experts that a whole model chose in one forward, chosen again in another.

    B rows of a batch, S positions, T tokens that a layer sees, K experts per token, E experts of a layer

[Note: only the choice is replaced]
What a router makes of its scores differs between families: a softmax before or after the choice, a bias
that the choice alone sees, groups, a scale. All choose by a `topk` of scores [T, E]. From the begin of a
block to the call of its experts this one function is watched: recording keeps its indices; replaying gives
the recorded indices, and as its values the scores at them. What follows is the family's own code, gradients
included. A region under activation checkpointing keeps its ids, so its recomputation gets them too, also
where backward runs after the context has ended.
Source of the idea: Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers (2025).
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ep_dispatch.checkpointing import CheckpointMemory
from ep_dispatch.collectives import chunk_bounds, gather_over_group
from ep_mesh import ParallelMesh
from ep_mesh.world import gathered
from ep_plans import parallel_state
from ep_plans.sizes import text_config
from ep_trainer._compat import in_backward
from ep_trainer.moe_layers import MoELayer, moe_layers

_WATCH = "_ep_router_watch"


@contextlib.contextmanager
def record_routes(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the experts that every layer chooses in the forwards meanwhile.

    Args:
        model: of transformers, sharded or not; no pipeline stages.

    Yields:
        for each experts module, by name, the ids [B, S, K] int32 of all experts, on the layer's device;
        [T, K] if not `model` itself is called. They are those of this rank's whole batch in every layout.
        Further forwards are put behind along S, as `generate` needs it: it runs the prompt, then one
        position at a time. Layers that choose in another way than by `topk` are not in it.

    Raises:
        ValueError: there are no MoE layers, or pipeline stages.
        RuntimeError: at the end: no layer chose anything by `topk`.

    Cost: with sequence parallelism an all-gather of the ids per layer. No host synchronization.
    """
    found: dict[str, Tensor] = {}

    def keep(layer: MoELayer, ids_TK: Tensor, shape: tuple[int, int] | None) -> None:
        ids = _of_whole_batch(layer, ids_TK.int(), shape, watch.mesh)
        before = found.get(layer.name)
        found[layer.name] = ids if before is None else torch.cat([before, ids], dim=-2)

    watch = _watch_of(model)
    with watch.during(lambda layer, shape: None, keep):
        yield found
    if not found:
        raise RuntimeError(
            f"record_routes: no layer of {type(model).__name__} chose experts by topk meanwhile. Run a forward "
            "of the model in the context; a router that chooses in another way can't be recorded."
        )


@contextlib.contextmanager
def replay_routes(model: nn.Module, routes: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the layers choose recorded experts in the forwards meanwhile, with weights of their own routers.

    The gradient reaches the routers through the weights, as always.

    Args:
        model: as for `record_routes`; in any layout, not only that of the recording.
        routes: by name of the experts module, integer ids [B, S, K] or [T, K] of this rank's batch, those
            of all experts. A token with a -1 among its ids chooses by itself, and so does a layer that is
            left out.

    Raises:
        ValueError: on every rank: a name is no layer, ids are no integers or no expert's; there are no
            routes, or pipeline stages. On this rank, in a forward: its batch has another number of tokens
            (so has a layer that a forward runs several times), or a token another number of experts;
            activation checkpointing is reentrant.
        RuntimeError: at the end: a layer of `routes` chose nothing by `topk`.

    Cost: an all-gather of an object when it begins, and a host synchronization per layer; none later.
    """
    watch = _watch_of(model)
    problem = _problem(routes, watch)
    said = gathered(problem)
    for rank, theirs in enumerate(said):
        if theirs is not None:
            raise ValueError(f"replay_routes{f' (rank {rank})' if len(said) > 1 else ''}: {theirs}")
    replayed: set[str] = set()

    def give(layer: MoELayer, shape: tuple[int, int] | None) -> Tensor | None:
        ids = routes.get(layer.name)
        if ids is None:
            return None
        return _of_this_rank(layer, ids, shape, watch.mesh)

    def keep(layer: MoELayer, ids_TK: Tensor, shape: tuple[int, int] | None) -> None:
        replayed.add(layer.name)

    with watch.during(give, keep):
        yield
    if left := sorted(set(routes) - replayed):
        raise RuntimeError(
            f"replay_routes: {left[0]} chose no experts by topk meanwhile, so its ids were not used. "
            "Run a forward of the model in the context; leave out layers that choose in another way."
        )


Give = Callable[[MoELayer, tuple[int, int] | None], Tensor | None]
Keep = Callable[[MoELayer, Tensor, tuple[int, int] | None], None]


class _Choice(TorchFunctionMode):
    """Watches the choices of a router.

    Attributes:
        ids: to give instead; None: the router's own.
        chosen: the last ones.
        other_slots: the K of a choice that the ids do not fit.
    """

    def __init__(self, layer: MoELayer, ids_TK: Tensor | None) -> None:
        super().__init__()
        self.layer, self.ids = layer, ids_TK
        self.chosen: Tensor | None = None
        self.other_slots: int | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not Tensor.topk:
            return own
        scores = args[0] if args else (kwargs or {})["input"]
        ids_TK: Tensor = own[1]
        if (
            scores.ndim != 2
            or scores.shape[1] < self.layer.num_experts
            or len(ids_TK) != len(scores)
        ):
            return own  # of groups of experts
        if self.ids is None:
            self.chosen = ids_TK
            return own
        if self.ids.shape[1] != ids_TK.shape[1]:
            self.other_slots = ids_TK.shape[1]
            return own
        if len(self.ids) != len(scores):
            raise ValueError(
                f"{self.layer.name} sees {len(scores)} tokens, and {len(self.ids)} are to be replayed: give "
                "the ids of this batch, -1 for tokens that were not recorded."
            )
        ids = self.ids.to(scores.device, torch.int64)
        self.chosen = ids_TK = torch.where(ids.lt(0).any(1, keepdim=True), ids_TK, ids)
        return torch.return_types.topk((scores.gather(1, ids_TK), ids_TK))


class _WatchedLayer:
    """The hooks of a layer: nothing is done but in a context, or in the recomputation of one's forward."""

    def __init__(self, layer: MoELayer, watch: _Watch) -> None:
        self.layer, self.watch = layer, watch
        self._memory = CheckpointMemory[Tensor]()
        self._choice: _Choice | None = None
        self._recomputes = False
        self._running = contextlib.ExitStack()
        self.handles = [
            layer.block.register_forward_pre_hook(self._begin),
            layer.experts.register_forward_pre_hook(self._chosen),
            layer.block.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: nn.Module, args: Any) -> None:
        ids_TK = self._memory.recall()
        self._recomputes = ids_TK is not None
        if ids_TK is None:
            if self.watch.give is None or in_backward():
                return
            ids_TK = self.watch.give(self.layer, self.watch.shape)
            if ids_TK is not None and self.watch.wants_grad and not torch.is_grad_enabled():
                raise ValueError(
                    f"{self.layer.name}: reentrant activation checkpointing computes it again without its "
                    "recorded ids; take use_reentrant=False."
                )
        self._choice = _Choice(self.layer, ids_TK)
        # Compiled, each choice would be code of its own.
        self._running.enter_context(torch.compiler.set_stance("force_eager"))
        self._running.enter_context(self._choice)

    def _chosen(self, module: nn.Module, args: Any) -> None:
        choice = self._choice
        self._end()
        if choice is not None and choice.other_slots is not None and choice.chosen is None:
            assert choice.ids is not None
            raise ValueError(
                f"{self.layer.name} chooses {choice.other_slots} experts per token, and "
                f"{choice.ids.shape[1]} are to be replayed."
            )
        if choice is None or choice.chosen is None or self._recomputes:
            return
        self._memory.remember(choice.chosen)
        if self.watch.keep is not None:
            self.watch.keep(self.layer, choice.chosen.detach(), self.watch.shape)

    def _end(self, *call: Any) -> None:
        self._choice = None
        self._running.close()


class _Watch:
    """Of a model.

    Attributes:
        state: of the model, if it is sharded.
        mesh: its mesh.
        layers: by the name of their experts.
        give, keep: of the context that runs; None: none does.
        shape: B and S of the forward that runs, if the model was called itself.
        wants_grad: whether that forward has gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self.state = state = parallel_state(model)
        if state is not None and state.pipeline is not None:
            raise ValueError(
                "routes can't be recorded or replayed over pipeline stages (pp_size > 1): each sees "
                "micro-batches of its own layers; take another layout."
            )
        self.mesh: ParallelMesh | None = None if state is None else state.mesh
        layers = [layer for layer in moe_layers(model) if _is_routed(layer)]
        if not layers:
            raise ValueError(f"{type(model).__name__} has no layers with routed experts.")
        self.layers = {layer.name: _WatchedLayer(layer, self) for layer in layers}
        self.extra_experts = int(getattr(text_config(model), "zero_expert_num", 0) or 0)
        self.give: Give | None = None
        self.keep: Keep | None = None
        self.shape: tuple[int, int] | None = None
        self.wants_grad = False
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def close(self) -> None:
        """Take the hooks away."""
        for handle in (*self._handles, *(h for each in self.layers.values() for h in each.handles)):
            handle.remove()

    @contextlib.contextmanager
    def during(self, give: Give, keep: Keep) -> Iterator[None]:
        """Let every layer's choice be that of `give` (None: its own), and told to `keep`."""
        if self.give is not None:
            raise RuntimeError("routes of this model are being recorded or replayed already.")
        self.give, self.keep = give, keep
        try:
            yield
        finally:
            self.give = self.keep = None

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.give is None:
            return
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        shown = (given.get(name) for name in ("input_ids", "inputs_embeds"))
        batch = next((x for x in shown if isinstance(x, Tensor) and x.ndim >= 2), None)
        self.shape = None if batch is None else (batch.shape[0], batch.shape[1])
        self.wants_grad = torch.is_grad_enabled()

    def _end(self, *call: Any) -> None:
        self.shape, self.wants_grad = None, False


def _is_routed(layer: MoELayer) -> bool:
    """Whether tokens are routed to it: other modules have stacked weights too (shared experts, a convolution)."""
    own_name = layer.name.rpartition(".")[2]
    return layer.spread or ("experts" in own_name and "shared" not in own_name)


def _watch_of(model: nn.Module) -> _Watch:
    """That of the model, made at its first use; anew if the model was sharded since."""
    watch: _Watch | None = vars(model).get(_WATCH)
    if watch is None or watch.state is not parallel_state(model):
        if watch is not None:
            watch.close()
        watch = vars(model)[_WATCH] = _Watch(model)
    return watch


def _problem(routes: Mapping[str, Any], watch: _Watch) -> str | None:
    """What is wrong with the routes, as far as they alone tell."""
    if not routes:
        return f"there are no routes; the model's layers are {', '.join(watch.layers)}."
    for name, ids in routes.items():
        if name not in watch.layers:
            near = difflib.get_close_matches(name, watch.layers, n=1) or list(watch.layers)[:1]
            return f"{name!r} is no experts module of this model; did you mean {near[0]!r}?"
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim < 2:
            return f"{name}: expert ids are integers [B, S, K] or [T, K], got {_shown(ids)}."
        number = watch.layers[name].layer.num_experts + watch.extra_experts
        if ids.numel() and not (ids.min() >= -1 and ids.max() < number):
            return (
                f"{name}: expert ids must lie in [0, {number}), or be -1 where nothing was recorded, got ids "
                f"from {int(ids.min())} to {int(ids.max())}."
            )
    return None


def _shown(ids: Any) -> str:
    return f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__


def _of_whole_batch(
    layer: MoELayer, ids_TK: Tensor, shape: tuple[int, int] | None, mesh: ParallelMesh | None
) -> Tensor:
    """[B, S, K] of what a layer chose on this rank; [T, K] where B and S are not known."""
    if layer.sliced:
        assert mesh is not None
        rows, length = _known(layer, shape)
        ids = ids_TK.view(rows, -1, ids_TK.shape[1])
        return gather_over_group(ids.contiguous(), mesh.group("tp"), 1, size=length)
    if shape is None or shape[0] * shape[1] != len(ids_TK):
        return ids_TK
    return ids_TK.view(*shape, -1)


def _of_this_rank(
    layer: MoELayer, ids: Tensor, shape: tuple[int, int] | None, mesh: ParallelMesh | None
) -> Tensor:
    """[T, K] of what the layer sees on this rank."""
    if not layer.sliced:
        return ids.flatten(0, -2)
    assert mesh is not None
    rows, length = _known(layer, shape)
    if ids.shape[:-1].numel() != rows * length:
        raise ValueError(
            f"{layer.name}: the batch has {rows} x {length} tokens, and {ids.shape[:-1].numel()} are to be "
            "replayed: give the ids of this batch, -1 for tokens that were not recorded."
        )
    start, end = chunk_bounds(length, mesh.size("tp"), mesh.coordinate("tp"))
    return ids.reshape(rows, length, -1)[:, start:end].flatten(0, 1)


def _known(layer: MoELayer, shape: tuple[int, int] | None) -> tuple[int, int]:
    if shape is None:
        raise ValueError(
            f"{layer.name} sees a slice of the sequence, and the shape of the batch is not known: call the "
            "model that was given itself, with input_ids or inputs_embeds."
        )
    return shape
