"""Generation in every layout gives each batch the text that one process gives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from dispatching import dispatching, name_of
from transformers import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList

from ep_plans import parallel_state
from ep_testing import RankPool
from expert_parallel import AutoModelForCausalLM, OtherRankError

FAMILIES = ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"]
LAYOUTS = [
    dispatching(tp_size=2, fsdp_size=4, ep_size=4),
    dispatching(tp_size=8, ep_size=8),
    dispatching(fsdp_size=8, ep_size=8),
    dispatching(tp_size=2, fsdp_size=2, dp_replicate_size=2, ep_size=4),
    dispatching(tp_size=4, fsdp_size=2, ep_size=8, enable_sequence_parallel=True),
]
MIXED = LAYOUTS[0]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 10, "do_sample": False},
    "sampling": {"max_new_tokens": 10, "do_sample": True, "temperature": 1.5, "top_k": 20},
    "to a length": {"max_length": 20, "do_sample": True},
    "static cache": {"max_new_tokens": 6, "cache_implementation": "static", "do_sample": False},
    "beams": {"max_new_tokens": 5, "num_beams": 3, "do_sample": False},
    "no cache": {"max_new_tokens": 4, "use_cache": False, "do_sample": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def checkpoint(folder: Path, family: str) -> str:
    path = folder / family
    if not path.exists():
        model = tiny_models.build(tiny_models.FAMILIES[family](), torch.float32)
        # One token in eight ends a text, so that batches stop at different lengths.
        model.generation_config.eos_token_id = list(range(2, 14))
        model.save_pretrained(path)
    return str(path)


def prompt(batch: int) -> torch.Tensor:
    """Prompts of a batch: as many and as long as no other batch has."""
    rows, length = 1 + batch % 2, 2 + batch
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(14, 96, (rows, length), generator=generator)


def batch_of(model: torch.nn.Module, rank: int) -> int:
    state = parallel_state(model)
    assert state is not None
    return state.mesh.layout.batch_of(rank)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every family in one layout and one family in every layout; with `--all-layouts` everything."""
    if "layout" not in metafunc.fixturenames:
        return
    whole = metafunc.config.getoption("--all-layouts")
    cases = [
        (family, layout, [*MODES] if whole or layout is MIXED else ["sampling", "static cache"])
        for family in FAMILIES
        for layout in LAYOUTS
        if whole or family == FAMILIES[0] or layout is MIXED
    ]
    names = [f"{family}-{name_of(layout)}" for family, layout, _ in cases]
    metafunc.parametrize(("family", "layout", "modes"), cases, ids=names)


def generate(
    rank: int, path: str, layout: dict[str, Any], modes: list[str]
) -> dict[str, tuple[int, list[Any]]]:
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=layout)
    batch = batch_of(model, rank)
    found = {}
    for name in modes:
        torch.manual_seed(1000 + rank)  # ranks of a group must not need the same seed
        found[name] = batch, model.generate(prompt(batch), **MODES[name]).tolist()
    return found


def expected(path: str, tp: int, batches: int, modes: list[str]) -> dict[str, list[Any]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    texts: dict[str, list[Any]] = {}
    for name in modes:
        texts[name] = []
        for batch in range(batches):
            torch.manual_seed(1000 + batch * tp)
            texts[name].append(model.generate(prompt(batch), **MODES[name]).tolist())
    return texts


def test_each_batch_gets_its_text(
    ranks: RankPool, folder: Path, family: str, layout: dict[str, Any], modes: list[str]
) -> None:
    path = checkpoint(folder, family)
    told = ranks.run(generate, path, layout, modes, timeout=120)
    tp = layout.get("tp_size", 1)
    texts = expected(path, tp, 8 // tp, modes)
    for found in told:
        for name, (batch, text) in found.items():
            assert text == texts[name][batch], (name, batch)
    if tp < 8:
        # The batches are to stop at different lengths, or nothing is tested.
        assert (
            len({len(text[0]) - prompt(b).shape[1] for b, text in enumerate(texts["sampling"])}) > 1
        )


class AfterThisRanks(StoppingCriteria):
    """Stops after as many tokens as the rank says: no two ranks of a group agree."""

    def __init__(self, start: int, rank: int) -> None:
        self.stop = start + 2 + rank

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.stop)


def stop_by_rank(rank: int, path: str) -> tuple[int, int]:
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=MIXED)
    batch = batch_of(model, rank)
    ids = prompt(batch)
    criteria = StoppingCriteriaList([AfterThisRanks(ids.shape[1], rank)])
    out = model.generate(
        ids, max_new_tokens=30, eos_token_id=None, do_sample=False, stopping_criteria=criteria
    )
    return batch, out.shape[1] - ids.shape[1]


def test_a_group_stops_together_whatever_its_ranks_criteria_say(
    ranks: RankPool, folder: Path
) -> None:
    told = ranks.run(stop_by_rank, checkpoint(folder, "qwen3_moe"))
    assert told == [(batch, 2 + 2 * batch) for batch in range(4) for _ in range(2)]


def stop_by_time(rank: int, path: str) -> tuple[int, list[Any]]:
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=MIXED)
    called = [0]
    look = MaxTimeCriteria.__call__

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        called[0] += 1
        assert look(self, *args, **kwargs) is not None
        return torch.full((args[0].shape[0],), called[0] > 3 + rank)

    MaxTimeCriteria.__call__ = late  # type: ignore[method-assign]
    try:
        out = model.generate(
            prompt(rank // 2), max_new_tokens=30, eos_token_id=None, do_sample=False, max_time=60.0
        )
    finally:
        MaxTimeCriteria.__call__ = look  # type: ignore[method-assign]
    return batch_of(model, rank), out.tolist()


def test_a_group_stops_together_by_time(ranks: RankPool, folder: Path) -> None:
    told = ranks.run(stop_by_time, checkpoint(folder, "qwen3_moe"))
    assert told[0::2] == told[1::2]


def refusing(rank: int, path: str, options: dict[str, Any]) -> str:
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=MIXED)
    ids = torch.full((1, 3 if rank < 6 else 12), 50)
    try:
        model.generate(ids, do_sample=False, **options)
    except (ValueError, OtherRankError) as error:
        told = f"{type(error).__name__}: {error}"
    # The ranks are together still.
    model.generate(ids, do_sample=False, max_new_tokens=2)
    return told


def test_arguments_that_one_rank_refuses_are_refused_by_all(ranks: RankPool, folder: Path) -> None:
    path = checkpoint(folder, "qwen3_moe")
    told = ranks.run(refusing, path, {"max_length": 10}, timeout=60)
    assert all("ValueError: Input length" in each for each in told)
    assert told[6].startswith("ValueError")
    assert told[0].startswith("OtherRankError: Generating failed on rank 6")


INPUTS: dict[str, Callable[[int], dict[str, torch.Tensor]]] = {
    "lengths": lambda rank: {"input_ids": torch.full((1, 3 + rank % 3), 50)},
    "rows": lambda rank: {"input_ids": torch.full((1 + rank % 2, 3), 50)},
    "values": lambda rank: {"input_ids": torch.full((1, 3), 50 + rank)},
    "masks": lambda rank: {
        "input_ids": torch.full((1, 3), 50),
        "attention_mask": torch.tensor([[rank % 2, 1, 1]]),
    },
}


@pytest.mark.parametrize("config", [MIXED, dispatching(tp_size=8, ep_size=8)], ids=name_of)
@pytest.mark.parametrize("inputs", [*INPUTS])
def test_different_inputs_in_a_tp_group_are_refused(
    ranks: RankPool, folder: Path, config: dict[str, Any], inputs: str
) -> None:
    def differ(rank: int, path: str) -> str:
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
        with pytest.raises(ValueError, match="must be given the same inputs") as caught:
            model.generate(**INPUTS[inputs](rank), max_new_tokens=2)
        # The ranks are together still.
        model.generate(prompt(batch_of(model, rank)), max_new_tokens=2)
        return str(caught.value)

    told = ranks.run(differ, checkpoint(folder, "qwen3_moe"), timeout=60)
    tp = config["tp_size"]
    for first in range(0, 8, tp):
        group = range(first, first + tp)
        assert len({told[rank] for rank in group}) == 1
        odd = [r for r in group if not same(INPUTS[inputs](r), INPUTS[inputs](first))]
        assert f"rank(s) {odd} were given others than rank {first}." in told[first]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def differ_in_one_group(rank: int, path: str) -> str:
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=MIXED)
    with pytest.raises((ValueError, OtherRankError)) as caught:
        model.generate(torch.full((1, 5 if rank == 3 else 3), 50), max_new_tokens=2)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_the_groups_of_a_replica_hear_that_one_was_given_different_inputs(
    ranks: RankPool, folder: Path
) -> None:
    told = ranks.run(differ_in_one_group, checkpoint(folder, "qwen3_moe"), timeout=60)
    assert all("rank(s) [3] were given others than rank 2" in each for each in told)
    assert [rank for rank, each in enumerate(told) if each.startswith("ValueError")] == [2, 3]


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": 2}, {"prompt_lookup_num_tokens": 2}], ids=str
)
def test_modes_with_other_numbers_of_forwards_are_refused(
    ranks: RankPool, folder: Path, options: dict[str, Any]
) -> None:
    path = checkpoint(folder, "qwen3_moe")
    told = ranks.run(refusing, path, {"max_new_tokens": 2, **options}, timeout=60)
    assert all("fsdp_size=1" in each for each in told)


def test_prompt_lookup_works_for_one_batch(ranks: RankPool, folder: Path) -> None:
    path = checkpoint(folder, "qwen3_moe")
    ids = torch.tensor([[20, 30, 40, 20, 30, 40, 20]])
    options = {"max_new_tokens": 8, "prompt_lookup_num_tokens": 2, "do_sample": False}

    def look_up(rank: int) -> list[Any]:
        layout = dispatching(tp_size=8, ep_size=8)
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=layout)
        return model.generate(ids, **options).tolist()

    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert ranks.run(look_up) == [plain.generate(ids, **options).tolist()] * 8
