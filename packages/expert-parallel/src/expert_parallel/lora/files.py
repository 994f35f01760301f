"""Adapters in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ep_mesh.world import own_rank
from ep_plans import local
from ep_plans.boxes import lengths
from ep_plans.shards import box_of
from expert_parallel.agreement import all_or_none
from expert_parallel.directory import replaced_directory
from expert_parallel.gathering import ROOT, gathered
from expert_parallel.lazy import LazyTensor
from expert_parallel.lora._compat import PeftLayer
from expert_parallel.lora.adding import adapters_of, lora_state, packed, saved_tensors, unpacked
from expert_parallel.lora.modules import FACTORS
from expert_parallel.lora.per_expert import of_single_experts
from expert_parallel.lora.targets import Targets
from expert_parallel.reading import CheckpointTensor, Tally
from expert_parallel.saving import PIECE, write_tensors

_PREFIX = "base_model.model."  # of all names in a file: PEFT's own two modules around the model
_WEIGHTS = "adapter_model.safetensors"


def save_lora(
    model: nn.Module, save_directory: str | os.PathLike[str], *, per_expert: bool = False
) -> None:
    """Write the adapters of a model, and what trains whole, as `peft` does; every rank must call.

    `peft.PeftModel.from_pretrained(model, save_directory)` loads them onto the plain model, `load_lora`
    onto a sharded one.

    Args:
        model: that `add_lora` was called with.
        save_directory: is replaced.
        per_expert: write an adapter for each expert's projections, named as in the family's checkpoints
            (`...experts.0.gate_proj.lora_A.weight`), all of one rank, for programs that read such ones.
            PEFT reads both forms, `load_lora` this one not.

    Raises:
        ValueError: the model has no adapters of `add_lora`; they have no form per expert.
        OSError: the first rank can't write; and `OtherRankError` on the other ranks then.

    Costs as `save_pretrained`, for the adapters.
    """
    state = lora_state(model)
    if state is None:
        raise ValueError(f"This {type(model).__name__} has no adapters; add_lora adds them.")
    here = {
        _file_name(adapter.layer, factor): getattr(adapter, factor)
        for _, adapter in adapters_of(model)
        for factor in FACTORS
    }
    here |= {_PREFIX + name: tensor for name, tensor in saved_tensors(model, state.targets)}
    parts = gathered(here, model)
    tensors: dict[str, Any] = {
        _PREFIX + name: parts[_PREFIX + name]
        for module in state.targets.saved.values()
        for name in module
    }
    config = state.config
    if per_expert:
        assert isinstance(model, PreTrainedModel), "add_lora takes no other"
        factors = {
            (layer.key, factor): parts[_file_name(layer, factor)]
            for layer in state.targets.layers
            for factor in FACTORS
        }
        by_expert, config = of_single_experts(model, config, state.targets.layers, factors)
        tensors = {_PREFIX + name: tensor for name, tensor in by_expert.items()}
    else:
        for layer in state.targets.layers:
            for factor in FACTORS:
                name = _file_name(layer, factor)
                tensors[name] = packed(parts[name], layer, factor)
    is_root = own_rank() == ROOT
    with ExitStack() as stack:
        with all_or_none("Saving adapters"):
            folder = None
            if is_root:
                folder = stack.enter_context(replaced_directory(Path(save_directory)))
                _write_config(model, config, folder)
        with all_or_none(f"Writing {_WEIGHTS}"):
            write_tensors(None if folder is None else folder / _WEIGHTS, tensors, PIECE)
        with all_or_none("Finishing the adapters"):
            stack.close()


def _write_config(model: nn.Module, config: Any, folder: Path) -> None:
    """As PEFT writes it: for inference, with the base model's name."""
    before = config.inference_mode, config.base_model_name_or_path
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    config.inference_mode = True
    try:
        config.save_pretrained(str(folder))
    finally:
        config.inference_mode, config.base_model_name_or_path = before


def _file_name(layer: PeftLayer, factor: str) -> str:
    return f"{_PREFIX}{layer.key}.{factor}.weight"


class AdapterFile:
    """A directory of adapters that is read factor by factor."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from peft import LoraConfig

        self.folder = Path(directory)
        if not (self.folder / "adapter_config.json").is_file():
            raise FileNotFoundError(f"{self.folder} has no adapter_config.json.")
        if not (self.folder / _WEIGHTS).is_file():
            raise FileNotFoundError(f"{self.folder} has no {_WEIGHTS}.")
        self.config = LoraConfig.from_pretrained(str(self.folder))
        self.config.inference_mode = False
        # Mapped, and read when a factor is asked for.
        try:
            self._file: Any = safe_open(self.folder / _WEIGHTS, framework="pt")
        except SafetensorError as error:
            raise OSError(f"{self.folder / _WEIGHTS} is damaged: {error}.") from error

    def check(self, targets: Targets) -> None:
        """The file holds the tensors of its configuration, no others, in their shapes.

        Raises:
            ValueError: names what differs.
        """
        wanted: dict[str, tuple[int, ...]] = {
            _file_name(layer, factor): shape
            for layer in targets.layers
            for factor, shape in (("lora_A", layer.shape_a), ("lora_B", layer.shape_b))
        }
        for module in targets.saved.values():
            wanted |= {_PREFIX + name: shape for name, shape in module.items()}
        found = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        for layer in targets.layers:
            # PEFT adds the weight of an adapted head; the model has its own
            base = f"{_PREFIX}{layer.key}.base_layer.weight"
            if found.get(base) == layer.shape:
                del found[base]
        wrong = sorted(
            name for name in wanted.keys() | found if wanted.get(name) != found.get(name)
        )
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"{self.folder / _WEIGHTS}: {name} is {found.get(name, 'missing')}, and for this model it "
                f"should be {wanted.get(name, 'absent')} ({len(wrong)} such). Adapters of checkpoints with "
                "a tensor per expert: load them with peft in plain transformers and save them anew."
            )

    def value(self, layer: PeftLayer, factor: str) -> Tensor:
        """A whole factor."""
        stored: torch.Tensor = self._file.get_tensor(_file_name(layer, factor))
        return unpacked(stored, layer, factor)

    def fill(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's part of a tensor of the model from the file."""
        stored = LazyTensor(CheckpointTensor(self._file.get_slice(_PREFIX + name), Tally()))
        box = box_of(tensor)
        part = torch.empty(lengths(box), dtype=stored.dtype)
        stored.read(box, part)
        with torch.no_grad():
            local(tensor).copy_(part)
