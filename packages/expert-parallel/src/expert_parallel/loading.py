"""Load a model sharded: transformers reads and converts, `ep_plans.parallelize` shards.

[Note: what happens when]
1. transformers builds the model on the meta device and asks us to distribute it: its parameters
   become sharded DTensors, still without data.
2. It runs the family's weight conversions. Each tensor of the checkpoint is a `LazyTensor`, so
   nothing is read yet and every rank sees whole shapes: reports are the same everywhere.
3. Where it sets a parameter, the box that this rank holds is read from the files into it.
What that holds in memory is told in `expert_parallel.reading`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from ep_kernels import BackendRequest, Recompute
from ep_mesh import DistributedConfig, ParallelMesh
from ep_mesh.world import gathered
from ep_plans import check_ep_options, parallel_state
from ep_plans.boxes import lengths
from ep_plans.shards import box_of, home_of, replacement
from expert_parallel import _compat
from expert_parallel.agreement import OtherRankError, all_or_none, raise_together
from expert_parallel.configs import as_config
from expert_parallel.initializing import initialize_missing
from expert_parallel.lazy import Constant, LazyTensor, by_row
from expert_parallel.lora.targets import wide_experts
from expert_parallel.parallel import shard_model
from expert_parallel.reading import CheckpointTensor, LoadReport, Readers, Tally

_READING = "Loading the checkpoint"
_REPORT = "_expert_parallel_load_report"


def load_report(model: nn.Module) -> LoadReport | None:
    """What this rank read to load the model; None if it was not loaded by this package."""
    report = getattr(model, _REPORT, None)
    return report if isinstance(report, LoadReport) else None


def load(
    from_pretrained: Callable[..., Any],
    path: Any,
    *args: Any,
    distributed_config: DistributedConfig | Mapping[str, Any] | Any,
    experts_implementation: str | None = None,
    experts_recompute: Recompute = "none",
    ep_options: Mapping[str, Any] | None = None,
    experts_backend: BackendRequest = "auto",
    fused_operators: bool = True,
    **kwargs: Any,
) -> Any:
    """Call `from_pretrained` so that each rank reads its shards; every rank must call.

    Raises:
        OtherRankError: another rank could not load.
        ValueError: the config does not fit the model or the number of processes, a file can't be
            read in parts, or an argument contradicts `distributed_config`.
    """
    config = as_config(distributed_config)
    for name in ("device_map", "tp_plan", "tp_size", "device_mesh"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}={kwargs[name]!r} can't be combined with distributed_config, which decides "
                f"where everything goes. Leave {name} out."
            )
    if experts_implementation is not None:
        config, experts_implementation = _select_implementation(config, experts_implementation)
    if experts_implementation is not None:
        kwargs["experts_implementation"] = experts_implementation
        for name, value, default in (
            ("experts_recompute", experts_recompute, "none"),
            ("experts_backend", experts_backend, "auto"),
        ):
            if value != default:
                raise ValueError(
                    f"{name}={value!r} is for experts that ep_kernels computes, but "
                    f"experts_implementation={experts_implementation!r} computes them itself. Leave "
                    "one of them out."
                )
    check_ep_options(config, ep_options or {})
    loader = _Loader(
        config,
        own_experts=experts_implementation is None,
        recompute=experts_recompute,
        ep_options=ep_options,
        backend=experts_backend,
        fused_operators=fused_operators,
    )
    try:
        with _compat.loading_through(loader), _compat.quiet(loader.mesh.rank > 0):
            loaded = from_pretrained(path, *args, distributed_config=config, **kwargs)
    except OtherRankError:
        raise
    except Exception as error:
        named = _naming_the_file(error, path, loader.files)
        if not loader.agreed:  # the others wait to hear how building, or reading, went here
            raise_together(named, _READING)
        if named is error:
            raise
        raise named from error
    if loader.dequantizes and loader.model is not None:
        _compat.forget_conversions(loader.model)
    return loaded


def told_unexported(path: Any) -> str | None:
    """What to do with a training checkpoint that holds the model in shards alone; None: it is none."""
    folder = Path(str(path))
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return None
    from ep_trainer.checkpoint.manifest import section

    if not section(folder, "model").is_dir():
        return None
    return (
        f"{path} is a training checkpoint, which holds the model in shards. Write it as from_pretrained "
        f"reads it: ep checkpoint export {path} (or in the run, with CheckpointOptions(save_hf=True)). "
        "To go on with the training, pass it to train(resume_from_checkpoint=...)."
    )


def _naming_the_file(error: Exception, path: Any, files: Sequence[str]) -> Exception:
    """The error, and which file it is about where it doesn't say."""
    if isinstance(error, OSError) and (told := told_unexported(path)):
        return OSError(told)
    if isinstance(error, json.JSONDecodeError):  # the config's broken JSON is another error
        return OSError(f"The index of the checkpoint files in {path} is not JSON: {error}.")
    if isinstance(error, SafetensorError):
        for file in files:
            try:
                with safe_open(file, framework="pt"):
                    pass
            except SafetensorError as broken:
                return OSError(f"{file} is no whole safetensors file: {broken}.")
    return error


def _select_implementation(
    config: DistributedConfig, experts: str
) -> tuple[DistributedConfig, str | None]:
    """`deepgemm_megamoe` names how experts compute and how tokens reach them: both at once."""
    mega = "deepgemm_megamoe"
    if experts == mega:
        if config.ep_size == 1:
            raise ValueError(
                f"experts_implementation={mega!r} spreads the experts over an EP group, but "
                "ep_size=1. Set ep_size=tp_size > 1."
            )
        if config.ep_implementation not in ("auto", mega):
            raise ValueError(
                f"experts_implementation={mega!r} brings the tokens to the experts itself, but "
                f"ep_implementation={config.ep_implementation!r}. Leave one of them out."
            )
        return DistributedConfig.from_dict(config.to_dict(), ep_implementation=mega), None
    if config.ep_implementation == mega:
        raise ValueError(
            f"ep_implementation={mega!r} computes the experts itself, but "
            f"experts_implementation={experts!r}. Leave one of them out."
        )
    return config, experts


def _check_dequantized(model: PreTrainedModel) -> None:
    """Quantized weights are loaded only if they are dequantized on the way."""
    settings = getattr(model.config, "quantization_config", None)
    if not getattr(model, "is_quantized", False) or getattr(settings, "dequantize", False):
        return
    method = getattr(model, "quantization_method", None)
    method = getattr(method, "value", method)
    advice = {
        "mxfp4": "quantization_config=transformers.Mxfp4Config(dequantize=True)",
        "fp8": "quantization_config=transformers.FineGrainedFP8Config(dequantize=True)",
    }.get(str(method))
    wide = wide_experts(model)
    raise ValueError(
        f"This checkpoint stays quantized ({method}), which can't be sharded. "
        + (f"Quantizers mostly leave fused experts, here {wide}, as they are. " if wide else "")
        + (
            f"Dequantize it on the way: pass {advice}."
            if advice
            else "Load it without quantization."
        )
    )


class _Loader:
    """One sharded load; see `expert_parallel._compat.Loader`."""

    def __init__(
        self,
        config: DistributedConfig,
        *,
        own_experts: bool,
        recompute: Recompute,
        ep_options: Mapping[str, Any] | None,
        backend: BackendRequest,
        fused_operators: bool,
    ) -> None:
        self.config = config
        self.settings: Any = {
            "own_experts": own_experts,
            "recompute": recompute,
            "ep_options": ep_options,
            "backend": backend,
            "fused_operators": fused_operators,
        }
        self.mesh = ParallelMesh(config.layout)
        self.device = self.mesh.device
        self.tally = Tally()
        self.model: PreTrainedModel | None = None
        self.dequantizes = False
        self.agreed = False
        self.readers: Readers | None = None
        self.files: Sequence[str] = ()

    def check_files(self, files: list[str] | None) -> None:
        self.files = files or ()
        for file in self.files:
            if not file.endswith(".safetensors"):
                raise ValueError(
                    f"{file} can't be read in parts, so every rank would read all of it. Convert "
                    "the checkpoint once, in a single process: load it with plain transformers "
                    "and write it again with `model.save_pretrained(new_path)`, which writes "
                    "safetensors files."
                )

    def distribute(self, model: PreTrainedModel) -> PreTrainedModel:
        _check_dequantized(model)
        # Sharding communicates: hear first of a rank that could not read the config or find files.
        raise_together(None, _READING)
        self.dequantizes = bool(getattr(model, "is_quantized", False))
        shard_model(model, self.mesh, self.config, **self.settings)
        self.model = model
        return model

    def lazy(self, source: Any, dtype: torch.dtype | None) -> torch.Tensor:
        if isinstance(source, torch.Tensor):
            lazy = LazyTensor(Constant(source))
        else:
            lazy = LazyTensor(CheckpointTensor(source, self.tally))
        return lazy if dtype is None else lazy.to(dtype)

    def by_row(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        lazies = [t if isinstance(t, LazyTensor) else LazyTensor(Constant(t)) for t in tensors]
        return by_row(function, *lazies)

    def write(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        box = box_of(parameter)
        home = home_of(parameter, self.device, offload=self.config.fsdp_cpu_offload)
        local = torch.empty(lengths(box), dtype=value.dtype, device=home)
        lazy = value if isinstance(value, LazyTensor) else LazyTensor(Constant(value))
        assert self.readers is not None, "parameters are written while a checkpoint is read"
        self.readers.fill(local, lazy, box)
        return replacement(parameter, local)

    def finish(self, load: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        self.readers = Readers()
        try:
            self.agreed = True
            with all_or_none(_READING):
                result = load()
                self.readers.finish()
        finally:
            self.readers.close()
            self.readers = None
        report = LoadReport(self.tally.bytes, time.perf_counter() - begin)
        setattr(self.model, _REPORT, report)
        return result

    def initialize(self, model: PreTrainedModel, rest: Callable[[], None]) -> None:
        initialize_missing(model, rest)

    def report(self, model: PreTrainedModel, loading_info: Any) -> None:
        """Join what the stages of a pipeline found; a key of another stage is not unexpected."""
        state = parallel_state(model)
        if state is None or state.pipeline is None:
            return
        known = set(state.pipeline.tensors)
        prefix = f"{model.base_model_prefix}."
        loading_info.unexpected_keys = {
            key
            for key in loading_info.unexpected_keys
            if known.isdisjoint((key, f"{prefix}{key}", key.removeprefix(prefix)))
        }
        # Missing on one stage: the other one that holds a tied weight may have learned more.
        mine = (
            loading_info.missing_keys,
            loading_info.mismatched_keys,
            loading_info.conversion_errors,
        )
        for missing, mismatched, errors in gathered(mine, state.mesh.group("pp")):
            loading_info.missing_keys |= missing
            loading_info.mismatched_keys |= mismatched
            loading_info.conversion_errors.update(errors)
