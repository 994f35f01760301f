"""The state of a model, an optimizer and a scheduler as names, tensors and plain values.

Everything goes by parameter name, since groups differ between layouts (`ep_trainer.optim` splits
them by mesh): an optimizer's moments and its options, and the scheduler's values per group.
Moments in few bits are in a checkpoint as float32 (`ep_trainer.low_bit`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ep_plans import parallel_state
from ep_plans.shards import placed_like
from ep_trainer.checkpoint.errors import CheckpointError
from ep_trainer.checkpoint.files import read_json, write_json
from ep_trainer.low_bit import narrowed, widened

_OPTIMIZER = "optimizer.json"
_OF_THIS_RUN = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options that say how a step is computed: the resuming run's own hold."""
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "lrs")
"""Lists in a scheduler's state that have a value per group."""
_SCHEDULER = "scheduler."


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied one once.

    Raises:
        CheckpointError: the model has state that is no tensor.
    """
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    first: dict[int, str] = {}
    found: dict[str, Tensor] = {}
    for name in sorted(state, key=lambda name: name in tied):
        value = state[name]
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} of {type(model).__name__} is a {type(value).__name__}; a checkpoint "
                "holds tensors of the model only. Register it with the trainer's "
                "register_for_checkpoint."
            )
        if first.setdefault(id(value), name) == name:
            found[name] = value
    return found


def tensor_names(model: nn.Module, here: Collection[str]) -> set[str]:
    """The names of all pipeline stages together; `here`: those that `model_tensors` gives."""
    state = parallel_state(model)
    if state is None or state.pipeline is None:
        return set(here)
    names, parts = set(state.pipeline.tensors), state.pipeline.parts
    return names - {f"{parts.head}.weight"} if parts.tied else names


@dataclass
class OptimizerState:
    """An optimizer by parameter name.

    Attributes:
        tensors: moments and other tensors, by key.
        keys: for each parameter, what is in its state: a key of `tensors`, or a plain value.
        options: for each parameter, the options of its group (and the scheduler's values).
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """All but the tensors; parameters with the same options together."""
        return {"keys": self.keys, "groups": _grouped(self.options)}


def optimizer_state(
    optimizer: Optimizer, names: Mapping[int, str], scheduler: Any = None
) -> OptimizerState:
    """The state of an optimizer.

    Args:
        optimizer: any of torch's that keep per-parameter state.
        names: of the parameters, by `id`.
        scheduler: whose values per group go with the options.

    Raises:
        CheckpointError: a parameter without a name, or a value that can't be saved.
    """
    found = OptimizerState()
    per_group = {} if scheduler is None else _per_group(scheduler, len(optimizer.param_groups))
    for position, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name not in _OF_THIS_RUN}
        options |= {f"{_SCHEDULER}{path}": values[position] for path, values in per_group.items()}
        encoded = {name: _encoded(name, value) for name, value in options.items()}
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise CheckpointError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "model has not, so it has no name to be saved under."
                )
            found.options[name] = encoded
            found.keys[name] = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    full = f"{name}.{key}"
                    found.keys[name][key] = {"tensor": full}
                    found.tensors[full] = _like_parameter(full, widened(value), parameter)
                else:
                    found.keys[name][key] = {"value": _encoded(f"{name}.{key}", value)}
    return found


def optimizer_targets(
    optimizer: Optimizer,
    names: Mapping[int, str],
    described: Mapping[str, Any],
    stored: Mapping[str, Any],
    scheduler: Any = None,
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Tensors to read a saved state into, and what then makes it the optimizer's.

    Args:
        optimizer: the one that resumes.
        names: of its parameters, by `id`.
        described: what `OptimizerState.described` gave.
        stored: DCP's metadata of the tensors, by key.
        scheduler: which gets its values per group.

    Raises:
        CheckpointError: a parameter is not in the checkpoint's optimizer, a group would need two
            values of one option, or the optimizer is of another kind. Nothing is changed.
    """
    options = {name: group["options"] for group in described["groups"] for name in group["names"]}
    _check_kind(optimizer, described)
    targets: dict[str, Tensor] = {}
    states: list[tuple[Any, dict[str, Any]]] = []
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in optimizer.param_groups:
        saved: dict[str, Any] | None = None
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = names.get(id(parameter), "a parameter that the model has not")
            if name not in options:
                raise CheckpointError(
                    f"{name} is trained here, but the checkpoint's optimizer has no such parameter."
                )
            if saved is not None and saved != options[name]:
                differing = [key for key in saved if saved[key] != options[name].get(key)]
                raise CheckpointError(
                    f"{name} had other options ({', '.join(differing)}) than the parameters that it "
                    "shares a group of the optimizer with here; make the same groups as before."
                )
            saved = options[name]
            state = {}
            for key, where in described["keys"].get(name, {}).items():
                if "value" in where:
                    state[key] = _decoded(where["value"])
                    continue
                full = where["tensor"]
                if full not in stored:
                    raise CheckpointError(f"{full} of the optimizer is in no file")
                state[key] = targets[full] = _empty(stored[full], parameter, on_device)
            states.append((parameter, state))
        groups.append((group, saved or {}))

    def apply() -> None:
        optimizer.state.clear()
        for parameter, state in states:
            if state:
                optimizer.state[parameter] = {
                    key: narrowed(optimizer, parameter, key, value)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in state.items()
                }
        for group, saved in groups:
            for name, value in saved.items():
                if not name.startswith(_SCHEDULER):
                    group[name] = _as_before(group.get(name), _decoded(value))
        if scheduler is not None:
            _set_per_group(scheduler, [saved for _, saved in groups])

    return targets, apply


def _check_kind(optimizer: Optimizer, described: Mapping[str, Any]) -> None:
    """Refuse the state of another kind of optimizer, by the names of its options.

    One may have options more than the other: versions and low-bit variants do.
    """
    own = _option_names(group.keys() for group in optimizer.param_groups)
    saved = _option_names(group["options"].keys() for group in described["groups"])
    if not (own <= saved or saved <= own):
        raise CheckpointError(
            f"the checkpoint's optimizer is of another kind than {type(optimizer).__name__}: it has the "
            f"options {', '.join(sorted(saved - own))}, not {', '.join(sorted(own - saved))}. Go on with "
            "the optimizer that wrote it, or start anew from the model's weights."
        )


def _option_names(groups: Iterable[Iterable[str]]) -> set[str]:
    return {
        name
        for names in groups
        for name in names
        if name not in (*_OF_THIS_RUN, "initial_lr") and not name.startswith(_SCHEDULER)
    }


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """A scheduler's state but for its values per group."""
    state: dict[str, Any] = scheduler.state_dict()
    return _without_groups(state)


def load_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Give a scheduler a state; its values per group come with the optimizer's options."""
    scheduler.load_state_dict(_merged(scheduler.state_dict(), state))


def merged_descriptions(described: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the optimizers of all ranks say together; ranks may have different parameters."""
    keys: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for each in described:
        keys |= each["keys"]
        for group in each["groups"]:
            options |= dict.fromkeys(group["names"], group["options"])
    return {"keys": keys, "groups": _grouped(options)}


def read_optimizer(folder: Path) -> Mapping[str, Any]:
    """The description of the optimizer in a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    found: Mapping[str, Any] = read_json(folder / _OPTIMIZER)
    return found


def write_optimizer(folder: Path, described: Mapping[str, Any]) -> None:
    """Write what `merged_descriptions` gave."""
    write_json(folder / _OPTIMIZER, described)


def _grouped(options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for name in sorted(options):
        for group in groups:
            if group["options"] == options[name]:
                group["names"].append(name)
                break
        else:
            groups.append({"options": options[name], "names": [name]})
    return groups


def _like_parameter(full: str, value: Tensor, parameter: Tensor) -> Tensor:
    """State as a tensor whose box is known: the parameter's, or the whole of it on each rank."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if value.numel() == 1 and value.shape != parameter.to_local().shape:
        return value
    if value.shape == parameter.to_local().shape:
        return placed_like(parameter, value)
    raise CheckpointError(
        f"{full} of the optimizer has shape {tuple(value.shape)} on this rank, the parameter's part "
        f"{tuple(parameter.to_local().shape)}: state that is neither a value per element nor one per "
        "parameter can't be saved in shards."
    )


def _empty(stored: Any, parameter: Tensor, on_device: bool) -> Tensor:
    dtype: torch.dtype = stored.properties.dtype
    if tuple(stored.size) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.device if on_device else "cpu"
    return torch.empty(tuple(stored.size), dtype=dtype, device=device)


def _encoded(name: str, value: Any) -> Any:
    """A plain value as JSON keeps it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"item": value.item()}
    if isinstance(value, tuple | list):
        return [_encoded(name, each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encoded(name, each) for key, each in value.items()}}
    raise CheckpointError(
        f"{name} of the optimizer is a {type(value).__name__}, which isn't saved."
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if isinstance(value, dict):
        if "item" in value:
            return value["item"]
        return {key: _decoded(each) for key, each in value["dict"].items()}
    return value


def _as_before(old: Any, value: Any) -> Any:
    """A value in the form that the option has: a tensor stays one, so does a tuple."""
    if isinstance(old, Tensor) and not isinstance(value, Tensor):
        return torch.full_like(old, value)
    return tuple(value) if isinstance(old, tuple) else value


def _per_group(scheduler: Any, groups: int) -> dict[str, Sequence[Any]]:
    """Lists with a value per group in a scheduler, by their path; those inside of it too."""
    return {
        path: holder[name]
        for path, holder, name in _lists(scheduler.state_dict())
        if len(holder[name]) == groups
    }


def _lists(state: Any, prefix: str = "") -> list[tuple[str, dict[str, Any], str]]:
    found = []
    if isinstance(state, dict):
        for name, value in state.items():
            if name in _PER_GROUP and isinstance(value, list | tuple):
                found.append((f"{prefix}{name}", state, name))
            elif name == "_schedulers":
                for position, each in enumerate(value):
                    found += _lists(each, f"{prefix}{position}.")
    return found


def _without_groups(state: dict[str, Any]) -> dict[str, Any]:
    copied = {
        name: [_without_groups(dict(each)) for each in value] if name == "_schedulers" else value
        for name, value in state.items()
    }
    return {name: value for name, value in copied.items() if name not in _PER_GROUP}


def _merged(own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**own, **state}
    if "_schedulers" in state:
        pairs = zip(own["_schedulers"], state["_schedulers"], strict=True)
        merged["_schedulers"] = [_merged(mine, saved) for mine, saved in pairs]
    return merged


def _set_per_group(scheduler: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    state = scheduler.state_dict()
    for path, holder, name in _lists(state):
        key = f"{_SCHEDULER}{path}"
        if all(key in each for each in saved):
            holder[name] = [_decoded(each[key]) for each in saved]
    scheduler.load_state_dict(state)
