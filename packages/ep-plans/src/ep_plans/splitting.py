"""What of a model is a layer, what runs before and after, and whether it can be split between layers.

[Note: what can be split]
The model's loop over its layers must hand on the hidden states alone. That is read off the code of
the forward that runs the loop: one `for` over the layers, in which no other variable is carried from
one layer to the next; a layer that gives back a tuple hands on more. Modules that the forward uses
before the loop belong to the first stage, those that it uses after it to the last.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ep_plans.sizes import text_config


@dataclass(frozen=True)
class StageParts:
    """The parts of a model, by module name.

    Attributes:
        layers: the list of decoder layers.
        count: how many there are.
        embedding: the token embedding.
        first: what runs before the layers and has parameters, the embedding among it.
        last: what runs after them and has parameters: final norm, head.
        head: the output head; empty without one.
        tied: the head shares the embedding's weight.
    """

    layers: str
    count: int
    embedding: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    head: str
    tied: bool


def find_parts(model: nn.Module) -> StageParts:
    """Find the layers of a causal language model of transformers, and what runs around them.

    Raises:
        ValueError: the model can't be split into stages; it says why.
    """
    name = type(model).__name__

    def refuse(reason: str) -> ValueError:
        return ValueError(f"{name} can't be split into pipeline stages: {reason} Use pp_size=1.")

    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise refuse("it is an encoder and a decoder, not one list of layers.")
    embedding, head = _embeddings(model)
    modules = dict(model.named_modules())
    names = {module: found for found, module in modules.items()}
    if not isinstance(embedding, nn.Embedding) or embedding not in names:
        raise refuse("it has no token embedding.")
    owner_name = names[embedding].rpartition(".")[0]
    owner = modules[owner_name]
    prefix = f"{owner_name}." if owner_name else ""
    lists = [child for child, module in owner.named_children() if isinstance(module, nn.ModuleList)]
    count = getattr(text_config(model), "num_hidden_layers", None)
    lists = [child for child in lists if len(owner.get_submodule(child)) == count] or lists
    if len(lists) != 1:
        raise refuse(f"{type(owner).__name__} has {len(lists)} lists of layers, not one.")
    layers = owner.get_submodule(lists[0])
    assert isinstance(layers, nn.ModuleList)
    loop = _layer_loop(owner, lists[0])
    if isinstance(loop, str):
        raise refuse(loop)
    for layer in layers:
        if _returns_tuple(layer):
            raise refuse(f"{type(layer).__name__} hands on more than the hidden states.")
    around = _around(owner, loop, lists[0], prefix)
    if isinstance(around, str):
        raise refuse(around)
    first, last = around
    if head is not None and head in names:
        last.append(names[head])
    known = (f"{prefix}{lists[0]}", *first, *last)
    others = sorted(
        {p for p, _ in model.named_parameters() if not any(p.startswith(f"{k}.") for k in known)}
    )
    if others:
        raise refuse(f"{others[0]} belongs to no layer, embedding, final norm or head.")
    shared = _shared_by_layers(layers)
    if shared:
        raise refuse(f"its layers share a parameter, {shared}.")
    tied = _is_tied(model, names, embedding, head)
    return StageParts(
        layers=f"{prefix}{lists[0]}",
        count=len(layers),
        embedding=names[embedding],
        first=tuple(first),
        last=tuple(last),
        head=names.get(head, "") if head is not None else "",
        tied=tied,
    )


class _Loop:
    """The forward's loop over the layers."""

    def __init__(self, tree: ast.AST, loop: ast.For) -> None:
        self.tree, self.loop = tree, loop

    def uses(self, child: str) -> tuple[bool, bool]:
        """Whether `self.child` is used before the loop, and in or after it."""
        lines = [
            node.lineno
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Attribute)
            and node.attr == child
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ]
        end = self.loop.end_lineno or self.loop.lineno
        inside = any(self.loop.lineno <= line <= end for line in lines)
        before = inside or any(line < self.loop.lineno for line in lines)
        return before, inside or any(line > end for line in lines)


def _around(
    owner: nn.Module, loop: _Loop, layers: str, prefix: str
) -> tuple[list[str], list[str]] | str:
    """What has parameters and runs before the layers, and after them; or why that can't be told."""
    first: list[str] = []
    last: list[str] = []
    for child, module in owner.named_children():
        if child == layers or next(module.parameters(), None) is None:
            continue
        before, after = loop.uses(child)
        if before == after:
            return (
                f"{type(owner).__name__}.{child} is used both before and after the layers, or in "
                "their loop."
            )
        (first if before else last).append(f"{prefix}{child}")
    return first, last


def _source(forward: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return None


def _layer_loop(owner: nn.Module, layers: str) -> _Loop | str:
    """The one loop over the layers, or why they can't be split."""
    name = type(owner).__name__
    tree = _source(type(owner).forward)
    if tree is None:
        return f"the source of {name}.forward can't be read."
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and f"self.{layers}" in ast.unparse(node.iter)
    ]
    if len(loops) != 1:
        return f"{name} runs its layers in {len(loops)} loops, not in one."
    loop = loops[0]
    before, holders = _assigned_before(tree, loop.lineno)
    carried = sorted(_carried(loop.body, before) | (_names(loop.body, ast.Load) & holders))
    if carried:
        return f"its layers hand on {', '.join(carried)} beside the hidden states."
    return _Loop(tree, loop)


def _assigned_before(tree: ast.AST, line: int) -> tuple[set[str], set[str]]:
    """The names that have a value before a line, and those of them that are an empty list or dict."""
    assigned = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value and node.lineno < line
    ]
    nothing = ("{}", "[]", "dict()", "list()")
    empty = [n for n in assigned if n.value is not None and ast.unparse(n.value) in nothing]
    filled = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Subscript, ast.Attribute))
        and isinstance(node.value, ast.Name)
        and node.lineno < line
    }
    return _names(assigned, ast.Store), _names(empty, ast.Store) - filled


def _carried(body: Sequence[ast.stmt], before: set[str]) -> set[str]:
    """The names, but `hidden_states`, of values that one turn of a loop leaves to the next."""
    carried: set[str] = set()
    fresh: set[str] = set()
    for statement in body:
        stored = _names([statement], ast.Store) & before
        carried |= {n for n in _names([statement], ast.Load) if n in before} & _names(
            body, ast.Store
        ) - fresh
        fresh |= stored
    return carried - {"hidden_states"}


def _names(nodes: Sequence[ast.AST], context: type[ast.expr_context]) -> set[str]:
    return {
        found.id
        for node in nodes
        for found in ast.walk(node)
        if isinstance(found, ast.Name) and isinstance(found.ctx, context)
    }


def _returns_tuple(layer: nn.Module) -> bool:
    tree = _source(type(layer).forward)
    return tree is not None and any(
        isinstance(node, ast.Return)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) > 1
        for node in ast.walk(tree)
    )


def _embeddings(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    found: list[nn.Module | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, getter)())
        except (AttributeError, NotImplementedError):
            found.append(None)
    return found[0], found[1]


def _is_tied(
    model: nn.Module,
    names: Mapping[nn.Module, str],
    embedding: nn.Module,
    head: nn.Module | None,
) -> bool:
    if head is None or head not in names:
        return False
    keys: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    shared = getattr(head, "weight", None) is getattr(embedding, "weight", head)
    return shared or f"{names[head]}.weight" in keys


def _shared_by_layers(layers: nn.ModuleList) -> str | None:
    seen: dict[int, int] = {}
    for i, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if seen.setdefault(id(parameter), i) != i:
                return f"{seen[id(parameter)]}.{name}"
    return None
