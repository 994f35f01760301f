"""`DistributedConfig`: the one object that says how a model is distributed.

Plain data and its rules. What needs the model (does a plan's key match, how many experts has a
layer) is checked when the model is known: `DistributedConfig.check_experts`, and `ep_plans`.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import torch.distributed as dist

from ep_mesh.layout import Layout

SHARED_BATCH_IMPLEMENTATIONS = ("all_reduce", "deepgemm_megamoe")
"""Built-in implementations whose EP group must be a TP group, since it must share one batch."""

PP_SCHEDULES: Mapping[str, int] = MappingProxyType(
    {"1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 2, "gpipe": 1}
)
"""The schedules of a pipeline by name, and how many stages each rank holds in it."""

_SIZES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")
_FLAGS = (
    "enable_sequence_parallel",
    "enable_expert_parallel",
    "fsdp_cpu_offload",
    "fsdp_mixed_precision",
)


@dataclass(frozen=True)
class DistributedConfig:
    """Sizes and plans of a distributed model; every size is a number after construction.

    Frozen, since the rules are checked when it is built: `dataclasses.replace` makes another one.

    Processes = `tp * fsdp * dp_replicate * pp`; EP adds none, it regroups the same ranks.

    Args:
        tp_size: ranks for tensor parallelism. None with `tp_plan` set: `WORLD_SIZE` divided
            by the other sizes. None without `tp_plan`: 1.
        tp_plan: `"auto"`, or None with `tp_size` set: the model's own plan. A dict overrides
            single rules of it, `{}` means no TP rule at all.
        enable_sequence_parallel: between TP regions the sequence is sharded over the TP group.
        enable_expert_parallel: deprecated. Without `ep_size` the same as
            `ep_size=tp_size, tp_plan={}` (a `tp_plan` that is given stays); an explicit
            `ep_size` wins. It is resolved into these fields and reads False afterwards.
        fsdp_size: ranks for FSDP2. None: 1.
        dp_replicate_size: HSDP replicas. None: 1.
        fsdp_plan: overrides of the FSDP plan; used if `dp_replicate_size * fsdp_size > 1`, or for
            `fsdp_over_tp`.
        fsdp_cpu_offload: FSDP2 CPU offload, experts included.
        fsdp_mixed_precision: FSDP2 mixed precision (bf16 parameters, fp32 reduction), experts
            included.
        pp_size: pipeline stages. None: 1.
        ep_size: ranks that own distinct experts. None: 1; a plan never infers it.
        ep_plan: overrides of the EP plan; used if `ep_size > 1`.
        ep_implementation: how tokens reach the experts, a name in the registry of `ep_dispatch`.
        pp_schedule: how training runs the stages, a name of `PP_SCHEDULES`.
        pp_micro_batches: into how many equal parts training cuts the batch of a data shard. None:
            the least number from `2 * pp_size` on that fits, else the greatest below.
        pp_stages: how many layers each stage has, first to last; `pp_size` of them, times the
            stages per rank of the schedule. None: balanced by parameter bytes and FLOPs.
        fsdp_over_tp: FSDP-shard the parameters that no TP rule shards over the TP ranks too, in the
            units of the FSDP plan, also with one batch. None: where it saves memory.

    Raises:
        ValueError: a rule is broken; it names the values and what would fit.
    """

    # None is given to have a size resolved, and is never read: so the type is the reader's.
    tp_size: int = None  # type: ignore[assignment]
    tp_plan: dict[str, str] | Literal["auto"] | None = None
    enable_sequence_parallel: bool = False
    enable_expert_parallel: bool = False
    fsdp_size: int = None  # type: ignore[assignment]
    dp_replicate_size: int = None  # type: ignore[assignment]
    fsdp_plan: dict[str, str] | None = None
    fsdp_cpu_offload: bool = False
    fsdp_mixed_precision: bool = False
    pp_size: int = None  # type: ignore[assignment]
    ep_size: int = None  # type: ignore[assignment]
    ep_plan: dict[str, str] | None = None
    ep_implementation: str = "auto"
    fsdp_over_tp: bool | None = None
    pp_schedule: str = "1f1b"
    pp_micro_batches: int | None = None
    pp_stages: list[int] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._resolve_sizes()
        self._resolve_deprecated_flag()
        self._check_stages()
        self._check_implementation(self.layout)  # a Layout checks how its sizes fit together

    # -- what follows from the sizes

    @property
    def layout(self) -> Layout:
        """The sizes as a `Layout`, which knows each rank's place."""
        return Layout(
            tp=self.tp_size,
            fsdp=self.fsdp_size,
            dp_replicate=self.dp_replicate_size,
            pp=self.pp_size,
            ep=self.ep_size,
        )

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.layout.world_size

    @property
    def dp_size(self) -> int:
        """Number of distinct batches: `dp_replicate_size * fsdp_size`."""
        return self.layout.data_parallel_size

    @property
    def efsdp_size(self) -> int:
        """Ranks that FSDP-shard the same experts: `fsdp_size * tp_size / ep_size`."""
        return self.layout.efsdp

    def check_experts(self, num_experts: int) -> None:
        """Check that `ep_size` divides `num_experts`, the experts of a layer.

        Raises:
            ValueError: it doesn't; it names the sizes that fit.
        """
        self.layout.check_experts(num_experts)

    # -- dicts and files

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **overrides: Any) -> Self:
        """Build one from a dict, also from one that native transformers wrote.

        `overrides` win over `values`.

        Raises:
            ValueError: an unknown key, told with the nearest field; or a broken rule.
        """
        merged = {**values, **overrides}
        known = [field.name for field in fields(cls)]
        unknown = [key for key in merged if key not in known]
        if unknown:
            raise ValueError(
                f"DistributedConfig has no {' and no '.join(_nearest(key, known) for key in unknown)}. "
                f"Fields: {', '.join(known)}."
            )
        # Native transformers writes the deprecated flag beside the size that it was resolved to.
        if merged.get("enable_expert_parallel") is True and merged.get("ep_size") is not None:
            merged["enable_expert_parallel"] = False
        return cls(**merged)

    def to_dict(self) -> dict[str, Any]:
        """All fields; sizes are resolved, so `from_dict` gives back an equal config anywhere."""
        return asdict(self)

    @classmethod
    def from_json_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `to_json_file` wrote.

        Raises:
            ValueError: the file holds no JSON object, or what `from_dict` raises.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{os.fspath(path)} is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ValueError(
                f"{os.fspath(path)} must hold a JSON object of DistributedConfig's fields, "
                f"got a {type(values).__name__}."
            )
        return cls.from_dict(values)

    def to_json_string(self) -> str:
        """The fields as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_json_file(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json_string` to `path`."""
        Path(path).write_text(self.to_json_string(), encoding="utf-8")

    # -- the rules

    def _check_types(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and not _is_count(size):
                raise ValueError(f"{name} must be a whole number >= 1 or None, got {size!r}.")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        over_tp: object = self.fsdp_over_tp
        if over_tp is not None and not isinstance(over_tp, bool):
            raise ValueError(f"fsdp_over_tp must be True, False or None, got {over_tp!r}.")
        _check_plan("tp_plan", self.tp_plan, allow_auto=True)
        _check_plan("fsdp_plan", self.fsdp_plan)
        _check_plan("ep_plan", self.ep_plan)
        name_given: object = self.ep_implementation
        if not isinstance(name_given, str) or not name_given:
            raise ValueError(
                "ep_implementation must be the name of a registered implementation, such as "
                f"'auto', got {name_given!r}."
            )

    def _resolve(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _is_given(self, size: str) -> bool:
        return getattr(self, size) is not None

    def _resolve_sizes(self) -> None:
        for name in ("fsdp_size", "dp_replicate_size", "pp_size"):
            if not self._is_given(name):
                self._resolve(name, 1)
        if not self._is_given("tp_size"):
            self._resolve("tp_size", 1 if self.tp_plan is None else self._derived_tp_size())

    def _derived_tp_size(self) -> int:
        world = launched_processes()
        if world is None:
            world = dist.get_world_size() if dist.is_initialized() else 1
        others = self.fsdp_size * self.dp_replicate_size * self.pp_size
        if world % others:
            raise ValueError(
                f"tp_size is not given, and WORLD_SIZE={world} can't be divided by fsdp_size="
                f"{self.fsdp_size} * dp_replicate_size={self.dp_replicate_size} * pp_size="
                f"{self.pp_size} = {others} to derive it. Give tp_size, or start a multiple of "
                f"{others} processes."
            )
        return world // others

    def _resolve_deprecated_flag(self) -> None:
        if self.enable_expert_parallel:
            explicit = self._is_given("ep_size")
            if not explicit:
                self._resolve("ep_size", self.tp_size)
                if self.tp_plan is None:
                    self._resolve("tp_plan", {})
            effect = "it has no effect beside ep_size" if explicit else "it means the same"
            warnings.warn(
                f"enable_expert_parallel is deprecated: give ep_size={self.ep_size}"
                + ("" if explicit else ", tp_plan={} (or no tp_plan, to shard dense modules too)")
                + f" instead; {effect}.",
                FutureWarning,
                stacklevel=4,
            )
            self._resolve("enable_expert_parallel", False)
        if not self._is_given("ep_size"):
            self._resolve("ep_size", 1)

    def _check_stages(self) -> None:
        if self.pp_schedule not in PP_SCHEDULES:
            raise ValueError(
                f"pp_schedule must be one of {', '.join(PP_SCHEDULES)}, got {self.pp_schedule!r}."
            )
        count: object = self.pp_micro_batches
        if count is not None and not _is_count(count):
            raise ValueError(
                f"pp_micro_batches must be a whole number >= 1 or None, got {count!r}."
            )
        given: object = self.pp_stages
        if given is None:
            return
        if not isinstance(given, (list, tuple)) or not all(map(_is_count, given)):
            raise ValueError(
                f"pp_stages must be a list of whole numbers >= 1 (layers of each stage) or None, got {given!r}."
            )
        self._resolve("pp_stages", list(given))
        expected = self.pp_size * (PP_SCHEDULES[self.pp_schedule] if self.pp_size > 1 else 1)
        if len(given) != expected:
            raise ValueError(
                f"pp_stages={list(given)} has {len(given)} stages, but pp_size={self.pp_size} with "
                f"pp_schedule={self.pp_schedule!r} has {expected}: give {expected} numbers of layers."
            )

    def _check_implementation(self, layout: Layout) -> None:
        name, ep, tp = self.ep_implementation, layout.ep, layout.tp
        if name in SHARED_BATCH_IMPLEMENTATIONS and ep > 1 and ep != tp:
            fits = f"ep_size={tp}" if tp > 1 else "a tp_size above 1 with an equal ep_size"
            raise ValueError(
                f"ep_implementation={name!r} needs an EP group that shares one batch, so ep_size "
                f"must equal tp_size, but ep_size={ep} and tp_size={tp}. Use {fits}, or "
                "ep_implementation='all_to_all' (or 'auto'), which works in any layout."
            )
        if name in SHARED_BATCH_IMPLEMENTATIONS and ep > 1 and self.enable_sequence_parallel:
            raise ValueError(
                f"ep_implementation={name!r} needs an EP group that shares one batch, but with "
                "enable_sequence_parallel=True each rank holds a slice of it. Leave one of them out: "
                "ep_implementation='all_to_all' (or 'auto') sends the slices."
            )


def launched_processes() -> int | None:
    """The number of processes that a launcher such as torchrun tells (`WORLD_SIZE`), if any."""
    text = os.environ.get("WORLD_SIZE")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"the environment variable WORLD_SIZE must be a whole number >= 1, got {text!r}."
        )
    return int(text)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_plan(name: str, plan: object, *, allow_auto: bool = False) -> None:
    if plan is None or (allow_auto and plan == "auto"):
        return
    expected = "a dict of pattern -> style name" + (', "auto"' if allow_auto else "") + " or None"
    if not isinstance(plan, dict):
        raise ValueError(f"{name} must be {expected}, got {plan!r}.")
    for pattern, style in plan.items():
        if not isinstance(pattern, str) or not isinstance(style, str):
            raise ValueError(f"{name} must be {expected}, but it holds {pattern!r}: {style!r}.")


def _nearest(key: object, known: list[str]) -> str:
    close = difflib.get_close_matches(str(key), known, n=1)
    return f"field {key!r}" + (f" (did you mean {close[0]!r}?)" if close else "")
