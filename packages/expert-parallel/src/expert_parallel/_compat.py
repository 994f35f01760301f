"""Private parts of transformers and PyTorch that this package needs, in one place.

| what | why | seen in |
| --- | --- | --- |
| `DistributedMixin.prepare_distribute_model`, `.maybe_distribute_model` | where native parallelism hooks in between building on meta and loading: ours goes there instead | transformers 5.17, 5.24 |
| `core_model_loading.spawn_materialize`, `.set_param_for_module`, `.DtensorShardOperation` | tensors stay lazy through the weight conversions and are cut at the end | transformers 5.17, 5.24 |
| `modeling_utils._get_resolved_checkpoint_files` | refuse `.bin` files before they are read | transformers 5.17, 5.24 |
| `modeling_utils.convert_and_load_state_dict_in_model` | where reading ends: wait for it, and let all ranks agree on errors | transformers 5.17, 5.24 |
| `integrations.mxfp4.dequantize_convertops` | a rank dequantizes its own experts | transformers 5.17, 5.24 |
| `PreTrainedModel._initialize_missing_keys`, `._init_weights` | weights that no file holds are the same on every rank | transformers 5.17, 5.24 |
| `PreTrainedModel._adjust_missing_and_unexpected_keys` | what each pipeline stage misses is told on all ranks | transformers 5.17, 5.24 |
| `core_model_loading.revert_weight_conversion`, `PreTrainedModel._weight_conversions` | saving in the checkpoint's own form | transformers 5.17, 5.24 |
| `GenerationMixin._has_unfinished_sequences` | ranks with different batches stop at different lengths | transformers 5.17, 5.24 |
| `GenerationMixin._prefill` | the arguments are checked, forwards begin | transformers 5.17, 5.24 |
| `GenerationMixin._get_static_cache_init_shape` | a rank has some of the key-value heads | transformers 5.17, 5.24 |
| `_is_hf_initialized` on parameters | which ones have their values | transformers 5.17, 5.24 |
| `PreTrainedModel._keys_to_ignore_on_save`, `._hf_peft_config_loaded` | what is not saved, and what can't be | transformers 5.17, 5.24 |
| `PreTrainedModel._from_config`, `_BaseAutoModelClass._model_mapping` | the model of a config, on the meta device | transformers 5.17, 5.24 |
| `utils.hub.convert_file_size_to_int` | what "5GB" means there | transformers 5.17, 5.24 |
| `utils._pytree.tree_map_only`, `Tensor._make_wrapper_subclass` | a tensor whose values are not in memory | torch 2.11 to 2.13 |

[Note: patching for one call]
The functions are replaced while a sharded load is running, and act differently only in the
context (`ContextVar`) of that load: a plain `from_pretrained` in another thread is not touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed.mixin import DistributedMixin
from transformers.integrations import mxfp4
from transformers.utils import logging
from transformers.utils.hub import convert_file_size_to_int as bytes_of_size

__all__ = [
    "Loader",
    "auto_class_knows",
    "bytes_of_size",
    "forget_conversions",
    "from_config",
    "generation_overrides",
    "holds_adapters",
    "init_module",
    "is_initialized",
    "loading_through",
    "make_wrapper_subclass",
    "mark_initialized",
    "names_not_saved",
    "quiet",
    "revert_weight_conversion",
    "tree_map_only",
]

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass


class Loader(Protocol):
    """What a sharded load does at each point of transformers' `from_pretrained`."""

    device: torch.device

    def check_files(self, files: list[str] | None) -> None:
        """Refuse files that can't be read in parts."""

    def distribute(self, model: PreTrainedModel) -> PreTrainedModel:
        """Shard a model that is on the meta device."""

    def lazy(self, source: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """Stand in for a tensor of the checkpoint."""

    def by_row(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Apply a function that works on each index of the first dimension by itself."""

    def write(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Read what this rank holds of `value`; give back what replaces the parameter."""

    def finish(self, load: Callable[[], Any]) -> Any:
        """Run `load`, wait for all reads, and raise on every rank if one failed."""

    def initialize(self, model: PreTrainedModel, rest: Callable[[], None]) -> None:
        """Initialize what no file held; `rest` is transformers' way, for plain tensors."""

    def report(self, model: PreTrainedModel, loading_info: Any) -> None:
        """Make what was missing, unexpected or mismatched the same on every rank."""


_active: ContextVar[Loader | None] = ContextVar("expert_parallel_loader", default=None)
_lock = threading.RLock()
_depth = 0
_patches = ExitStack()


@contextmanager
def loading_through(loader: Loader) -> Iterator[None]:
    """Let `loader` take part in every `from_pretrained` of this context."""
    global _depth
    with _lock:
        if _depth == 0:
            _install(_patches)
        _depth += 1
    token = _active.set(loader)
    try:
        yield
    finally:
        _active.reset(token)
        with _lock:
            _depth -= 1
            if _depth == 0:
                _patches.close()


@contextmanager
def generation_overrides(
    model: PreTrainedModel,
    *,
    unfinished: Callable[..., bool] | None = None,
    static_cache_shape: Callable[[], Any] | None = None,
    before_first: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Replace steps of `generate` for one call.

    Args:
        model: the model that generates.
        unfinished: given whether this rank has finished, tells whether to take another step.
        static_cache_shape: gives the heads and their size of a cache made in advance.
        before_first: runs when all arguments are checked, before the first forward.
    """
    original: Any = None if before_first is None else model._prefill

    def prefill(*args: Any, **kwargs: Any) -> Any:
        assert before_first is not None
        before_first()
        return original(*args, **kwargs)

    named = {
        "_has_unfinished_sequences": unfinished,
        "_get_static_cache_init_shape": static_cache_shape,
        "_prefill": None if before_first is None else prefill,
    }
    with ExitStack() as patches:
        for name, replaced in named.items():
            if replaced is not None:
                patches.enter_context(mock.patch.object(model, name, replaced))
        yield


@contextmanager
def quiet(wanted: bool = True) -> Iterator[None]:
    """No progress bars and no warnings of transformers: one rank tells what all would."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    if wanted:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    try:
        yield
    finally:
        if wanted:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


def forget_conversions(model: PreTrainedModel) -> None:
    """Let saving take the family's conversions, not those that a quantized checkpoint needed.

    What was dequantized on loading is written as the family's ordinary checkpoints are; reversing
    the dequantization loses tensors in transformers 5.17.
    """
    if hasattr(model, "_weight_conversions"):
        del model._weight_conversions


def mark_initialized(parameter: torch.Tensor) -> None:
    """Keep transformers from initializing a parameter."""
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def is_initialized(parameter: torch.Tensor) -> bool:
    """Whether a parameter was loaded or initialized."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def holds_adapters(model: nn.Module) -> bool:
    """Whether adapters were added to the model, not by wrapping it."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def names_not_saved(model: nn.Module) -> Sequence[str]:
    """Names in the state dict that the family's checkpoints don't have."""
    return list(getattr(model, "_keys_to_ignore_on_save", None) or ())


def from_config(architecture: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A model of just that class."""
    model: PreTrainedModel = architecture._from_config(config)
    return model


def auto_class_knows(auto: Any, config: Any) -> bool:
    """Whether an Auto class has a model for a config."""
    return type(config) in auto._model_mapping


def init_module(model: PreTrainedModel, module: nn.Module) -> None:
    """Give the parameters of one module, not of those below it, their initial values."""
    model._init_weights(module)


def _install(patches: ExitStack) -> None:
    def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        patches.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))

    replace(DistributedMixin, "prepare_distribute_model", _prepare)
    replace(DistributedMixin, "maybe_distribute_model", _distribute)
    replace(PreTrainedModel, "_initialize_missing_keys", _initialize)
    replace(PreTrainedModel, "_adjust_missing_and_unexpected_keys", _report)
    replace(core_model_loading, "DtensorShardOperation", _no_operation)
    replace(core_model_loading, "spawn_materialize", _stay_lazy)
    replace(core_model_loading, "set_param_for_module", _set_parameter)
    replace(mxfp4, "dequantize_convertops", _dequantize_by_expert)
    replace(modeling_utils, "_get_resolved_checkpoint_files", _check_files)
    replace(modeling_utils, "convert_and_load_state_dict_in_model", _convert_and_load)


def _prepare(original: Callable[..., Any]) -> Any:
    # The original is bound to the mixin, and so is what replaces it.
    def prepare(cls: Any, /, config: Any, device_map: Any = None, **kwargs: Any) -> Any:
        loader = _active.get()
        if loader is None:
            return original.__func__(cls, config, device_map=device_map, **kwargs)  # type: ignore[attr-defined]
        return config, {"": loader.device}, None

    return classmethod(prepare)


def _distribute(original: Callable[..., Any]) -> Any:
    def distribute(cls: Any, model: Any, config: Any, mesh: Any) -> Any:
        loader = _active.get()
        if loader is None:
            return original.__func__(cls, model, config, mesh)  # type: ignore[attr-defined]
        if config is None:  # a model inside the one that is loaded, such as a backbone
            return model
        # Written by `from_pretrained`; later readers would take it for native parallelism.
        del model.config.distributed_config
        return loader.distribute(model)

    return classmethod(distribute)


def _initialize(original: Callable[..., None]) -> Callable[..., None]:
    def initialize(self: PreTrainedModel, is_quantized: bool) -> None:
        loader = _active.get()
        if loader is None:
            original(self, is_quantized)
        else:
            loader.initialize(self, lambda: original(self, is_quantized))

    return initialize


def _report(original: Callable[..., None]) -> Callable[..., None]:
    def adjust(self: PreTrainedModel, loading_info: Any) -> None:
        if (loader := _active.get()) is not None:
            loader.report(self, loading_info)
        original(self, loading_info)

    return adjust


def _no_operation(original: Callable[..., Any]) -> Callable[..., Any]:
    def operation(parameter: Any) -> Any:
        return original(parameter) if _active.get() is None else None

    return operation


def _stay_lazy(original: Callable[..., Any]) -> Callable[..., Any]:
    def materialize(
        thread_pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **kwargs: Any
    ) -> Any:
        loader = _active.get()
        if loader is None:
            return original(thread_pool, tensor, device, dtype, **kwargs)
        return loader.lazy(tensor, dtype)

    return materialize


def _set_parameter(original: Callable[..., None]) -> Callable[..., None]:
    def set_parameter(
        model: nn.Module, name: str, value: torch.Tensor, loading_info: Any, hf_quantizer: Any
    ) -> None:
        loader = _active.get()
        if loader is None:
            original(model, name, value, loading_info, hf_quantizer)
            return
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        old = getattr(module, leaf)
        if old is None:
            loading_info.unexpected_keys.add(name)
            return
        loading_info.missing_keys.discard(name)
        if value.shape != old.shape:
            loading_info.mismatched_keys.add((name, value.shape, old.shape))
            return
        new = loader.write(old, value)
        mark_initialized(new)
        setattr(module, leaf, new)

    return set_parameter


def _dequantize_by_expert(original: Callable[..., Any]) -> Callable[..., Any]:
    def dequantize(blocks: Any, scales: Any, *others: Any) -> Any:
        loader = _active.get()
        if loader is None:
            return original(blocks, scales, *others)
        return loader.by_row(lambda *rows: original(*rows, *others).detach(), blocks, scales)

    return dequantize


def _check_files(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(*args: Any, **kwargs: Any) -> Any:
        files = original(*args, **kwargs)
        if (loader := _active.get()) is not None:
            loader.check_files(files[0])
        return files

    return resolve


def _convert_and_load(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(*args: Any, **kwargs: Any) -> Any:
        loader = _active.get()
        if loader is None:
            return original(*args, **kwargs)
        return loader.finish(lambda: original(*args, **kwargs))

    return load
