"""`ep_plans.safetensors_file` under the name that this package uses."""

from ep_plans.safetensors_file import (
    FileWriter,
    header,
    layout,
    row_pieces,
)

__all__ = [
    "FileWriter",
    "header",
    "layout",
    "row_pieces",
]
