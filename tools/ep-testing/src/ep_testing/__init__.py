"""Run functions on several gloo ranks from a pytest test: the `ranks` fixture."""

from ep_testing.pool import RankError, RankPool

__all__ = ["RankError", "RankPool"]
