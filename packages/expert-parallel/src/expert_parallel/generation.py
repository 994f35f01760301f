"""`generate` for all ranks together.

[Note: how many forwards a rank runs]
A forward communicates, so ranks whose batches differ must run equally many. Before each step all
ranks of a replica add up how many are still generating. A rank that has finished stays in that
count and runs a forward of one token, without a cache, for each step that others take; it gives
back what it had when it finished. Ranks that are still generating never wait for the sum.

[Note: one batch, one text]
The ranks of a TP group compute the same logits, and the stages of a pipeline are given them. They also get the same random numbers, the same
scores, and the same answer from criteria that look at a clock: those of their first rank.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import ep_plans
from ep_mesh import ParallelMesh
from ep_mesh.world import gathered
from expert_parallel import _compat
from expert_parallel.agreement import raise_together

# The axes whose ranks share a batch, and what their groups are called.
_SAME_BATCH = {"tp": "TP group", "pp": "pipeline"}


def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`model.generate` of transformers, in any layout; every rank must call.

    Ranks of a TP group, and the stages of a pipeline, must give the same inputs, and get the same
    tokens, sampled ones too.
    Ranks with different batches may give prompts of different lengths and counts, and get texts of
    different lengths.

    Raises:
        OtherRankError: another rank of this replica refused its arguments.
        ValueError: ranks that share a batch were given different inputs; or the arguments make ranks
            with different batches run different numbers of forwards before the first token, or per
            step (`prefill_chunk_size`, assisted and prompt-lookup decoding).

    Costs, beside the forwards: with `tp_size > 1` (and again with `pp_size > 1`) a gather of one number
    at the start, and a broadcast of the scores [B, vocabulary] per token; with `fsdp_size > 1` a one-number all-reduce
    per token.
    """
    state = ep_plans.parallel_state(model)
    plain: Callable[..., Any] = type(model).generate.__get__(model)  # type: ignore[attr-defined]
    if state is None or state.mesh.layout.world_size == 1:
        return plain(*args, **kwargs)
    mesh = state.mesh
    overrides: dict[str, Callable[..., Any]] = {}
    steps = _Steps(model, mesh) if mesh.size("fsdp") > 1 else None
    try:
        named = _by_name(plain, args, kwargs)
        if state.pipeline is not None and len(state.pipeline.here) > 1:
            _check_never_cropped(model, named)
        if steps is not None:
            _check_same_steps(model, named)
            overrides.update(unfinished=steps, before_first=steps.begin)
        for axis in _SAME_BATCH:
            if mesh.size(axis) > 1:
                _check_same_inputs(mesh, named, axis)
        if any(mesh.size(axis) > 1 for axis in _SAME_BATCH):
            named = _follow_leader(model, mesh, named)
            _share_random_state(mesh)
            # Computed from the config's heads, of which each rank has some; None: by the first keys.
            overrides["static_cache_shape"] = lambda: None
        named["synced_gpus"] = False
        with _compat.generation_overrides(model, **overrides):
            return plain(**named)
    except Exception as error:
        if steps is not None and not steps.begun:
            steps.begin(error)
        raise


def _by_name(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call, all by name."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs).arguments
    rest = [n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
    others = {key: value for name in rest for key, value in bound.pop(name, {}).items()}
    return {**bound, **others}


class _Steps:
    """Answers whether to go on, and keeps a finished rank in step with the others."""

    def __init__(self, model: PreTrainedModel, mesh: ParallelMesh) -> None:
        self.model, self.mesh = model, mesh
        self.begun = False

    def begin(self, error: Exception | None = None) -> None:
        """Start only if no rank of the replica refuses its arguments."""
        self.begun = True
        raise_together(error, "Generating", self.mesh.group("fsdp_tp"))

    def __call__(self, finished: bool, *_: Any, **__: Any) -> bool:
        while True:
            unfinished = torch.tensor(0 if finished else 1, device=self.mesh.device)
            dist.all_reduce(unfinished, group=self.mesh.group("fsdp_tp"))
            if not finished:
                return True
            if not unfinished.item():
                return False
            self._accompany()

    def _accompany(self) -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=self.mesh.device)
        self.model(input_ids=token, use_cache=False, return_dict=True)


def _from_leader(tensor: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """What the first rank with this batch has: over its TP group, then over the stages."""
    tensor = tensor.contiguous()
    for axis in _SAME_BATCH:
        if mesh.size(axis) > 1:
            leader = mesh.layout.group(axis, mesh.rank)[0]
            dist.broadcast(tensor, src=leader, group=mesh.group(axis))
    return tensor


class _LeadersScores(LogitsProcessor):
    """The scores of the first rank with this batch, for all of them."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return _from_leader(scores, self.mesh)


class _LeadersVerdict(StoppingCriteria):
    """What a criterion says on the first rank with this batch, for all of them."""

    def __init__(self, criterion: StoppingCriteria, mesh: ParallelMesh) -> None:
        self.criterion, self.mesh = criterion, mesh

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        said = self.criterion(input_ids, scores, **kwargs)
        verdict = torch.as_tensor(said, device=input_ids.device).expand(input_ids.shape[0])
        return _from_leader(verdict.to(torch.uint8), self.mesh).bool()


def _follow_leader(
    model: PreTrainedModel, mesh: ParallelMesh, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments under which the ranks with one batch can't come apart."""
    processors = [*(kwargs.get("logits_processor") or ()), _LeadersScores(mesh)]
    criteria: Sequence[StoppingCriteria] = list(kwargs.get("stopping_criteria") or ())
    config = kwargs.get("generation_config") or model.generation_config
    seconds = kwargs.get("max_time", getattr(config, "max_time", None))
    changed = {**kwargs, "logits_processor": LogitsProcessorList(processors)}
    if seconds is not None:
        criteria = [*criteria, MaxTimeCriteria(seconds)]
        changed.pop("max_time", None)
        if isinstance(config, GenerationConfig):
            # Else transformers would add a clock of this rank's own.
            changed["generation_config"] = copy.copy(config)
            changed["generation_config"].max_time = None
    if criteria:
        changed["stopping_criteria"] = StoppingCriteriaList(
            [_LeadersVerdict(criterion, mesh) for criterion in criteria]
        )
    return changed


def _check_same_inputs(mesh: ParallelMesh, kwargs: dict[str, Any], axis: str) -> None:
    """Raise on all ranks of a group if their inputs differ: their collectives would too."""
    group, ranks = mesh.group(axis), mesh.layout.group(axis, mesh.rank)
    digest = torch.tensor([_digest(kwargs)], device=mesh.device)
    digests = [torch.empty_like(digest) for _ in ranks]
    dist.all_gather(digests, digest, group=group)
    first, *others = torch.cat(digests).tolist()
    different = [rank for rank, other in zip(ranks[1:], others, strict=True) if other != first]
    if not different:
        return
    given = {name: [*value.shape] for name, value in kwargs.items() if torch.is_tensor(value)}
    shapes = gathered(given, group)
    told = "; ".join(f"rank {rank}: {held}" for rank, held in zip(ranks, shapes, strict=True))
    raise ValueError(
        f"The ranks of a {_SAME_BATCH[axis]} must be given the same inputs, since they compute one batch. Of "
        f"the group {[*ranks]}, rank(s) {different} were given others than rank {ranks[0]}. "
        f"Shapes: {told}. Give each group one batch (and one padding)."
    )


def _digest(kwargs: dict[str, Any]) -> int:
    """A hash of the tensors: of ids and masks the values, of others, which can be rounded, shapes."""
    found = hashlib.blake2b(digest_size=8)
    for name, value in sorted(kwargs.items()):
        if not torch.is_tensor(value):
            continue
        found.update(f"{name}{[*value.shape]}".encode())
        if not value.is_floating_point() and not value.is_complex():
            found.update(value.detach().to("cpu", torch.int64).contiguous().numpy().tobytes())
    return int.from_bytes(found.digest(), "little", signed=True)


def _share_random_state(mesh: ParallelMesh) -> None:
    """Continue on every rank with this batch with the first one's random state."""

    def share(state: torch.Tensor) -> torch.Tensor:
        return _from_leader(state.to(mesh.device), mesh).to("cpu")

    torch.set_rng_state(share(torch.get_rng_state()))
    if mesh.device.type == "cuda":
        torch.cuda.set_rng_state(share(torch.cuda.get_rng_state(mesh.device)), mesh.device)


def _asked_for(
    model: PreTrainedModel, kwargs: dict[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """The settings of these that are set, by an argument or by the generation config."""
    config = kwargs.get("generation_config") or model.generation_config
    values = {name: kwargs.get(name, getattr(config, name, None)) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _check_never_cropped(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """A rank with several stages counts tokens in caches that the caller can't shorten."""
    names = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
    for name in _asked_for(model, kwargs, names):
        raise ValueError(
            f"{name} takes tokens back, which a model with several stages per rank can't. Leave it "
            "out, or use pp_schedule='1f1b'."
        )


def _check_same_steps(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    names = ("prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_early_exit")
    for name, value in _asked_for(model, kwargs, names).items():
        raise ValueError(
            f"{name}={value!r} makes ranks with different batches run different numbers of "
            "forwards, which would wait for each other. Leave it out, or use a layout with "
            "fsdp_size=1."
        )
    for name in ("assistant_model", "custom_generate"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} can make ranks with different batches run different numbers of forwards, "
                "which would wait for each other. Leave it out, or use a layout with fsdp_size=1."
            )
