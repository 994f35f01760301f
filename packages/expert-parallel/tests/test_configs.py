"""The forms of a configuration."""

from __future__ import annotations

import pytest
from transformers.distributed import DistributedConfig as NativeConfig

from ep_mesh import DistributedConfig
from expert_parallel.configs import as_config


def test_every_form_gives_the_same_config() -> None:
    ours = DistributedConfig(tp_size=2, fsdp_size=4)
    assert as_config(ours) is ours
    assert as_config({"tp_size": 2, "fsdp_size": 4}) == ours
    assert as_config(NativeConfig(tp_size=2, fsdp_size=4)) == ours


def test_native_expert_parallelism_is_understood() -> None:
    fields = NativeConfig.__dataclass_fields__
    if "ep_size" not in fields:  # transformers 5.17 has the flag alone
        with pytest.warns(FutureWarning, match="ep_size=2"):
            found = as_config(NativeConfig(tp_size=2, enable_expert_parallel=True))
        assert (found.tp_size, found.ep_size, found.tp_plan) == (2, 2, {})
        return
    found = as_config(NativeConfig(tp_size=2, fsdp_size=4, ep_size=4))
    assert (found.tp_size, found.fsdp_size, found.ep_size) == (2, 4, 4)


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="a dict of its fields, got int"):
        as_config(4)
    with pytest.raises(ValueError, match="did you mean 'tp_size'"):
        as_config({"tp_sise": 4})
