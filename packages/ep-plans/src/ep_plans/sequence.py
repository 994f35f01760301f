"""Sequence parallelism: between TP regions each TP rank holds a slice of the sequence.

[Note: what runs on slices]
The first decoder layer's input is split along the sequence, the last one's output is gathered. Inside
a layer a child is one of three:
- a norm, or anything else that works token by token: it runs on the slice, and the gradient of its
  parameters is summed over the group;
- a block with dispatched experts: router and experts take the slice as it is; a shared expert with TP
  rules is a region of its own;
- a region (attention, a dense MLP, a block whose experts mask routes or are sharded by TP): its input
  is gathered, its output split again.
Router logits that the model gives back, for a loss on them, are gathered where it gives them back.
Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022).

Shapes: B batch, S sequence, H hidden size; a slice is [B, S / tp, H], or [B * S / tp, H] inside a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ep_dispatch.collectives import (
    chunk_bounds,
    gather_over_group,
    group_rank,
    group_size,
    split_over_group,
)
from ep_plans.patterns import is_below
from ep_plans.resolve import Plans
from ep_plans.styles import STYLES, Scope
from ep_plans.styles.base import Forward, Moved, around_forward, change_input, change_output

# Children that work token by token whatever their parameters look like.
_TOKENWISE = ("gate", "router", "shared_expert_gate")


_MARK = "_ep_sequence"


@dataclass
class _Sequence:
    """The whole batch whose slices the layer at work sees, which a slice doesn't tell.

    Set where the split is done, and noted on the tensors that the layers pass on. A layer that is run
    again for its backward (activation checkpointing), perhaps after another batch, finds it there.
    """

    batch: int = 0
    size: int = 0

    def note(self, *values: Any) -> None:
        for tensor in _tensors(values):
            setattr(tensor, _MARK, (self.batch, self.size))

    def recall(self, *values: Any) -> None:
        for tensor in _tensors(values):
            if (found := getattr(tensor, _MARK, None)) is not None:
                self.batch, self.size = found
                return


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def install_sequence_parallel(
    model: nn.Module,
    plans: Plans,
    group: ProcessGroup,
    stages: Sequence[range] | None = None,
) -> None:
    """Split the sequence over `group` between the TP regions of the decoder layers.

    Args:
        model: the model.
        plans: its rules.
        group: the TP group.
        stages: the layers that follow each other on this rank; None: all. Between stages the
            sequence is whole.

    Raises:
        ValueError: no decoder layers are found.
    """
    layers_name, layers = decoder_layers(model, plans)
    sequence = _Sequence()

    def split_first(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def split(x: Tensor) -> Tensor:
            sequence.batch, sequence.size = x.shape[0], x.shape[1]
            return split_over_group(x, group, 1)

        changed = change_input(split, args, kwargs)
        sequence.note(args, kwargs)
        return changed

    def recall(module: nn.Module, args: Any, kwargs: Any) -> None:
        sequence.recall(args, kwargs)

    def note(module: nn.Module, args: Any, output: Any) -> None:
        sequence.note(output)

    def gather_last(module: nn.Module, args: Any, output: Any) -> Any:
        return change_output(lambda x: gather_over_group(x, group, 1, size=sequence.size), output)

    for stage in stages or [range(len(layers))]:
        here = [layers[i] for i in stage]
        here[0].register_forward_pre_hook(split_first, with_kwargs=True)
        for layer in here[1:]:
            layer.register_forward_pre_hook(recall, with_kwargs=True)
        for layer in here[:-1]:
            layer.register_forward_hook(note)
        here[-1].register_forward_hook(gather_last)
    for name, _ in _regions(layers_name, layers, plans):
        _install_region(model.get_submodule(name), group, sequence)
    dispatched = _dispatched(plans)
    if dispatched:
        stack = model.get_submodule(layers_name.rpartition(".")[0])
        stack.register_forward_hook(
            _router_logits_of(group, sequence, all_on_slices=len(dispatched) == len(plans.experts))
        )


def partial_on_slices(model: nn.Module, plans: Plans) -> set[str]:
    """The parameters of the decoder layers that run on slices, experts apart."""
    layers_name, layers = decoder_layers(model, plans)
    regions = [name for name, _ in _regions(layers_name, layers, plans)]
    return {
        f"{layers_name}.{name}"
        for name, _ in layers.named_parameters()
        if not is_below(f"{layers_name}.{name}", (*regions, *_dispatched(plans)))
    }


def moved_by_slices(model: nn.Module, plans: Plans, hidden: int) -> Moved:
    """What splitting the sequence moves, beside what the styles do, in elements per token.

    The input of each region is gathered, and so is the gradient of its output; the whole stack of
    layers has them the other way round.
    """
    layers_name, layers = decoder_layers(model, plans)
    regions = sum(1 for _ in _regions(layers_name, layers, plans))
    return Moved(gathered=2 * hidden * (regions + 1))


def decoder_layers(model: nn.Module, plans: Plans) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers: the one with the experts, else the largest named `layers`."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "layers" and len(module)
    ]
    with_experts = [
        (name, module)
        for name, module in lists
        if any(is_below(expert, (name,)) for expert in plans.experts)
    ]
    if not lists:
        raise ValueError(
            f"enable_sequence_parallel=True, but {type(model).__name__} has no module list named "
            "'layers' whose sequence could be split. Set it to False for this model."
        )
    return max(with_experts or lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _dispatched(plans: Plans) -> list[str]:
    return [name for name in plans.experts if STYLES[plans.ep[name]].dispatches]


def _regions(
    layers_name: str, layers: nn.ModuleList, plans: Plans
) -> Iterator[tuple[str, nn.Module]]:
    dispatched = _dispatched(plans)
    for index, layer in enumerate(layers):
        for name, module in _regions_of(f"{layers_name}.{index}", layer, dispatched):
            style = plans.ep.get(name) or plans.tp.get(name)
            if style is not None and STYLES[style].scope is Scope.EXPERTS:
                raise ValueError(
                    f"enable_sequence_parallel=True: the experts {name} lie beside their router, not "
                    f"in a block with it, and {style!r} needs both to see the whole sequence. Override "
                    "it with 'ep_dispatch_experts' (ep_size > 1), which takes slices."
                )
            yield name, module


def _regions_of(
    name: str, module: nn.Module, dispatched: list[str]
) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}"
        if path in dispatched or child_name in _TOKENWISE:
            continue
        if any(is_below(experts, (path,)) for experts in dispatched):
            yield from _regions_of(path, child, dispatched)
        elif not _is_norm(child):
            yield path, child


def _is_norm(module: nn.Module) -> bool:
    return all(parameter.ndim <= 1 for parameter in module.parameters())


def _install_region(module: nn.Module, group: ProcessGroup, sequence: _Sequence) -> None:
    """Gather the input of `module`, split its output."""

    def gather(x: Tensor) -> Tensor:
        whole = gather_over_group(_as_3d(x, group, sequence), group, 1, size=sequence.size)
        return whole.flatten(0, 1) if x.ndim == 2 else whole

    def split(x: Tensor) -> Tensor:
        if x.ndim == 2:
            whole = x.unflatten(0, (sequence.batch, sequence.size))
            return split_over_group(whole, group, 1).flatten(0, 1)
        return split_over_group(x, group, 1)

    def run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = change_input(gather, args, kwargs)
        return change_output(split, forward(*args, **kwargs))

    around_forward(module, run)


def _router_logits_of(group: ProcessGroup, sequence: _Sequence, *, all_on_slices: bool) -> Any:
    """A hook that gives back router logits of the whole sequence, [B * S, E] of each layer.

    All ranks compute the same loss of them, and each takes its slice's part of the gradient.
    """

    def whole(logits: Tensor) -> Tensor:
        batched = _as_3d(logits, group, sequence)
        return gather_over_group(batched, group, 1, size=sequence.size).flatten(0, 1)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        logits = output.get("router_logits") if isinstance(output, dict) else None
        if logits and not all_on_slices:
            raise ValueError(
                "enable_sequence_parallel=True with output_router_logits=True: some experts of this model "
                "are dispatched and some not, so that some routers see slices of the sequence. Give all "
                "of them one style, or set one of the two to False."
            )
        if logits:
            output["router_logits"] = tuple(whole(x) for x in logits)
        return output

    return hook


def _as_3d(x: Tensor, group: ProcessGroup, sequence: _Sequence) -> Tensor:
    if x.ndim == 3:
        return x
    start, end = chunk_bounds(sequence.size, group_size(group), group_rank(group))
    batched: Tensor = x.unflatten(0, (sequence.batch, end - start))
    return batched
