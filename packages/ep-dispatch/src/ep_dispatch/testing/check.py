"""`check`: run laws on every rank of a group, and let all ranks fail together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from .experts import KitExperts
from .laws import LAWS
from .setting import DispatcherFactory, NoHistoryError, Place, Setting, gather
from .workloads import WORKLOADS

__all__ = ["CAPABILITIES", "ConformanceError", "Failure", "cases", "check"]

CAPABILITIES: dict[str, str] = {
    "skipped": "a slot with expert id -1 contributes nothing",
    "uneven": "ranks may hold different numbers of tokens",
    "empty": "a rank may hold no token",
    "repeated": "a token may name an expert more than once",
    "gradients": "it can be differentiated",
    "retain_graph": "it can be differentiated twice",
    "in_flight": "a call may begin before the backward of another",
}
"""What a dispatcher may do without: names for `without`."""


@dataclass(frozen=True)
class Failure:
    """A law that a dispatcher breaks on one rank.

    Attributes:
        law, workload: their names.
        rank: in the EP group.
        experts: the kind of experts.
        dtype: of the hidden states.
        error: what is wrong.
    """

    law: str
    workload: str
    rank: int
    experts: str
    dtype: torch.dtype
    error: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"law {self.law!r}, workload {self.workload!r}, rank {self.rank} ({self.experts}, {dtype}): "
            f"{self.error}"
        )


class ConformanceError(AssertionError):
    """Laws that a dispatcher breaks, on any rank of the group; raised on all of its ranks.

    Attributes:
        failures: all of them, by law and rank.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        told = dict.fromkeys(f"  {name}: {LAWS[name].what}" for name in (f.law for f in failures))
        lines = "\n".join(f"- {failure}" for failure in failures)
        super().__init__(f"the dispatcher breaks\n{chr(10).join(told)}\n{lines}")


def cases(without: Collection[str] = ()) -> list[tuple[str, str]]:
    """All pairs (law, workload) that a dispatcher must pass, for `pytest.mark.parametrize`.

    Args:
        without: capabilities that it does not claim (`CAPABILITIES`).

    Raises:
        ValueError: an unknown capability.
    """
    _known("without", without, CAPABILITIES)
    missing = set(without)
    return [
        (law, workload)
        for law in LAWS
        for workload in WORKLOADS
        if not missing & (LAWS[law].needs | WORKLOADS[workload].needs)
    ]


def check(
    factory: DispatcherFactory,
    workload: str,
    laws: str | Collection[str] | None = None,
    *,
    ep_group: ProcessGroup | None = None,
    tp_group: ProcessGroup | None = None,
    without: Collection[str] = (),
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    num_local_experts: int = 2,
    hidden: int = 8,
) -> None:
    """Check a dispatcher on one workload. Every rank of `ep_group` calls it, with the same arguments.

    A rank that holds the same tokens as others (`tp_group`) gets their output's gradient whole, and must
    give the whole gradients of its tokens; an expert's parameters get the sum over the group's distinct
    tokens.

    Args:
        factory: builds the dispatcher under test; called anew for each law, kind of experts and dtype.
        workload: one of `WORKLOADS`.
        laws: one or some of `LAWS`. None: all.
        ep_group: the ranks that hold distinct experts. None: one rank.
        tp_group: those of them that hold the same tokens as this rank. None: this rank alone.
        without: capabilities that the dispatcher does not claim (`CAPABILITIES`): laws that need one are
            left out, and so is the workload, if it does.
        device: where the dispatcher's tensors are.
        dtypes: of the hidden states and weights; float32 and float64 hold all sums exactly.
        num_local_experts: E / P, at least 2 for a workload to be what its name says.
        hidden: H.

    Raises:
        ConformanceError: on every rank, with the failures of all ranks.
        ValueError: an unknown name, or a dtype in which sums are not exact.
        Exception: what the dispatcher itself raises, on the rank where it does, with a note that names
            the law and the workload. Other ranks may wait for it: start the ranks with a time limit.

    Cost: two to five forwards and backwards a law, kind of experts and dtype, and small all-gathers.
    """
    chosen = list(LAWS) if laws is None else [laws] if isinstance(laws, str) else list(laws)
    _known("laws", chosen, LAWS)
    _known("workload", [workload], WORKLOADS)
    if wrong := set(dtypes) - {torch.float32, torch.float64}:
        raise ValueError(
            f"dtypes must be float32 and float64, whose sums are exact here, got {wrong}."
        )
    allowed = [law for law, name in cases(without) if name == workload and law in chosen]
    place = Place.of(ep_group, tp_group)
    failures: list[Failure] = []
    for law in allowed:
        for kind in LAWS[law].kinds:
            for dtype in dtypes:
                size = {"num_local_experts": num_local_experts, "hidden": hidden}
                where = {"dtype": dtype, "device": torch.device(device)}
                failures += _failures(place, factory, law, workload, kind, **size, **where)
    # Only now, so that no rank leaves while others still dispatch.
    everywhere = [failure for part in gather(failures, ep_group) for failure in part]
    if everywhere:
        order = list(LAWS)
        raise ConformanceError(sorted(everywhere, key=lambda f: (order.index(f.law), f.rank)))


def _failures(
    place: Place,
    factory: DispatcherFactory,
    law: str,
    workload: str,
    kind: type[KitExperts],
    **settings: object,
) -> list[Failure]:
    try:
        setting = Setting(place, factory, WORKLOADS[workload], kind, **settings)  # type: ignore[arg-type]
        try:
            errors = list(LAWS[law].errors(setting))
        except NoHistoryError as found:
            errors = [str(found)]
    except Exception as error:
        error.add_note(f"law {law!r}, workload {workload!r}, rank {place.rank} ({kind.__name__})")
        raise
    return [
        Failure(law, workload, place.rank, kind.__name__, setting.dtype, error) for error in errors
    ]


def _known(argument: str, names: Collection[str], known: Collection[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"{argument}: {', '.join(map(repr, unknown))} is none of {', '.join(map(repr, known))}."
        )
