"""A checkpoint of a small model with AdamW's moments on 8 ranks, in each layout."""

from __future__ import annotations

from .layouts import LAYOUTS
from .programs import numbers

Found = dict[str, dict[str, float]]


class Checkpoint:
    """Times over those of plain files and a plain copy of as many bytes in the same run; bytes.

    There is no native value: transformers 5.24 refuses to save the optimizer's state of a sharded model.
    """

    params = (LAYOUTS,)
    param_names = ("layout",)
    timeout = 60
    version = "1"

    def setup_cache(self) -> Found:
        return numbers("checkpoint.py", ",".join(LAYOUTS))

    setup_cache.timeout = 900

    def track_save_over_plain_write(self, found: Found, layout: str) -> float:
        """A save that is waited for, over a file of each rank with fsync."""
        return found[layout]["save_seconds"] / found[layout]["plain_write_seconds"]

    def track_load_seconds(self, found: Found, layout: str) -> float:
        return found[layout]["load_seconds"]

    def track_stall_cpu_seconds_per_rank(self, found: Found, layout: str) -> float:
        """What a save in the background, not the first one, takes of the training thread."""
        return found[layout]["stall_cpu_seconds"]

    def track_stall_cpu_over_plain_copy(self, found: Found, layout: str) -> float:
        return found[layout]["stall_cpu_seconds"] / found[layout]["copy_cpu_seconds"]

    def track_saved_bytes(self, found: Found, layout: str) -> float:
        return found[layout]["saved_bytes"]

    def track_staged_bytes_per_rank(self, found: Found, layout: str) -> float:
        """Host memory that a save in the background keeps, on the rank that keeps most."""
        return found[layout]["staged_bytes"]

    track_save_over_plain_write.unit = "ratio"
    track_load_seconds.unit = "s"
    track_stall_cpu_seconds_per_rank.unit = "s"
    track_stall_cpu_over_plain_copy.unit = "ratio"
    track_saved_bytes.unit = "bytes"
    track_staged_bytes_per_rank.unit = "bytes"
