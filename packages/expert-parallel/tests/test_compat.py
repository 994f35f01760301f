"""transformers is changed for the time of a sharded load, and for that load alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import core_model_loading, modeling_utils
from transformers.distributed.mixin import DistributedMixin

from expert_parallel import AutoModelForCausalLM, _compat, saving

PATCHED = [
    (DistributedMixin, "prepare_distribute_model"),
    (DistributedMixin, "maybe_distribute_model"),
    (transformers.PreTrainedModel, "_initialize_missing_keys"),
    (core_model_loading, "spawn_materialize"),
    (core_model_loading, "set_param_for_module"),
    (core_model_loading, "DtensorShardOperation"),
    (modeling_utils, "_get_resolved_checkpoint_files"),
    (modeling_utils, "convert_and_load_state_dict_in_model"),
]


def originals() -> list[Any]:
    return [vars(owner)[name] for owner, name in PATCHED]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


class Recorder:
    """A loader that is asked nothing."""

    device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the loader of another thread was asked to {name}")


def test_everything_is_as_before_after_a_load(path: Path) -> None:
    before = originals()
    with _compat.loading_through(Recorder()):  # type: ignore[arg-type]
        changed = originals()
        assert not any(now is was for now, was in zip(changed, before, strict=True))
        with _compat.loading_through(Recorder()):  # type: ignore[arg-type]
            assert originals() == changed
        assert originals() == changed
    assert originals() == before


def test_a_failing_load_restores_too(path: Path) -> None:
    before = originals()
    with pytest.raises(AssertionError, match="another thread"):
        fail(path)
    assert originals() == before


def fail(path: Path) -> None:
    with _compat.loading_through(Recorder()):  # type: ignore[arg-type]
        transformers.AutoModelForCausalLM.from_pretrained(path)


def test_a_plain_load_in_another_thread_is_plain(path: Path) -> None:
    found: list[Any] = []

    def load() -> None:
        found.append(transformers.AutoModelForCausalLM.from_pretrained(path))

    with _compat.loading_through(Recorder()):  # type: ignore[arg-type]
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    (model,) = found
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_without_a_config_nothing_is_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("patched for a plain load")

    monkeypatch.setattr(_compat, "_install", never)
    AutoModelForCausalLM.from_pretrained(path)


def test_a_conversion_that_loses_tensors_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state.popitem()
        return state

    monkeypatch.setattr(_compat, "revert_weight_conversion", lossy)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(RuntimeError, match="save_original_format=False"):
        saving.save_pretrained(model, path / "new")
    saving.save_pretrained(model, path / "new", save_original_format=False)
