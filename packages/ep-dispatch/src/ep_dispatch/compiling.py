"""What torch.compile shall run as it is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ._compat import disable_compile

__all__ = ["as_written"]

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
