"""Which rank does what: the arithmetic of a layout, with no process group and no torch call.

E experts of a layer, P ranks of an EP group.

[Note: two views of the same ranks]
A rank has one place in the dense view and one in the expert view, innermost axis last, so that
the ranks of a TP group and of an EP group are consecutive::

    dense:   (pp, dp_replicate, fsdp,  tp)
    expert:  (pp, dp_replicate, efsdp, ep)      efsdp = fsdp * tp / ep

Both cover the same ranks of one replica of one pipeline stage (`fsdp * tp == efsdp * ep`), so
EP needs no process of its own. A rank's batch follows from `dp_replicate` and `fsdp` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ep_mesh import _picture

VIEWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dense": ("pp", "dp_replicate", "fsdp", "tp"),
        "expert": ("pp", "dp_replicate", "efsdp", "ep"),
    }
)
"""The axes of each view, outermost first."""

AXES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "pp": ("dense", ("pp",)),
        "dp_replicate": ("dense", ("dp_replicate",)),
        "fsdp": ("dense", ("fsdp",)),
        "tp": ("dense", ("tp",)),
        "efsdp": ("expert", ("efsdp",)),
        "ep": ("expert", ("ep",)),
        "dp": ("dense", ("dp_replicate", "fsdp")),
        "fsdp_tp": ("dense", ("fsdp", "tp")),
        "world": ("dense", ("pp", "dp_replicate", "fsdp", "tp")),
    }
)
"""Every axis by name: its view, and the axes of that view that it flattens (outermost first)."""


def legal_ep_sizes(tp: int, fsdp: int, num_experts: int | None = None) -> list[int]:
    """The EP sizes that a layout allows, ascending; 1 stands for "EP off".

    A size above 1 is a multiple of `tp`, divides `fsdp * tp` and, if it is given,
    `num_experts`.
    """
    sizes = [tp * n for n in range(1, fsdp + 1) if fsdp % n == 0]
    legal = {1, *(size for size in sizes if num_experts is None or num_experts % size == 0)}
    return sorted(legal)


def _listed(sizes: list[int]) -> str:
    return ", ".join("1 (off)" if size == 1 else str(size) for size in sizes)


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis has, and where each rank stands.

    Args:
        tp: ranks of a TP group; they hold the same batch.
        fsdp: ranks that FSDP shards the dense parameters over.
        dp_replicate: HSDP replicas.
        pp: pipeline stages.
        ep: ranks that together hold one set of experts; 1 is EP off.

    Raises:
        ValueError: a size below 1, or an `ep` that the other sizes don't allow; it names the
            values and the sizes that would fit.
    """

    tp: int = 1
    fsdp: int = 1
    dp_replicate: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "fsdp", "dp_replicate", "pp", "ep"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}_size must be a whole number >= 1, got {size!r}.")
        if self.ep > 1 and (self.ep % self.tp or (self.fsdp * self.tp) % self.ep):
            raise ValueError(
                f"ep_size={self.ep} does not fit tp_size={self.tp} and fsdp_size={self.fsdp}: it "
                f"must be a multiple of tp_size ({self.tp}) and divide fsdp_size * tp_size "
                f"({self.fsdp * self.tp}). Sizes that fit: "
                f"{_listed(legal_ep_sizes(self.tp, self.fsdp))}."
            )

    @property
    def world_size(self) -> int:
        """Number of processes; EP adds none."""
        return self.tp * self.fsdp * self.dp_replicate * self.pp

    @property
    def efsdp(self) -> int:
        """Copies of the expert set inside a replica: ranks that FSDP-shard the same experts."""
        return self.fsdp * self.tp // self.ep

    @property
    def data_parallel_size(self) -> int:
        """Number of distinct batches."""
        return self.dp_replicate * self.fsdp

    def size(self, axis: str) -> int:
        """Number of ranks of a group on `axis`, any name of `AXES`."""
        _, parts = _axis(axis)
        return math.prod(getattr(self, part) for part in parts)

    def shape(self, view: str) -> tuple[int, ...]:
        """The sizes of the axes of a view (`VIEWS`), outermost first."""
        return tuple(getattr(self, axis) for axis in VIEWS[view])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on pp, dp_replicate, fsdp, tp, efsdp and ep.

        Raises:
            ValueError: `rank` is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is outside the world of {self.world_size} ranks "
                f"(0 to {self.world_size - 1})."
            )
        found: dict[str, int] = {}
        for axes in VIEWS.values():
            rest = rank
            for axis in reversed(axes):
                rest, found[axis] = divmod(rest, getattr(self, axis))
        order = ("pp", "dp_replicate", "fsdp", "tp", "efsdp", "ep")
        return {axis: found[axis] for axis in order}

    def coordinate(self, axis: str, rank: int) -> int:
        """The place of `rank` in its group on `axis`, any name of `AXES`."""
        _, parts = _axis(axis)
        at = self.coordinates(rank)
        place = 0
        for part in parts:
            place = place * getattr(self, part) + at[part]
        return place

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group of `rank` on `axis`, ascending, `rank` among them.

        `axis` is any name of `AXES`: an axis of a view, or `"dp"` (all batches),
        `"fsdp_tp"` (a replica of one stage) or `"world"`.
        """
        view, parts = _axis(axis)
        at = self.coordinates(rank)
        steps: list[tuple[str, int]] = []
        stride = 1
        for name in reversed(VIEWS[view]):
            steps.append((name, stride))
            stride *= getattr(self, name)
        ranks = [sum(at[name] * step for name, step in steps if name not in parts)]
        for name, step in reversed(steps):
            if name in parts:
                ranks = [base + i * step for base in ranks for i in range(getattr(self, name))]
        return tuple(sorted(ranks))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of `axis`, by their lowest rank; together each rank once."""
        seen: set[int] = set()
        found: list[tuple[int, ...]] = []
        for rank in range(self.world_size):
            if rank not in seen:
                found.append(self.group(axis, rank))
                seen.update(found[-1])
        return found

    def batch_of(self, rank: int) -> int:
        """Which of the `data_parallel_size` data shards the batch of `rank` comes from.

        The ranks of a TP group, and the stages of a pipeline, share a batch.
        """
        return self.coordinate("dp", rank)

    def experts_of(self, rank: int, num_experts: int) -> range:
        """The global ids of the experts that `rank` computes, `num_experts / ep` of them."""
        self.check_experts(num_experts)
        count = num_experts // self.ep
        first = self.coordinates(rank)["ep"] * count
        return range(first, first + count)

    def check_experts(self, num_experts: int) -> None:
        """Check that each rank of an EP group can hold as many experts as the others.

        Raises:
            ValueError: `ep` does not divide `num_experts`; it names the sizes that fit.
        """
        if num_experts < 1 or num_experts % self.ep:
            raise ValueError(
                f"ep_size={self.ep} does not divide the {num_experts} experts of a layer. With "
                f"tp_size={self.tp} and fsdp_size={self.fsdp}, sizes that fit: "
                f"{_listed(legal_ep_sizes(self.tp, self.fsdp, num_experts))}."
            )

    def check_world_size(self, processes: int) -> None:
        """Check that `processes` is what the sizes multiply to.

        Raises:
            ValueError: it is not; it names a size that would fit, and the command to start.
        """
        if processes == self.world_size:
            return
        others = self.tp * self.dp_replicate * self.pp
        fits = (
            f", or set fsdp_size={processes // others} for {processes}"
            if processes % others == 0
            else ""
        )
        raise ValueError(
            f"tp_size={self.tp} * fsdp_size={self.fsdp} * dp_replicate_size={self.dp_replicate} * "
            f"pp_size={self.pp} = {self.world_size} processes, but {processes} "
            f"{'is' if processes == 1 else 'are'} running. Start {self.world_size} "
            f"(torchrun --nproc-per-node {self.world_size} on one machine){fits}."
        )

    def picture(self, num_experts: int | None = None, *, ranks_per_block: int = 8) -> str:
        """Draw who holds which batch and which experts.

        Args:
            num_experts: experts of a layer; None draws the places in the EP group instead.
            ranks_per_block: how many ranks stand side by side before a new block begins.

        Raises:
            ValueError: `ep` does not divide `num_experts`.
        """
        return _picture.draw(self, num_experts, ranks_per_block)


def _axis(axis: str) -> tuple[str, tuple[str, ...]]:
    try:
        return AXES[axis]
    except KeyError:
        raise ValueError(f"unknown axis {axis!r}; the axes are {', '.join(AXES)}.") from None
