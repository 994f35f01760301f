"""The layers of a model: which are alike, and a model of some of them.

L = layers of the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn


def find_layers(model: nn.Module) -> str | None:
    """The name of the list of layers; None if there is not one list alone."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    return found[0] if len(found) == 1 else None


def kinds_of_layers(model: nn.Module) -> list[list[int]]:
    """The numbers of the layers of each kind, by the first of each.

    Layers of one kind have the same class, parameters and place in every list of the config that has an
    entry for each layer.
    """
    name = find_layers(model)
    if name is None:
        return []
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    lists = [values for _, _, values in _lists_of(model, name, len(layers))]
    kinds: dict[Hashable, list[int]] = {}
    for number, layer in enumerate(layers):
        parts = tuple((part, type(module)) for part, module in layer.named_modules())
        shapes = tuple((part, tuple(p.shape)) for part, p in layer.named_parameters())
        told = tuple(str(values[number]) for values in lists)
        kinds.setdefault((parts, shapes, told), []).append(number)
    return list(kinds.values())


def keep_layers(model: nn.Module, kept: Sequence[int]) -> None:
    """Take all other layers away, from the list and from the config's lists. In place."""
    name = find_layers(model)
    assert name is not None, "the model has no list of layers"
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    count = len(layers)
    for config, key, values in _lists_of(model, name, count):
        setattr(config, key, [values[number] for number in kept])
    model.set_submodule(name, nn.ModuleList(layers[number] for number in kept))
    for config in _configs_of(model, name):
        if getattr(config, "num_hidden_layers", None) == count:
            config.num_hidden_layers = len(kept)


def _configs_of(model: nn.Module, name: str) -> list[Any]:
    """The configs of the modules around the list."""
    owners = [model]
    for part in name.split(".")[:-1]:
        owners.append(getattr(owners[-1], part))
    found = {id(config): config for owner in owners if (config := getattr(owner, "config", None))}
    return list(found.values())


def _lists_of(model: nn.Module, name: str, count: int) -> list[tuple[Any, str, Sequence[Any]]]:
    """The lists with an entry for each layer, with their config and key."""
    return [
        (config, key, values)
        for config in _configs_of(model, name)
        for key, values in vars(config).items()
        if isinstance(values, (list, tuple)) and len(values) == count
    ]
