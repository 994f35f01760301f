"""Sharded transformers models equal one process: accumulation, overrides, slices, modes, dtypes.

In float64 with model code widened too (`equality.all_float64`), unless a test is about a dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from dispatching import dispatching
from equality import MAX_NORM, all_float64, by_mesh, relative_error
from tiny_models import FAMILIES, build
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ep_kernels import module_experts_forward
from ep_mesh import DistributedConfig, ParallelMesh
from ep_plans import clip_grad_norm_, full_tensor, parallel_state, parallelize
from ep_testing.pool import RankPool

Inputs = dict[str, Tensor]
LAYOUT = {"tp_size": 2, "fsdp_size": 4, "ep_size": 4}
ALL_KINDS = {"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 4}
SHARED = {"tp_size": 4, "fsdp_size": 2, "ep_size": 4}
REPLICA_WIDE = {"tp_size": 4, "fsdp_size": 2, "ep_size": 8}
ATTENTION = "model.layers.*.self_attn"
MASKING = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}


@dataclass(frozen=True)
class Run:
    """A training of a sharded model, to be compared with one process on the same batches."""

    family: str
    sizes: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    size: int = 2
    length: int = 7
    steps: int = 1
    micro: int = 1
    deferred: bool = False
    padded: bool = False
    prepare: Callable[[Any], None] | None = None  # both models, before anything else
    prepare_sharded: Callable[[Any], None] | None = None
    plain_clip: bool = False
    tolerance: float = 1e-10


def config_of(family: str, sizes: dict[str, Any]) -> DistributedConfig:
    """Tokens move in every layout, also where transformers ships a masking plan (5.17)."""
    given = "ep_plan" in sizes or family == "llama4"
    return DistributedConfig(**(sizes if given else dispatching(**sizes)))


def batches(run: Run, config: DistributedConfig, vocab: int) -> list[list[list[Inputs]]]:
    """Inputs by step, micro-batch and data shard."""
    generator = torch.Generator().manual_seed(1)

    def one() -> Inputs:
        shape = (run.size, run.length)
        ids = torch.randint(3, vocab, shape, generator=generator)
        if not run.padded:
            return {"input_ids": ids, "labels": ids}
        # Rows of different lengths, each shard another number of labels.
        lengths = torch.randint(2, run.length + 1, (run.size, 1), generator=generator)
        mask = torch.arange(run.length) < lengths
        labels = ids.masked_fill(~mask, -100)
        labels[:, 0] = -100
        return {"input_ids": ids.masked_fill(~mask, 0), "labels": labels, "attention_mask": mask}

    return [
        [[one() for _ in range(config.dp_size)] for _ in range(run.micro)] for _ in range(run.steps)
    ]


def optimizer(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-6, foreach=False)


def train_one_process(run: Run, model: Any, data: list[list[list[Inputs]]]) -> dict[str, Any]:
    """Losses by step, gradients of the last step, norms, and the parameters at the end."""
    adamw = optimizer([p for p in model.parameters() if p.requires_grad])
    losses, norms, grads = [], [], {}
    for step in data:
        adamw.zero_grad()
        losses.append([[model(**shard, use_cache=False).loss for shard in part] for part in step])
        total = torch.stack([torch.stack(part).mean() for part in losses[-1]]).mean()
        total.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        adamw.step()
    return {"losses": losses, "norms": norms, "grads": grads}


def defer(model: nn.Module, *, last: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last, recurse=False)


def compare(rank: int, run: Run) -> None:
    """The law: losses, gradients, norms and stepped parameters are those of one process."""
    torch.set_num_threads(1)
    with all_float64():
        config = config_of(run.family, run.sizes)
        expected, model = (build(FAMILIES[run.family](**run.changes)) for _ in range(2))
        for one in (expected, model):
            if run.prepare is not None:
                run.prepare(one)
        data = batches(run, config, expected.config.vocab_size)
        right = train_one_process(run, expected, data)
        mesh = ParallelMesh(config.layout)
        parallelize(model, mesh, config, experts_forward=module_experts_forward)
        if run.prepare_sharded is not None:
            run.prepare_sharded(model)
        shard = mesh.layout.batch_of(rank)
        adamw = optimizer(by_mesh(model))
        for number, step in enumerate(data):
            adamw.zero_grad()
            for index, part in enumerate(step):
                if run.deferred:
                    defer(model, last=index == run.micro - 1)
                loss = model(**part[shard], use_cache=False).loss
                told = right["losses"][number][index][shard]
                assert relative_error(loss.detach(), told.detach()) < run.tolerance, "loss"
                (loss / run.micro).backward()
            if number == run.steps - 1:
                check_gradients(model, right["grads"], run.tolerance)
            clip = torch.nn.utils.clip_grad_norm_ if run.plain_clip else clip_grad_norm_
            norm = full_tensor(clip(model.parameters(), MAX_NORM))
            assert relative_error(norm, right["norms"][number]) < run.tolerance, "norm"
            adamw.step()
        for name, parameter in expected.named_parameters():
            stepped = full_tensor(model.get_parameter(name))
            assert relative_error(stepped, parameter.detach()) < run.tolerance, name


def check_gradients(model: nn.Module, expected: dict[str, Tensor], tolerance: float) -> None:
    scale = 1e-4 * max(grad.norm().item() for grad in expected.values())
    wrong = {}
    for name, parameter in model.named_parameters():
        if name not in expected:
            assert parameter.grad is None, f"a gradient of {name}"
            continue
        assert parameter.grad is not None, f"no gradient of {name}"
        found = full_tensor(parameter.grad)
        error = (found - expected[name]).norm().item() / max(expected[name].norm().item(), scale)
        if not error < tolerance:
            ratio = found.norm() / expected[name].norm()
            wrong[name] = f"off by {error:.1e}, {ratio:.3f} times as large"
    assert not wrong, wrong


# -- gradient accumulation and steps


@pytest.mark.parametrize("deferred", [False, True])
def test_each_micro_batch_counts_once(ranks: RankPool, deferred: bool) -> None:
    """Head norms included, whose gradients TP ranks sum (natively once more per micro-batch)."""
    more = {"micro": 3, "steps": 2, "deferred": deferred}
    ranks.run(compare, Run("qwen3_moe", LAYOUT, **more))
    ranks.run(compare, Run("qwen3_moe", {"tp_size": 4, "ep_size": 4}, **more), world=4)
    ranks.run(compare, Run("qwen3_moe", {"tp_size": 4, "fsdp_over_tp": False}, **more), world=4)
    ranks.run(compare, Run("gpt_oss", ALL_KINDS, **more))


@pytest.mark.parametrize("plain_clip", [False, True])
def test_a_loop_of_ones_own(ranks: RankPool, plain_clip: bool) -> None:
    """Three clipped steps, with our clipping or torch's."""
    ranks.run(compare, Run("qwen3_moe", LAYOUT, steps=3, plain_clip=plain_clip))
    ranks.run(compare, Run("mixtral", {"tp_size": 8, "ep_size": 8}, steps=3, plain_clip=plain_clip))


def test_expert_gradients_have_the_right_size(ranks: RankPool) -> None:
    """Neither the copies of an expert nor the ranks that share a batch count again."""
    for sizes in (
        {"fsdp_size": 8, "ep_size": 2},
        {"fsdp_size": 8, "ep_size": 8},
        REPLICA_WIDE,
        {"fsdp_size": 2, "dp_replicate_size": 4, "ep_size": 2},
        {"tp_size": 4, "dp_replicate_size": 2, "ep_size": 4},
    ):
        ranks.run(compare, Run("mixtral", sizes))


# -- plans and overrides


def test_an_empty_tp_plan(ranks: RankPool) -> None:
    ranks.run(compare, Run("qwen3_moe", SHARED | {"tp_plan": {}}))
    ranks.run(compare, Run("qwen3_moe", LAYOUT | {"tp_plan": {}, "fsdp_over_tp": False}))


def old_flag(rank: int) -> None:
    with pytest.warns(FutureWarning, match="enable_expert_parallel"):
        config = DistributedConfig(tp_size=2, fsdp_size=4, enable_expert_parallel=True)
    assert (config.ep_size, config.tp_plan) == (2, {})
    sizes = {"tp_size": 2, "fsdp_size": 4, "enable_expert_parallel": True}
    compare(rank, Run("qwen3_moe", sizes))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_deprecated_flag(ranks: RankPool) -> None:
    ranks.run(old_flag)


def refuse_queries_alone(rank: int) -> None:
    alone = {f"{ATTENTION}.q_proj": "colwise_rep"}
    config = config_of("qwen3_moe", LAYOUT | {"tp_plan": alone})
    model = build(FAMILIES["qwen3_moe"]())
    with pytest.raises(ValueError, match="do not fit together") as error:
        parallelize(model, ParallelMesh(config.layout), config)
    text = str(error.value)
    for word in ("q_proj", "k_proj", "v_proj", "o_proj", "'colwise_rep'", "'rowwise_split_input'"):
        assert word in text
    assert parallel_state(model) is None


def test_an_override_that_cannot_work_names_the_rules_that_do(ranks: RankPool) -> None:
    ranks.run(refuse_queries_alone)
    gathered = {f"{ATTENTION}.{name}_proj": "colwise_rep" for name in "qkv"} | {
        f"{ATTENTION}.o_proj": "rowwise_split_input",
        f"{ATTENTION}.q_norm": "replicate",
        f"{ATTENTION}.k_norm": "replicate",
    }
    ranks.run(compare, Run("qwen3_moe", LAYOUT | {"tp_plan": gathered}))
    whole = {
        f"{ATTENTION}.{name}": "replicate" for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    whole |= {f"{ATTENTION}.{name}": "replicate" for name in ("q_norm", "k_norm")}
    ranks.run(compare, Run("qwen3_moe", LAYOUT | {"tp_plan": whole}))


def test_both_generations_of_expert_plans(ranks: RankPool) -> None:
    ranks.run(compare, Run("qwen3_moe", SHARED | {"ep_plan": MASKING}))
    # The router rule is ignored.
    dispatch = MASKING | {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
    ranks.run(compare, Run("qwen3_moe", LAYOUT | {"ep_plan": dispatch}))
    sliced = SHARED | {"ep_plan": MASKING, "enable_sequence_parallel": True}
    ranks.run(compare, Run("qwen2_moe", sliced))


def test_llama4_in_tp_and_with_an_expert_plan_of_ones_own(ranks: RankPool) -> None:
    ranks.run(compare, Run("llama4", {"tp_size": 2}), world=2)
    experts = "model.layers.*.feed_forward.experts"
    own = {
        experts: "ep_dispatch_experts",
        f"{experts}.gate_up_proj": "grouped_gemm",
        f"{experts}.down_proj": "grouped_gemm",
    }
    ranks.run(compare, Run("llama4", LAYOUT | {"ep_plan": own}))
    masking = own | {experts: "moe_tp_experts", "model.layers.*.feed_forward.router": "ep_router"}
    ranks.run(compare, Run("llama4", SHARED | {"ep_plan": masking}))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 2, "fsdp_size": 4, "ep_size": 3}, "ep_size=3"),
        ({"tp_size": 4, "fsdp_size": 2, "ep_size": 2}, "ep_size=2"),
        (LAYOUT | {"ep_implementation": "all_reduce"}, "all_reduce"),
        ({"tp_size": 0}, "tp_size"),
    ],
)
def test_sizes_that_cannot_work_are_refused_when_they_are_given(
    sizes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        DistributedConfig(**sizes)


# -- sizes


def test_odd_sizes(ranks: RankPool) -> None:
    """Nothing divides: vocabulary, dense and expert MLPs; more ranks than there are rows to shard."""
    odd = {"vocab_size": 89, "intermediate_size": 29, "moe_intermediate_size": 11}
    ranks.run(compare, Run("qwen3_moe", {"tp_size": 8, "ep_size": 8}, odd))
    ranks.run(compare, Run("qwen3_moe", {"tp_size": 4, "fsdp_size": 2}, odd))
    few = {"num_experts": 2, "num_experts_per_tok": 1}
    ranks.run(compare, Run("qwen3_moe", {"fsdp_size": 8, "ep_size": 2}, few))
    shared = {"shared_expert_intermediate_size": 5, "moe_intermediate_size": 3}
    ranks.run(compare, Run("qwen2_moe", {"tp_size": 8, "ep_size": 8}, shared))


def test_one_token(ranks: RankPool) -> None:
    for sizes in (REPLICA_WIDE, {"fsdp_size": 8, "ep_size": 8}, {"tp_size": 8}):
        ranks.run(compare, Run("gpt_oss", sizes, length=2, size=1))


def one_expert_only(model: Any) -> None:
    """Every token takes experts 0 and 1."""
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
            parameter.data.mul_(1e-3)
            parameter.data[0] += 3.0
            parameter.data[1] += 2.0
        if "post_attention_layernorm" in name:
            parameter.data.abs_()


def positive_inputs(model: Any) -> None:
    one_expert_only(model)
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_pre_hook(lambda m, args: (args[0].abs(), *args[1:]))


def idle_experts(rank: int, run: Run) -> None:
    """Ranks without a token join every collective, and their gradient is exactly zero."""
    idle: list[Tensor] = []

    def keep(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "experts." in name and parameter.ndim == 3:
                parameter.register_post_accumulate_grad_hook(
                    lambda p: idle.append(full_tensor(p.grad)[2:])
                )

    compare(rank, Run(**{**run.__dict__, "prepare_sharded": keep}))
    assert idle
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in idle)


def test_a_rank_whose_experts_get_no_token(ranks: RankPool) -> None:
    for sizes in (
        {"fsdp_size": 8, "ep_size": 8},
        {"fsdp_size": 8, "ep_size": 4},
        LAYOUT,
        SHARED | {"ep_implementation": "all_reduce"},
    ):
        ranks.run(idle_experts, Run("qwen3_moe", sizes, prepare=positive_inputs, micro=2))


WAYS: list[dict[str, Any]] = [
    LAYOUT,
    SHARED | {"ep_implementation": "all_reduce"},
    SHARED | {"ep_plan": MASKING},
]


def unchosen_experts(rank: int, sizes: dict[str, Any], value: float) -> None:
    """Experts that no token takes leave no trace, whatever they hold."""
    torch.set_num_threads(1)
    config = config_of("qwen3_moe", sizes)
    mesh = ParallelMesh(config.layout)
    found = []
    with all_float64():
        for poison in (None, value):
            model = build(FAMILIES["qwen3_moe"]())
            positive_inputs(model)
            for name, parameter in model.named_parameters():
                if poison is not None and "experts." in name:
                    parameter.data[2:] = poison
            parallelize(model, mesh, config, experts_forward=module_experts_forward)
            inputs = batches(Run("qwen3_moe", sizes), config, model.config.vocab_size)[0][0]
            loss = model(**inputs[mesh.layout.batch_of(rank)], use_cache=False).loss
            loss.backward()
            grads = {n: full_tensor(p.grad) for n, p in model.named_parameters()}
            found.append({"loss": loss.detach()} | grads)
    clean, poisoned = found
    for name, expected in clean.items():
        assert torch.equal(poisoned[name], expected), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unchosen_experts_leave_no_trace(ranks: RankPool, value: float) -> None:
    for sizes in WAYS:
        ranks.run(unchosen_experts, sizes, value)


def in_dirty_memory(rank: int, run: Run) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills new memory with NaN
    try:
        assert torch.empty(1).isnan()
        compare(rank, run)
    finally:
        torch.use_deterministic_algorithms(False)


def test_new_memory_may_hold_anything(ranks: RankPool) -> None:
    """In the second step too, whose backward may meet what the first one left."""
    for sizes in (*WAYS, LAYOUT | {"enable_sequence_parallel": True}):
        ranks.run(in_dirty_memory, Run("qwen3_moe", sizes, steps=2, micro=2))


# -- sequences in slices


@pytest.mark.parametrize("length", [2, 3, 6])
def test_slices_of_uneven_and_short_sequences(ranks: RankPool, length: int) -> None:
    sliced = {"enable_sequence_parallel": True}
    ranks.run(compare, Run("qwen2_moe", SHARED | sliced, length=length))  # shared experts
    ranks.run(compare, Run("qwen3_moe", {"tp_size": 8, "ep_size": 8} | sliced, length=length))


def test_slices_in_every_family(ranks: RankPool) -> None:
    sliced = {"enable_sequence_parallel": True}
    for family in FAMILIES:
        ranks.run(compare, Run(family, LAYOUT | sliced))
    ranks.run(compare, Run("qwen2_moe", ALL_KINDS | sliced | {"fsdp_over_tp": True}))
    ranks.run(compare, Run("deepseek_v3", SHARED | sliced | {"fsdp_over_tp": False}, micro=2))
    ranks.run(compare, Run("qwen3_moe", {"tp_size": 4, "fsdp_size": 2} | sliced))  # TP experts


def shapes_seen(rank: int, family: str) -> dict[str, tuple[int, ...]]:
    config = config_of(family, SHARED | {"enable_sequence_parallel": True})
    model = build(FAMILIES[family]())
    parallelize(model, ParallelMesh(config.layout), config)
    seen: dict[str, tuple[int, ...]] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if tensors:
            seen[name] = tuple(tensors[0].shape)

    for name, module in model.named_modules():
        module.register_forward_pre_hook(functools.partial(note, name), with_kwargs=True)
    model(input_ids=torch.arange(3, 17).view(2, 7), use_cache=False)
    return seen


def test_between_regions_the_activations_are_slices(ranks: RankPool) -> None:
    for rank, seen in enumerate(ranks.run(shapes_seen, "qwen2_moe")):
        length = (2, 2, 2, 1)[rank % 4]
        for name in ("1", "0.input_layernorm", "1.post_attention_layernorm", "1.mlp"):
            assert seen[f"model.layers.{name}"] == (2, length, 32), name
        assert seen["model.layers.1.mlp.experts"] == (2 * length, 32)
        assert seen["model.layers.1.mlp.gate"] == (2 * length, 32)
        assert seen["model.layers.1.self_attn.q_proj"] == (2, 7, 32)
        assert seen["model.layers.1.mlp.shared_expert.up_proj"] == (14, 32)
        assert seen["model.norm"] == seen["lm_head"] == (2, 7, 32)


# -- activation checkpointing


def checkpointing(use_reentrant: bool, model: Any) -> None:
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    if use_reentrant:
        model.enable_input_require_grads()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(ranks: RankPool, use_reentrant: bool) -> None:
    prepare = functools.partial(checkpointing, use_reentrant)
    for family, sizes in (
        ("qwen3_moe", LAYOUT),
        ("gpt_oss", ALL_KINDS),
        ("deepseek_v3", SHARED | {"enable_sequence_parallel": True}),
        ("llama4", REPLICA_WIDE),
    ):
        ranks.run(compare, Run(family, sizes, prepare_sharded=prepare, micro=2))


# -- inputs and frozen parts


def test_padding_and_labels_that_do_not_count(ranks: RankPool) -> None:
    for family, sizes in (
        ("qwen3_moe", LAYOUT),
        ("gpt_oss", SHARED),
        ("qwen2_moe", ALL_KINDS | {"enable_sequence_parallel": True}),
        ("llama4", LAYOUT),
    ):
        ranks.run(compare, Run(family, sizes, padded=True, size=3, length=9, micro=2))


def freeze(part: str, model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((part not in name) if part[0] != "!" else part[1:] in name)


@pytest.mark.parametrize(
    "part", ["self_attn", "experts", "gate.weight", "embed_tokens", "!lm_head", "!gate.weight"]
)
def test_frozen_parameters(ranks: RankPool, part: str) -> None:
    prepare = functools.partial(freeze, part)
    ranks.run(compare, Run("qwen3_moe", LAYOUT, prepare=prepare, steps=2))


def tied_model(rank: int, sizes: dict[str, Any]) -> None:
    compare(rank, Run("qwen3_moe", sizes, {"tie_word_embeddings": True}, steps=2))


def test_tied_embeddings(ranks: RankPool) -> None:
    for sizes in (LAYOUT, {"tp_size": 8}, {"fsdp_size": 8, "ep_size": 8}, LAYOUT | {"tp_plan": {}}):
        ranks.run(tied_model, sizes)


# -- without gradients


def forward_only(rank: int, family: str, sizes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with all_float64():
        config = config_of(family, sizes)
        expected, model = (build(FAMILIES[family]()).eval() for _ in range(2))
        mesh = ParallelMesh(config.layout)
        parallelize(model, mesh, config, experts_forward=module_experts_forward)
        generator = torch.Generator().manual_seed(2 + mesh.layout.batch_of(rank))
        ids = torch.randint(3, 90, (2, 9), generator=generator)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                right = expected(input_ids=ids, use_cache=False).logits
                found = model(input_ids=ids, use_cache=False).logits
                assert relative_error(found, right) < 1e-12
                # A prompt, then token by token from the cache, as generation runs it.
                out = model(input_ids=ids[:, :6], use_cache=True)
                parts, cache = [out.logits], out.past_key_values
                for token in range(6, 9):
                    out = model(input_ids=ids[:, token : token + 1], past_key_values=cache)
                    parts.append(out.logits)
                assert relative_error(torch.cat(parts, dim=1), right) < 1e-12
        model.train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_decoding_without_gradients(ranks: RankPool, family: str) -> None:
    ranks.run(forward_only, family, LAYOUT)
    ranks.run(forward_only, family, SHARED)


def test_decoding_with_slices(ranks: RankPool) -> None:
    ranks.run(forward_only, "qwen2_moe", SHARED | {"enable_sequence_parallel": True})


# -- dtypes


def kept_in_float32(model: Any, names: tuple[str, ...]) -> Any:
    """As `from_pretrained` leaves a model: bfloat16, some parameters float32."""
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.data = parameter.data.float()
    return model


def bfloat16(rank: int, family: str, sizes: dict[str, Any], names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    config = config_of(family, sizes)
    model, half, wide = (
        kept_in_float32(build(FAMILIES[family](), torch.float32), names) for _ in range(3)
    )
    compare_half(rank, Run(family, sizes), config, model, half, wide.float())
    for name, parameter in model.named_parameters():
        dtype = half.get_parameter(name).dtype
        assert parameter.dtype is parameter.grad.dtype is dtype, name


def compare_half(
    rank: int, run: Run, config: DistributedConfig, model: Any, half: Any, wide: Any
) -> None:
    """Gradients are about as far from those in float32 as one process' in bfloat16 are."""
    data = batches(run, config, wide.config.vocab_size)[0][0]
    mesh = ParallelMesh(config.layout)
    parallelize(model, mesh, config, experts_forward=module_experts_forward)
    model(**data[mesh.layout.batch_of(rank)], use_cache=False).loss.backward()
    for one in (half, wide):
        torch.stack([one(**shard, use_cache=False).loss for shard in data]).mean().backward()
    scale = 0.1 * max(p.grad.norm().item() for p in wide.parameters())
    for name, right in wide.named_parameters():
        found = model.get_parameter(name)
        assert torch.equal(full_tensor(found).float(), right), name
        norm = max(right.grad.norm().item(), scale)
        error, usual = (
            (grad.float() - right.grad).norm().item() / norm
            for grad in (full_tensor(found.grad), half.get_parameter(name).grad)
        )
        # Rounding may send a token to another expert; a wrong factor is 0.5 or more.
        assert error < 1.5 * usual + 0.25, (name, error, usual)


def routes(model: Any, inputs: Inputs) -> list[Tensor]:
    """Ids and weights that reach the experts of a model's one layer."""
    seen: list[Tensor] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.extend(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))

    handle = model.model.layers[0].mlp.experts.register_forward_pre_hook(note, with_kwargs=True)
    model(**inputs, use_cache=False)
    handle.remove()
    return seen[1:]


def routes_in_bfloat16(rank: int, mixed_precision: bool) -> None:
    sizes = {"fsdp_size": 8, "ep_size": 8, "fsdp_mixed_precision": mixed_precision}
    config = config_of("qwen3_moe", sizes)
    whole, model = (
        build(FAMILIES["qwen3_moe"](num_hidden_layers=1), torch.float32) for _ in range(2)
    )
    for one in (whole,) if mixed_precision else (whole, model):
        for parameter in one.parameters():  # not the rotary frequencies
            parameter.data = parameter.data.bfloat16()
    run = Run("qwen3_moe", sizes, size=4, length=64)  # enough for near ties
    inputs = batches(run, config, whole.config.vocab_size)[0][0][rank]
    parallelize(model, ParallelMesh(config.layout), config, experts_forward=module_experts_forward)
    for found, expected in zip(routes(model, inputs), routes(whole, inputs), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mixed_precision", [False, True])
def test_routes_are_those_of_the_models_own_precision(
    ranks: RankPool, mixed_precision: bool
) -> None:
    ranks.run(routes_in_bfloat16, mixed_precision)


def test_bfloat16_with_parameters_kept_in_float32(ranks: RankPool) -> None:
    for family, names in (
        ("deepseek_v3", ("mlp.gate.weight",)),
        ("gpt_oss", ("norm.weight", "layernorm.weight", "sinks")),
        ("qwen3_moe", ()),
    ):
        for sizes in (LAYOUT, SHARED | {"enable_sequence_parallel": True}, ALL_KINDS):
            ranks.run(bfloat16, family, sizes, names)


def mixed_precision(rank: int, family: str, sizes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    config = config_of(family, sizes | {"fsdp_mixed_precision": True})
    wide, half, model = (build(FAMILIES[family](), torch.float32) for _ in range(3))
    dtypes: dict[str, set[torch.dtype]] = {}

    def note(name: str, module: Any, args: Any, out: Any) -> None:
        dtypes[name] = {weight.dtype for weight in module.parameters(recurse=False)}

    for name, module in model.named_modules():
        if name.endswith((".experts", "q_proj", "lm_head")):
            module.register_forward_hook(functools.partial(note, name))
    compare_half(rank, Run(family, sizes), config, model, half.to(torch.bfloat16), wide)
    assert any(name.endswith("experts") for name in dtypes)
    assert all(seen == {torch.bfloat16} for seen in dtypes.values()), dtypes
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "llama4"])
def test_fsdp_mixed_precision(ranks: RankPool, family: str) -> None:
    ranks.run(mixed_precision, family, LAYOUT)
    ranks.run(mixed_precision, family, {"fsdp_size": 4, "dp_replicate_size": 2, "ep_size": 4})
