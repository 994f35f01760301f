"""`ep_plans.shards` under the name that this package uses."""

from ep_plans.shards import (
    box_of,
    holders,
    home_of,
    replacement,
)

__all__ = [
    "box_of",
    "holders",
    "home_of",
    "replacement",
]
