"""`ep_plans.boxes` under the name that this package uses."""

from ep_plans.boxes import (
    Box,
    Interval,
    Part,
    clipped,
    intersection,
    length,
    lengths,
    local_box,
    numel,
    pieces,
    positions,
    shifted,
    whole_box,
)

__all__ = [
    "Box",
    "Interval",
    "Part",
    "clipped",
    "intersection",
    "length",
    "lengths",
    "local_box",
    "numel",
    "pieces",
    "positions",
    "shifted",
    "whole_box",
]
