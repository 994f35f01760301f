"""Private APIs of other systems, with the versions they were seen in."""

from __future__ import annotations

from typing import Any


def transformers_expert_parallel() -> Any:
    """The module of EP implementations in transformers (5.24; 5.17 has none)."""
    from transformers.distributed import expert_parallel

    return expert_parallel


__all__ = ["transformers_expert_parallel"]
