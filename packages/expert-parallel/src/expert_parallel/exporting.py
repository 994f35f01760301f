"""A sharded training checkpoint becomes an ordinary Hugging Face one, in one process.

The stored tensors become lazy ones, on which transformers' reverse conversion decides what the files
hold (a tensor per expert, for many families). Threads then write a file each, in pieces that are
copied out of the mapped shards, so no tensor is ever whole in memory.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers
from huggingface_hub import split_state_dict_into_shards_factory
from transformers import PreTrainedModel

from ep_plans.boxes import Box
from ep_trainer.checkpoint import CheckpointError
from ep_trainer.checkpoint.offline import StoredTensors, read_manifest
from expert_parallel import _compat
from expert_parallel.directory import is_weights, replaced_directory
from expert_parallel.lazy import LazyTensor, Node
from expert_parallel.saving import write_index, write_tensors

_PIECE = 64 << 20  # bytes that a thread holds


class StoredTensor(Node):
    """A tensor of a sharded checkpoint."""

    def __init__(self, stored: StoredTensors, name: str) -> None:
        tensor = stored.tensors[name]
        super().__init__(tensor.size, tensor.properties.dtype)
        self.stored, self.name = stored, name

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Copy the box out of the files; nothing into a meta tensor."""
        if not out.is_meta:
            self.stored.read(self.name, box, out)


def export(
    checkpoint: Path,
    target: Path | None = None,
    *,
    max_shard_size: int | str = "5GB",
    save_original_format: bool = True,
    workers: int = 4,
) -> Path:
    """Write the model of a training checkpoint so that plain transformers loads it.

    Args:
        checkpoint: a checkpoint of `EPTrainer`, of any layout.
        target: where to; None: into `checkpoint` itself, which then is both.
        max_shard_size: as for `save_pretrained`.
        save_original_format: write the tensors as the family's checkpoints have them.
        workers: files written at the same time.

    Returns:
        The directory.

    Raises:
        FileExistsError: `target` has something in it.
        CheckpointError: the checkpoint is damaged, or not of the model that its config names.
        RuntimeError: transformers' reverse conversion would lose tensors.

    Costs two reads and a write of the model, and 64 MiB per worker.
    """
    read_manifest(checkpoint)
    inside = target is None or target.resolve() == checkpoint.resolve()
    if target is not None and not inside and target.is_dir() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; give a new directory.")
    stored = StoredTensors(checkpoint)
    tensors = _file_tensors(checkpoint, stored, original=save_original_format)
    stored.check_values(workers)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=_size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    with ExitStack() as stack:
        folder = (
            checkpoint if inside else stack.enter_context(replaced_directory(Path(str(target))))
        )
        prefix = ".new-" if inside else ""

        def write(file: str) -> None:
            held = {name: tensors[name] for name in split.filename_to_tensors[file]}
            write_tensors(folder / f"{prefix}{file}", held, _PIECE)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(write, split.filename_to_tensors))
        if inside:
            _replace(folder, prefix, list(split.filename_to_tensors))
        else:
            for path in checkpoint.iterdir():
                if (path.is_file() and not is_weights(path.name) and path.name in _BESIDE) or (
                    path.is_file() and path.name.startswith(_TOKENIZER)
                ):
                    (folder / path.name).write_bytes(path.read_bytes())
        if len(split.filename_to_tensors) > 1:
            write_index(folder, "model", split.tensor_to_filename, tensors)
    return checkpoint if inside else Path(str(target))


_BESIDE = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
)
_TOKENIZER = ("tokenizer", "special_tokens", "vocab", "merges", "added_tokens", "processor")


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _replace(folder: Path, prefix: str, files: list[str]) -> None:
    for path in folder.iterdir():
        if is_weights(path.name) and path.name not in files:
            path.unlink()
    for file in files:
        (folder / f"{prefix}{file}").replace(folder / file)


def _file_tensors(
    checkpoint: Path, stored: StoredTensors, *, original: bool
) -> dict[str, LazyTensor]:
    model = _meta_model(checkpoint)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    expected = model.state_dict()
    missing = [name for name in expected if name not in stored.tensors and name not in tied]
    extra = [name for name in stored.tensors if name not in expected]
    if any(".lora." in name for name in extra):
        raise CheckpointError(
            f"{checkpoint} holds a model with adapters, which its config.json doesn't tell of: load it in a "
            "run with the same add_lora (resume_from_checkpoint), whose save_model writes the adapters."
        )
    if missing or extra:
        what = f"{missing[0]} is in no file" if missing else f"{extra[0]} is not in that model"
        raise CheckpointError(
            f"{checkpoint} is not of the {type(model).__name__} that its config.json names: {what}."
        )
    ignored = _compat.names_not_saved(model)
    state = {
        name: LazyTensor(StoredTensor(stored, name))
        for name in expected
        if name in stored.tensors and name not in ignored
    }
    if not original:
        return state
    reverted: dict[str, LazyTensor] = _compat.revert_weight_conversion(model, dict(state))
    if sum(t.numel() for t in reverted.values()) < sum(t.numel() for t in state.values()):
        raise RuntimeError(
            f"The weight conversions of {type(model).__name__} would lose tensors on the way back. "
            "Export with save_original_format=False, which writes them as the model has them."
        )
    return reverted


def _meta_model(checkpoint: Path) -> PreTrainedModel:
    path = checkpoint / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: nothing tells which model this is.")
    try:
        names = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: no JSON ({error}).") from error
    architecture = getattr(transformers, names[0], None) if names else None
    if architecture is None:
        raise CheckpointError(
            f"{path} names the architectures {names}, of which this transformers has none."
        )
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        return _compat.from_config(architecture, config)
