"""A model that is split into pipeline stages gives what the whole one gives, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from dispatching import name_of
from equality import relative_error
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from ep_mesh import DistributedConfig
from ep_plans import full_tensor, parallel_state
from ep_testing import RankPool
from expert_parallel import AutoModelForCausalLM, initialize, load_report, parallelize

FOUR = {"num_hidden_layers": 4}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: tiny_models.qwen3_moe(**FOUR),
    "dense first": lambda: tiny_models.deepseek_v3(**FOUR, first_k_dense_replace=2),
    "alternating": lambda: tiny_models.qwen2_moe(**FOUR, decoder_sparse_step=2),
    "layer types": lambda: tiny_models.gpt_oss(
        **FOUR, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "tied": lambda: tiny_models.mixtral(**FOUR, tie_word_embeddings=True),
    "llama4": lambda: tiny_models.llama4(**FOUR),
}
LAYOUTS: list[dict[str, Any]] = [
    {"pp_size": 2},
    {"pp_size": 4},
    {"pp_size": 2, "pp_schedule": "interleaved_1f1b"},
    {"pp_size": 2, "pp_schedule": "zero_bubble"},
    {"pp_size": 2, "pp_stages": [1, 3]},
    {"pp_size": 2, "tp_size": 2, "ep_size": 2},
    {"pp_size": 2, "fsdp_size": 2, "ep_size": 2},
    {"pp_size": 2, "tp_size": 2, "ep_size": 2, "enable_sequence_parallel": True},
    {"pp_size": 2, "tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    {"pp_size": 2, "tp_size": 2, "dp_replicate_size": 2, "ep_size": 2},
    {"pp_size": 2, "fsdp_size": 2, "ep_size": 2, "pp_schedule": "zero_bubble"},
]
MIXED = LAYOUTS[8]
CHUNKED = LAYOUTS[2:4]
FIRST = "qwen3_moe"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every model in one layout, one model in every layout; with `--all-layouts` everything.

    Loaded and saved is that one where a rank has several stages.
    """
    if not {"model", "layout"} <= {*metafunc.fixturenames}:
        return
    whole = metafunc.config.getoption("--all-layouts")
    loads = metafunc.function is test_it_is_loaded_generates_and_is_saved_as_one
    layouts = CHUNKED if loads else LAYOUTS
    cases = [
        (model, layout)
        for model in CONFIGS
        for layout in LAYOUTS
        if whole or layout is MIXED or (model == FIRST and layout in layouts)
    ]
    names = [f"{model}-{name_of(layout)}" for model, layout in cases]
    metafunc.parametrize(("model", "layout"), cases, ids=names)


def build(
    model: str, dtype: torch.dtype = torch.float64, **changes: Any
) -> transformers.PreTrainedModel:
    config = CONFIGS[model]()
    for name, value in changes.items():
        setattr(config, name, value)
    return tiny_models.build(config, dtype).eval()


def batch(number: int) -> dict[str, torch.Tensor]:
    """Token ids, labels and a mask with padding of a batch."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 96, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6 - number % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def forward(
    rank: int, model: str, layout: dict[str, Any], options: dict[str, Any], changes: dict[str, Any]
) -> tuple[int, Any]:
    config = DistributedConfig(**layout)
    split = parallelize(build(model, **changes), config)
    state = parallel_state(split)
    assert state is not None
    assert state.pipeline is not None
    here = [i for stage in state.pipeline.here for i in state.pipeline.stages.ranges[stage]]
    numbers = {
        int(name.split(".")[2])
        for name, _ in split.named_parameters()
        if name.startswith("model.layers.")
    }
    assert numbers == set(here), "a rank holds the layers of its stages, under their numbers"
    shard = config.layout.batch_of(rank)
    with torch.no_grad():
        output = split(**batch(shard), **options)
    return shard, {name: value for name, value in output.items() if name != "cache"}


def world(layout: dict[str, Any]) -> int:
    return DistributedConfig(**layout).world_size


def test_a_forward_gives_the_whole_models_output(
    ranks: RankPool, model: str, layout: dict[str, Any]
) -> None:
    told = ranks.run(forward, model, layout, {}, {}, world=world(layout))
    whole = build(model)
    for shard, output in told:
        with torch.no_grad():
            expected = whole(**batch(shard))
        assert relative_error(output["logits"], expected.logits) < 1e-5
        assert relative_error(output["loss"], expected.loss) < 1e-5


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 6, "do_sample": False},
    "sampling": {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "top_k": 20},
    "static cache": {"max_new_tokens": 5, "cache_implementation": "static", "do_sample": False},
    "beams": {"max_new_tokens": 4, "num_beams": 3, "do_sample": False},
    "no cache": {"max_new_tokens": 3, "use_cache": False, "do_sample": False},
}


def prompt(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(14, 96, (1 + number % 2, 3 + number), generator=generator)


def save(folder: Path, model: str) -> str:
    whole = build(model, torch.float32)
    # One token in eight ends a text, so that batches stop at different lengths.
    whole.generation_config.eos_token_id = list(range(2, 14))
    whole.save_pretrained(folder / "whole")
    return str(folder / "whole")


def generate_and_save(
    rank: int, path: str, layout: dict[str, Any], modes: list[str], target: str
) -> tuple[int, dict[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=layout)
    state = parallel_state(model)
    assert state is not None
    shard = state.mesh.layout.batch_of(rank)
    found = {}
    for name in modes:
        torch.manual_seed(1000 + rank)  # ranks of one batch must not need the same seed
        found[name] = model.generate(prompt(shard), **MODES[name]).tolist()
    model.save_pretrained(target)
    return shard, found


def test_it_is_loaded_generates_and_is_saved_as_one(
    ranks: RankPool, model: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    path = save(tmp_path, model)
    modes = [*MODES] if layout in (MIXED, LAYOUTS[2]) else ["greedy", "sampling"]
    args = (path, layout, modes, str(tmp_path / "saved"))
    told = ranks.run(generate_and_save, *args, world=world(layout))
    whole = transformers.AutoModelForCausalLM.from_pretrained(path)
    first_of: dict[int, int] = {}
    for rank, (shard, texts) in enumerate(told):
        for name in modes:
            torch.manual_seed(1000 + first_of.setdefault(shard, rank))
            expected = whole.generate(prompt(shard), **MODES[name]).tolist()
            assert texts[name] == expected, (rank, name)
    saved, known = contents(tmp_path / "saved"), contents(Path(path))
    assert saved.keys() == known.keys()
    assert all(torch.equal(saved[name], value) for name, value in known.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.state_dict().items())


def contents(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found.update(load_file(file))
    return found


@pytest.mark.parametrize(
    "layout", [{"pp_size": 2, "pp_stages": [1, 3]}, {"pp_size": 4}], ids=name_of
)
def test_the_auxiliary_loss_is_that_of_all_layers(ranks: RankPool, layout: dict[str, Any]) -> None:
    """Also with a stage whose layers are all dense."""
    changes = {"output_router_logits": True}
    told = ranks.run(forward, "alternating", layout, {}, changes, world=world(layout))
    with torch.no_grad():
        expected = build("alternating", **changes)(**batch(0))
    for _, output in told:
        assert len(output["router_logits"]) == len(expected.router_logits)
        for name in ("loss", "aux_loss", "logits"):
            assert relative_error(output[name], expected[name]) < 1e-5, name


def fail_and_go_on(rank: int) -> tuple[str, float]:
    config = DistributedConfig(pp_size=4)
    model = parallelize(build("qwen3_moe"), config)
    wrong = torch.tensor([[5, 96]])  # one token more than there are: only the first stage sees it
    with pytest.raises(Exception, match="index out of range") as caught, torch.no_grad():
        model(input_ids=wrong)
    with pytest.raises(RuntimeError, match="EPTrainer"):
        model.train()(**batch(0))
    with pytest.raises(ValueError, match="output_hidden_states"):
        model.eval()(**batch(0), output_hidden_states=True)
    with torch.no_grad():
        as_tuple = model(**batch(0), return_dict=False)
    return type(caught.value).__name__, float(as_tuple[0])


def test_an_error_of_one_stage_is_told_on_all(ranks: RankPool) -> None:
    told = ranks.run(fail_and_go_on, world=4)
    assert [name for name, _ in told] == ["IndexError"] + ["OtherStageError"] * 3
    with torch.no_grad():
        expected = build("qwen3_moe")(**batch(0)).loss
    assert all(abs(loss - expected.item()) < 1e-9 for _, loss in told)


def refused(rank: int, layout: dict[str, Any]) -> str:
    model = build("qwen3_moe")
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the caller looks at the text)
        parallelize(model, DistributedConfig(**layout))
    assert names == [name for name, _ in model.named_modules()]
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"pp_size": 4, "pp_schedule": "zero_bubble"}, "makes 8 pipeline stages"),
        ({"pp_size": 4, "pp_stages": [1, 1, 1, 2]}, "has 5 layers together, but"),
    ],
)
def test_stages_that_do_not_fit_are_refused_on_all_ranks(
    ranks: RankPool, layout: dict[str, Any], reason: str
) -> None:
    for told in ranks.run(refused, layout, world=4):
        assert reason in told


def initial(rank: int, model: str, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(CONFIGS[model]())
    initialize(parallelize(made, DistributedConfig(**layout)), seed=3)
    return {name: full_tensor(p.detach()) for name, p in made.named_parameters()}


@pytest.mark.parametrize("model", ["qwen3_moe", "tied"])
def test_initial_values_do_not_depend_on_the_stages(ranks: RankPool, model: str) -> None:
    (expected,) = ranks.run(initial, model, {}, world=1)
    found: dict[str, torch.Tensor] = {}
    for held in ranks.run(initial, model, {"pp_size": 2, "tp_size": 2}, world=4):
        for name, value in held.items():
            assert torch.equal(found.setdefault(name, value), value), name
    assert found.keys() >= expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def report(rank: int, path: str) -> dict[str, Any]:
    _, told = AutoModelForCausalLM.from_pretrained(
        path, distributed_config={"pp_size": 2}, output_loading_info=True
    )
    return told


def test_every_stage_tells_what_is_missing_and_unexpected(ranks: RankPool, tmp_path: Path) -> None:
    path = Path(save(tmp_path, "qwen3_moe"))
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    missing = "model.layers.3.self_attn.q_proj.weight"
    tensors["model.layers.0.nothing.weight"] = tensors.pop(missing)
    save_file(tensors, file, metadata={"format": "pt"})
    for told in ranks.run(report, str(path), world=2):
        assert set(told["missing_keys"]) == {missing}
        assert set(told["unexpected_keys"]) == {"model.layers.0.nothing.weight"}


def bytes_read(rank: int, path: str) -> int:
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config={"pp_size": 2})
    told = load_report(model)
    assert told is not None
    assert told.bytes_read == sum(p.numel() * p.element_size() for p in model.parameters())
    return told.bytes_read


def test_a_stage_reads_its_own_tensors(ranks: RankPool, tmp_path: Path) -> None:
    path = save(tmp_path, "qwen3_moe")
    whole = sum(
        p.numel() * p.element_size() for p in build("qwen3_moe", torch.float32).parameters()
    )
    assert sum(ranks.run(bytes_read, path, world=2)) == whole


def looked_up(rank: int, path: str, schedule: str) -> Any:
    layout = {"pp_size": 2, "pp_schedule": schedule}
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=layout)
    text = torch.tensor([[20, 21, 22, 20, 21, 22, 20, 21]])
    return model.generate(
        text, max_new_tokens=8, prompt_lookup_num_tokens=3, eos_token_id=0, do_sample=False
    )


def test_tokens_are_taken_back_where_a_rank_has_one_stage(ranks: RankPool, tmp_path: Path) -> None:
    path = save(tmp_path, "qwen3_moe")
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    text = torch.tensor([[20, 21, 22, 20, 21, 22, 20, 21]])
    expected = plain.generate(text, max_new_tokens=8, eos_token_id=0, do_sample=False)
    assert all(torch.equal(told, expected) for told in ranks.run(looked_up, path, "1f1b", world=2))
    with pytest.raises(AssertionError, match="takes tokens back"):
        ranks.run(looked_up, path, "zero_bubble", world=2)


def continued(rank: int, model: str, layout: dict[str, Any]) -> list[torch.Tensor]:
    split = parallelize(build(model), DistributedConfig(**layout))
    return steps(split)


@torch.no_grad()
def steps(model: torch.nn.Module) -> list[torch.Tensor]:
    """The logits of a text with padding, given piece by piece, its place known by the cache alone."""
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 3:5] = 0
    cache, found = None, []
    for start, end in ((0, 9), (9, 10), (10, 12)):
        output = model(ids[:, start:end], mask[:, :end], cache=cache, use_cache=True)
        cache = output.cache
        found.append(output.logits)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("name", ["qwen3_moe", "layer types"])
def test_the_cache_knows_its_length_on_every_stage(
    ranks: RankPool, name: str, schedule: str
) -> None:
    layout = {"pp_size": 2, "pp_schedule": schedule}
    expected = steps(build(name))
    for told in ranks.run(continued, name, layout, world=2):
        for logits, whole in zip(told, expected, strict=True):
            assert relative_error(logits, whole) < 1e-5
