"""What torch.compile shall run as it is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ._compat import disable_compile, group_of_name
from .keeping import kept

__all__ = ["as_operator", "as_written"]

Method = TypeVar("Method", bound=Callable[..., Any])


def as_written(method: Method) -> Method:
    """A method that torch.compile does not look into: one break of the graph at its call.

    For what works with sizes that the host reads from the routing. Traced, it would break at the read and
    again in each function around it, and each size of 0 or 1, or new in other ways, would be compiled
    anew. Asked at the call, not when decorated: that would import the compiler.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _run(functools.partial(method, *args, **kwargs))
        return method(*args, **kwargs)

    return cast(Method, call)


@disable_compile
def _run(function: Callable[[], Any]) -> Any:
    return function()


Collective = TypeVar("Collective", bound=Callable[..., Tensor])


def as_operator(
    name: str, *more: str, like: Callable[..., Tensor]
) -> Callable[[Collective], Collective]:
    """A collective `(x, group, *more) -> new tensor` that is one operator in a compiled graph.

    torch.compile would make functional collectives of torch's, which know nothing of `kept`. The
    operator runs what is written, when the graph runs: so a checkpointed region that is compiled takes
    the results of its recomputation from the tape too. (In backward there is no tape.)

    Args:
        name: of the operator, in the namespace `ep`.
        more: the further arguments of the operator's schema.
        like: what makes an empty result from the same arguments, for the compiler.
    """
    torch.library.define(
        f"ep::{name}", f"({', '.join(['Tensor x', 'str group', *more])}) -> Tensor"
    )

    def decorate(function: Collective) -> Collective:
        @torch.library.impl(f"ep::{name}", "default")
        def run(x: Tensor, group: str, *args: Any) -> Tensor:
            return kept(lambda: function(x, group_of_name(group), *args))

        @torch.library.register_fake(f"ep::{name}")  # type: ignore[untyped-decorator]
        def fake(x: Tensor, group: str, *args: Any) -> Tensor:
            return like(x, group_of_name(group), *args)

        @functools.wraps(function)
        def call(x: Tensor, group: ProcessGroup, *args: Any) -> Tensor:
            if torch.compiler.is_compiling():
                out: Tensor = getattr(torch.ops.ep, name)(x, group.group_name, *args)
                return out
            return function(x, group, *args)

        return cast(Collective, call)

    return decorate
