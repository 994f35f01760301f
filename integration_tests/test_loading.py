"""A checkpoint loaded sharded is the checkpoint, and each rank reads its share of it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import tiny_models
import torch
import transformers
from dispatching import dispatching, name_of
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig as NativeConfig

import expert_parallel
from ep_plans import full_tensor, parallel_state
from ep_testing import RankPool
from expert_parallel import AutoModelForCausalLM, OtherRankError, load_report

FAMILIES = ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"]
LAYOUTS = [
    dispatching(tp_size=2, fsdp_size=4, ep_size=4),
    dispatching(tp_size=8, ep_size=8),
    dispatching(fsdp_size=8, ep_size=8),
    dispatching(tp_size=2, fsdp_size=2, dp_replicate_size=2, ep_size=4),
    dispatching(tp_size=4, fsdp_size=2),
]
MIXED = LAYOUTS[0]
IDS = torch.tensor([[5, 9, 17, 33, 65, 2, 11]])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def save(path: Path, family: str, *, original: bool = True, **changes: Any) -> Path:
    """A tiny checkpoint of a family in several files."""
    # A grouped product needs rows of 16 bytes, also of a quarter of an expert.
    inner = "intermediate_size" if family in ("mixtral", "gpt_oss") else "moe_intermediate_size"
    config = tiny_models.FAMILIES[family](**{inner: 32, **changes})
    model = tiny_models.build(config, torch.float32)
    model.save_pretrained(path, max_shard_size="60KB", save_original_format=original)
    return path


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(family) / "model", family)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("qwen") / "model", "qwen3_moe")


def compare(rank: int, path: str, config: Any, **options: Any) -> None:
    """Every parameter, the logits, and the bytes read, against plain transformers."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config, **options)
    expected = plain.state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        whole = full_tensor(found[name])
        assert whole.dtype == tensor.dtype, name
        assert torch.equal(whole, tensor), name
    with torch.no_grad():
        logits, reference = model(IDS).logits, plain(IDS).logits
    assert (logits - reference).norm() <= 1e-5 * reference.norm()
    report = load_report(model)
    assert report is not None
    assert report.bytes_read == held_bytes(model)


def held_bytes(model: torch.nn.Module) -> int:
    """What a rank holds of what checkpoints store, in bytes of float32."""
    total = 0
    persistent = model.state_dict(keep_vars=True).values()
    for tensor in {id(tensor): tensor for tensor in persistent}.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total += local.numel() * 4
    return total


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_what_is_loaded_is_what_transformers_loads(
    ranks: RankPool, checkpoint: Path, layout: dict[str, int]
) -> None:
    ranks.run(compare, str(checkpoint), layout)


@pytest.mark.parametrize("family", ["qwen3_moe"], indirect=True)
@pytest.mark.parametrize("layout", [MIXED, {"tp_size": 4, "fsdp_size": 2}])
def test_experts_may_be_fused_in_the_file(
    ranks: RankPool, family: str, layout: dict[str, int], tmp_path: Path
) -> None:
    path = save(tmp_path / "fused", family, original=False)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert any(name.endswith("experts.gate_up_proj") for name in index["weight_map"])
    ranks.run(compare, str(path), layout)


def loaded_info(rank: int, path: str, config: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """What transformers tells about a load, and the parameters, whole."""
    if config is not None:
        options["distributed_config"] = config
    torch.manual_seed(rank)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    values = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    told = {
        key: sorted(map(str, found)) for key, found in info.items() if not isinstance(found, str)
    }
    return told, values


def change(path: Path, out: Path, edit: Any) -> Path:
    """A checkpoint in one file, edited."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    edit(tensors)
    out.mkdir()
    (out / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_missing_and_unexpected_weights_are_told_as_transformers_tells_them(
    ranks: RankPool, qwen: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        for name in [name for name in tensors if "layers.0.mlp.experts" in name]:
            del tensors[name]
        tensors["model.surprise.weight"] = torch.zeros(3)

    path = str(change(qwen, tmp_path / "model", edit))
    plain, _ = loaded_info(0, path, None)
    assert "lm_head.weight" in plain["missing_keys"]
    assert "model.layers.0.mlp.experts.gate_up_proj" in plain["missing_keys"]
    values = []
    for layout in (MIXED, {"tp_size": 8}, dispatching(fsdp_size=8, ep_size=8)):
        told = ranks.run(loaded_info, path, layout)
        assert all(info == plain for info, _ in told)
        values.append(told[0][1])
    # What no file holds is drawn, the same in every layout, and by the family's own rule.
    for name in plain["missing_keys"]:
        first, *others = (found[name] for found in values)
        assert all(torch.equal(first, other) for other in others), name
        assert 0.01 < first.std() < 0.03, name
        assert abs(first.mean()) < 0.01, name
    experts = values[0]["model.layers.0.mlp.experts.gate_up_proj"]
    assert not torch.equal(experts[0], experts[4])


def test_a_missing_expert_is_an_error_on_every_rank(
    ranks: RankPool, qwen: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.mlp.experts.5.up_proj.weight"]

    path = change(qwen, tmp_path / "model", edit)
    assert all("RuntimeError" in told for told in ranks.run(failure, str(path), MIXED))


def failure(rank: int, path: str, config: Any, **options: Any) -> str:
    try:
        AutoModelForCausalLM.from_pretrained(path, distributed_config=config, **options)
    except (RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_another_shape_is_an_error_unless_it_may_be_ignored(
    ranks: RankPool, qwen: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(90, 32)

    path = str(change(qwen, tmp_path / "model", edit))
    assert all("ignore_mismatched_sizes" in told for told in ranks.run(failure, path, MIXED))
    plain, _ = loaded_info(0, path, None, ignore_mismatched_sizes=True)
    for told, values in ranks.run(ignoring, path, MIXED):
        assert told == plain
        assert 0.01 < values["lm_head.weight"].std() < 0.03


def ignoring(rank: int, path: str, config: Any) -> Any:
    return loaded_info(rank, path, config, ignore_mismatched_sizes=True)


def failing_read(rank: int, path: str) -> str:
    from expert_parallel.reading import CheckpointTensor

    def broken(self: object, *_: object) -> None:
        raise OSError("bad sector")

    if rank == 3:
        CheckpointTensor._copy = broken  # type: ignore[method-assign]
    return failure(rank, path, MIXED)


def test_a_rank_that_cannot_read_stops_all(ranks: RankPool, qwen: Path) -> None:
    told = ranks.run(failing_read, str(qwen), timeout=60)
    ranks.close()  # rank 3 is spoiled
    assert told[3] == "OSError: bad sector"
    assert told[0].startswith("OtherRankError: Loading the checkpoint failed on rank 3")
    assert OtherRankError.__name__ in told[7]


def from_own_path(rank: int, paths: dict[int, str]) -> tuple[str, float]:
    begin = time.perf_counter()
    return failure(rank, paths[rank], MIXED), time.perf_counter() - begin


def no_folder(path: Path) -> str:
    shutil.rmtree(path)
    return path.name


def broken_config(path: Path) -> str:
    (path / "config.json").write_text('{"model_type": "qwen3_moe",')
    return "config.json"


def no_index(path: Path) -> str:
    (path / "model.safetensors.index.json").unlink()
    return path.name


def broken_index(path: Path) -> str:
    (path / "model.safetensors.index.json").write_text("{")
    return f"index of the checkpoint files in {path} is not JSON"


def missing_file(path: Path) -> str:
    last = max(path.glob("*.safetensors"))
    last.unlink()
    return last.name


def short_file(path: Path) -> str:
    last = max(path.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-100])
    return f"{last.name} is no whole safetensors file"


@pytest.mark.parametrize("bad_rank", [0, 5])
@pytest.mark.parametrize(
    "spoil", [no_folder, broken_config, no_index, broken_index, missing_file, short_file]
)
def test_a_rank_that_cannot_read_its_files_stops_all(
    ranks: RankPool, qwen: Path, tmp_path: Path, spoil: Callable[[Path], str], bad_rank: int
) -> None:
    copy = Path(shutil.copytree(qwen, tmp_path / "copy"))
    named = spoil(copy)
    paths = dict.fromkeys(range(8), str(qwen)) | {bad_rank: str(copy)}
    for rank, (told, seconds) in enumerate(ranks.run(from_own_path, paths, timeout=60)):
        assert named in told
        if rank != bad_rank:
            assert f"OtherRankError: Loading the checkpoint failed on rank {bad_rank}" in told
        assert seconds < 30


def test_bin_files_are_refused_with_advice(ranks: RankPool, qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    torch.save({"lm_head.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    for told in ranks.run(failure, str(tmp_path), MIXED):
        assert "pytorch_model.bin can't be read in parts" in told
        assert "save_pretrained" in told


def test_a_training_checkpoint_is_told_from_a_model(
    ranks: RankPool, qwen: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    (tmp_path / "sharded" / "model").mkdir(parents=True)
    for told in ranks.run(failure, str(tmp_path), MIXED):
        assert f"ep checkpoint export {tmp_path}" in told


def test_contradicting_arguments_are_refused(ranks: RankPool, qwen: Path) -> None:
    def refused(rank: int) -> str:
        return failure(rank, str(qwen), MIXED, device_map="auto")

    assert "Leave device_map out" in ranks.run(refused)[0]


def tied(rank: int, path: str, config: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    compare(rank, path, config)
    # Still one parameter, with one gradient, after FSDP gathered and freed it.
    model(IDS, labels=IDS).loss.backward()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("layout", [MIXED, dispatching(tp_size=8, ep_size=8), {"fsdp_size": 8}])
def test_tied_weights_are_one(ranks: RankPool, layout: dict[str, int], tmp_path: Path) -> None:
    path = save(tmp_path / "model", "qwen3_moe", tie_word_embeddings=True)
    ranks.run(tied, str(path), layout)


def kept_in_float32(rank: int, path: str) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, distributed_config=MIXED
    )
    expected = {name: tensor.dtype for name, tensor in plain.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == expected
    assert {torch.float32, torch.bfloat16} == {*expected.values()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(full_tensor(tensor), plain.state_dict()[name]), name
    model(IDS, labels=IDS).loss.backward()


def test_modules_kept_in_float32_are_loaded_so(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(kept_in_float32, str(save(tmp_path / "model", "deepseek_v3")))


def dtype_of(rank: int, path: str, dtype: Any) -> torch.dtype:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=MIXED)
    return model.dtype


def test_dtype_is_the_checkpoints_own_or_the_one_asked_for(ranks: RankPool, qwen: Path) -> None:
    assert {*ranks.run(dtype_of, str(qwen), "auto")} == {torch.float32}
    assert {*ranks.run(dtype_of, str(qwen), torch.bfloat16)} == {torch.bfloat16}


def configured(rank: int, path: str, out: str, config: Any) -> str:
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    state = parallel_state(model)
    assert state is not None
    model.config.save_pretrained(f"{out}/{rank}")
    assert "distributed_config" not in model.config.to_dict()
    return str(state.mesh.layout)


def test_the_config_may_be_a_dict_or_transformers_own(
    ranks: RankPool, qwen: Path, tmp_path: Path
) -> None:
    sizes = {"tp_size": 2, "fsdp_size": 4}
    forms = [sizes, NativeConfig(**sizes), expert_parallel.DistributedConfig(**sizes)]
    layouts = {ranks.run(configured, str(qwen), str(tmp_path), form)[0] for form in forms}
    assert len(layouts) == 1


def test_without_a_config_it_is_transformers(qwen: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen)
    assert type(model) is transformers.Qwen3MoeForCausalLM
    assert "generate" not in vars(model)
    assert load_report(model) is None
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def by_implementation(rank: int, path: str, name: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=MIXED, experts_implementation=name
    )
    assert model.config._experts_implementation == name
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_transformers_own_experts_can_be_asked_for(ranks: RankPool, qwen: Path, name: str) -> None:
    expected = transformers.AutoModelForCausalLM.from_pretrained(qwen)(IDS).logits
    for logits in ranks.run(by_implementation, str(qwen), name):
        assert (logits - expected).norm() <= 1e-5 * expected.norm()


def test_mega_moe_is_refused_at_load_where_it_cannot_run(ranks: RankPool, qwen: Path) -> None:
    def as_experts(rank: int) -> str:
        layout = dispatching(tp_size=8, ep_size=8)
        return failure(rank, str(qwen), layout, experts_implementation="deepgemm_megamoe")

    def contradicting(rank: int) -> str:
        layout = {"tp_size": 8, "ep_size": 8, "ep_implementation": "deepgemm_megamoe"}
        return failure(rank, str(qwen), layout, experts_implementation="eager")

    assert "ValueError" in ranks.run(contradicting)[0]
    told = ranks.run(as_experts)[0]
    assert told != "loaded"
    assert "cuda" in told.lower() or "gpu" in told.lower()


def test_deep_gemm_is_refused_at_load_where_it_cannot_run(ranks: RankPool, qwen: Path) -> None:
    def with_layout(rank: int, **layout: Any) -> str:
        return failure(rank, str(qwen), layout, experts_backend="deep_gemm")

    def dispatched(rank: int) -> str:
        return with_layout(rank, **dispatching(tp_size=2, fsdp_size=4, ep_size=4))

    def not_dispatched(rank: int) -> str:
        return with_layout(rank, fsdp_size=8)

    for told in ranks.run(dispatched):
        assert 'backend "deep_gemm" cannot compute these experts' in told
    for told in ranks.run(not_dispatched):
        assert 'experts_backend="deep_gemm" is for experts that an EP plan dispatches' in told


def offloaded(rank: int, path: str) -> None:
    with pytest.warns(UserWarning, match="nothing to do"):
        AutoModelForCausalLM.from_pretrained(
            path, distributed_config={**MIXED, "fsdp_cpu_offload": True}
        )


def test_offloading_has_nothing_to_do_on_a_cpu(ranks: RankPool, qwen: Path) -> None:
    ranks.run(offloaded, str(qwen))


def test_the_wrong_number_of_processes_is_told(ranks: RankPool, qwen: Path) -> None:
    told = ranks.run(failure, str(qwen), {"tp_size": 2, "fsdp_size": 2})[0]
    assert told.startswith("ValueError")
    assert "8" in told


def test_other_auto_classes(ranks: RankPool, qwen: Path) -> None:
    def load(rank: int) -> list[str]:
        names = []
        for name in ("AutoModel", "AutoModelForSequenceClassification"):
            auto = getattr(expert_parallel, name)
            # A layout that every expert plan has; its keys begin at the base model here.
            layout = {"tp_size": 8, "ep_size": 8}
            model = auto.from_pretrained(qwen, distributed_config=layout)
            with torch.no_grad():
                model(IDS)
            names.append(type(model).__name__.removeprefix("FSDP"))
        return names

    expected = ["Qwen3MoeModel", "Qwen3MoeForSequenceClassification"]
    assert ranks.run(load)[0] == expected


@pytest.mark.parametrize("form", checkpoints.FORMS)
def test_memory_stays_below_the_shards_and_one_tensor(
    ranks: RankPool, form: str, tmp_path: Path
) -> None:
    config = checkpoints.moe_config(num_hidden_layers=3, hidden_size=512, vocab_size=4096)
    checkpoints.write_checkpoint(tmp_path / "model", config, form, file_bytes=40 << 20)
    small = checkpoints.moe_config(
        hidden_size=64, vocab_size=128, moe_intermediate_size=32, num_hidden_layers=1
    )
    checkpoints.write_checkpoint(tmp_path / "warm", small, "fused", file_bytes=1 << 30)
    largest = 2 * max(shape.numel() for _, shape in checkpoints.tensors(config, form))
    runtime = 4 << 20
    costs = ranks.run(checkpoints.load_cost, str(tmp_path / "model"), MIXED, str(tmp_path / "warm"))
    for cost in costs:
        assert cost.read == cost.shards - buffers(config)
        assert cost.memory <= cost.shards + largest + runtime


def buffers(config: Any) -> int:
    """Bytes of what is computed and not loaded: the rotary frequencies, twice."""
    return 2 * (config.head_dim // 2) * 4


# What native transformers refuses, or loads and then fails in the forward.
@pytest.mark.parametrize(
    "layout",
    [
        {"tp_size": 8, "tp_plan": {}, "ep_size": 8},
        {"tp_size": 8, "enable_expert_parallel": True},
        {"tp_size": 2, "fsdp_size": 4, "tp_plan": {}},
        {"tp_size": 8, "ep_size": 8},  # twice as many ranks as key-value heads
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:enable_expert_parallel:FutureWarning")
def test_layouts_that_native_loading_lacks(
    ranks: RankPool, qwen: Path, layout: dict[str, Any]
) -> None:
    ranks.run(compare, str(qwen), layout)


@pytest.mark.parametrize(
    "layout",
    [{"tp_size": 2, "fsdp_size": 4}, {"tp_size": 2, "fsdp_size": 4, "ep_size": 4}],
    ids=str,
)
def test_llama4_is_loaded_and_trains(
    ranks: RankPool, layout: dict[str, int], tmp_path: Path
) -> None:
    def train(rank: int) -> None:
        compare(rank, path, layout)
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=layout)
        model(IDS, labels=IDS).loss.backward()

    path = str(save(tmp_path / "model", "llama4"))
    ranks.run(train)


def test_an_override_that_needs_others_says_so_or_works(ranks: RankPool, qwen: Path) -> None:
    plan = {"model.layers.*.self_attn.q_proj": "colwise_rep"}

    def load(rank: int) -> str:
        layout = {"tp_size": 4, "fsdp_size": 2, "tp_plan": plan}
        told = failure(rank, str(qwen), layout)
        if told == "loaded":
            compare(rank, str(qwen), layout)
        return told

    told = ranks.run(load)[0]
    assert told == "loaded" or ("k_proj" in told and "q_proj" in told)
