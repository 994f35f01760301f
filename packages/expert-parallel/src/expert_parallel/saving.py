"""`save_pretrained`: a sharded model becomes an ordinary Hugging Face checkpoint.

[Note: what is in memory]
The state dict becomes lazy tensors over the ranks' parts, and transformers' reverse conversion
runs on those: it decides which tensors the files hold, and moves nothing. The first rank then
writes one tensor after the other, in pieces: of each piece it asks the ranks that hold it for
just their parts. So no rank ever holds more than one piece beside its shards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn
from transformers import PreTrainedModel

from ep_mesh.world import own_rank
from ep_plans.boxes import Box, whole_box
from ep_plans.safetensors_file import FileWriter, layout, row_pieces
from expert_parallel import _compat
from expert_parallel.agreement import all_or_none
from expert_parallel.directory import replaced_directory
from expert_parallel.gathering import ROOT, gathered
from expert_parallel.lazy import LazyTensor

PIECE = 256 << 20  # bytes gathered at once, if max_shard_size is not smaller


def save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    variant: str | None = None,
    save_original_format: bool = True,
) -> None:
    """Save a sharded model as a checkpoint that plain transformers loads; every rank must call.

    The first rank writes: safetensors files of at most `max_shard_size` with an index, tied
    weights and copied key-value heads once, the config and the generation config. The
    directory is replaced at once, at the end; file by file, so that an interruption in between
    leaves some of each, where it can't be renamed (a mount point, a parent that is read-only) or
    is the first rank's working directory: see `expert_parallel.directory`.

    Args:
        model: a sharded model, or an ordinary one.
        save_directory: where to; other files in it are kept.
        max_shard_size: as for transformers; one tensor larger than it gets a file of its own.
        variant: part of the file names, as for transformers.
        save_original_format: write the tensors as the family's checkpoints have them (a tensor
            per expert, for many), not as the model has them.

    Of a model with adapters of `add_lora` the adapters alone are written, in PEFT's format.

    Raises:
        OSError: the first rank can't write; and `OtherRankError` on the other ranks then.
        ValueError: the model holds adapters that PEFT added.
        RuntimeError: transformers' reverse conversion would lose tensors.

    Costs as many point-to-point messages as tensors have parts on other ranks; the memory of one
    piece (256 MiB, or `max_shard_size` if that is smaller) on the first rank and on its device.
    """
    from expert_parallel.lora.adding import lora_state
    from expert_parallel.lora.files import save_lora

    if lora_state(model) is not None:
        save_lora(model, save_directory)
        return
    if _compat.holds_adapters(model):
        raise ValueError(
            "This model holds adapters. Save it through PEFT (the PeftModel's own "
            "save_pretrained), or merge them first."
        )
    tensors = _file_tensors(model, original=save_original_format)
    name = "model" if variant is None else f"model.{variant}"
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=_size,
        filename_pattern=f"{name}{{suffix}}.safetensors",
        max_shard_size=max_shard_size,
    )
    if not split.filename_to_tensors:
        raise ValueError(f"{type(model).__name__} has no parameters to save.")
    limit = min(PIECE, _compat.bytes_of_size(max_shard_size))
    files = {
        file: {each: tensors[each] for each in names}
        for file, names in split.filename_to_tensors.items()
    }
    is_root = own_rank() == ROOT
    with ExitStack() as stack:
        with all_or_none("Saving"):
            folder = None
            if is_root:
                folder = stack.enter_context(replaced_directory(Path(save_directory)))
                _write_settings(model, folder)
        for file, held in files.items():
            with all_or_none(f"Writing {file}"):
                write_tensors(None if folder is None else folder / file, held, limit)
        with all_or_none("Finishing the checkpoint"):
            if folder is not None and len(files) > 1:
                write_index(folder, name, split.tensor_to_filename, tensors)
            stack.close()


def _file_tensors(model: nn.Module, *, original: bool) -> dict[str, LazyTensor]:
    """The tensors of the checkpoint, in the order of the model."""
    state = _untied(model)
    if isinstance(model, PreTrainedModel) and original:
        reverted: dict[str, LazyTensor] = _compat.revert_weight_conversion(model, dict(state))
        kept = sum(tensor.numel() for tensor in reverted.values())
        if kept < sum(tensor.numel() for tensor in state.values()):
            raise RuntimeError(
                f"The weight conversions of {type(model).__name__} would lose tensors on the way "
                "back. Save with save_original_format=False, which writes them as the model has them."
            )
        return reverted
    return state


def _untied(model: nn.Module) -> dict[str, LazyTensor]:
    """The state dict with each tied weight once, under the name that loading expects."""
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    ignored = _compat.names_not_saved(model)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    first: dict[int, str] = {}
    kept: dict[str, torch.Tensor] = {}
    names = [name for name in state if name not in tied] + [name for name in state if name in tied]
    for name in names:
        tensor = state[name]
        if name in ignored or not isinstance(tensor, torch.Tensor):
            continue
        if first.setdefault(id(tensor), name) != name:
            continue
        kept[name] = tensor
    return gathered(kept, model)


def write_tensors(path: Path | None, tensors: Mapping[str, LazyTensor], limit: int) -> None:
    """Read and write one file; `path` is None on ranks that only send. Every rank must call."""
    device = torch.device("meta" if path is None else "cpu")
    error: Exception | None = None
    with ExitStack() as stack:
        writer: FileWriter | None = None
        if path is not None:
            try:
                writer = stack.enter_context(FileWriter(path, tensors, {"format": "pt"}))
            except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
                error = caught
        for name in layout(tensors):
            tensor = tensors[name]
            for box in _pieces(tensor, limit):
                piece = torch.empty(
                    [sum(end - start for start, end in dim) for dim in box],
                    dtype=tensor.dtype,
                    device=device,
                )
                # The others send, also when writing failed: nobody waits for a message for ever.
                tensor.read(box, piece)
                if writer is not None and error is None:
                    try:
                        writer.write(piece)
                    except Exception as caught:  # noqa: BLE001 (raised after all ranks know)
                        error = caught
        if error is not None:
            raise error


def _pieces(tensor: LazyTensor, limit: int) -> Iterator[Box]:
    whole = whole_box(tensor.shape)
    if not tensor.shape or not tensor.numel():
        yield whole
        return
    for rows in row_pieces(tensor.shape, tensor.dtype.itemsize, limit):
        yield ((rows,), *whole[1:])


def _write_settings(model: nn.Module, folder: Path) -> None:
    """Config, generation config, remote code: what transformers writes beside the weights."""
    if not isinstance(model, PreTrainedModel):
        return
    with _compat.quiet():
        type(model).save_pretrained(model, folder, state_dict={})
    for file in folder.glob("*.safetensors"):
        file.unlink()


def write_index(
    folder: Path,
    name: str,
    files: Mapping[str, str],
    tensors: Mapping[str, LazyTensor],
) -> None:
    """Write the index of several files, which says where each tensor is."""
    index = {
        "metadata": {
            "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
            "total_size": sum(map(_size, tensors.values())),
        },
        "weight_map": dict(files),
    }
    prefix, _, variant = name.partition(".")
    middle = f".{variant}" if variant else ""
    path = folder / f"{prefix}.safetensors.index{middle}.json"
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
