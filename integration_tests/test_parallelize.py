"""`parallelize` of models that are built, or on the meta device; implementations by name."""

from __future__ import annotations

from typing import Any, Self

import pytest
import tiny_models
import torch
import transformers
from dispatching import dispatching, name_of
from torch import nn

from ep_dispatch import AllToAll, EPImplementationInterface
from ep_plans import full_tensor
from ep_testing import RankPool
from expert_parallel import AutoModelForCausalLM, initialize, parallelize
from expert_parallel.lora.targets import (
    check_not_quantized,
    quantized_parameters,
    wide_experts,
)

LAYOUTS = [
    dispatching(tp_size=2, fsdp_size=4, ep_size=4),
    dispatching(tp_size=8, ep_size=8),
    {"fsdp_size": 8},
]
IDS = torch.tensor([[5, 9, 17, 33, 65, 2, 11]])


def build(family: str = "qwen3_moe", **changes: Any) -> transformers.PreTrainedModel:
    config = tiny_models.FAMILIES[family](**changes)
    return tiny_models.build(config, torch.float32)


def built(rank: int, layout: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(rank)
    model = parallelize(build(), layout)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_a_built_model_computes_what_it_did(ranks: RankPool, layout: dict[str, Any]) -> None:
    expected = build()(IDS).logits
    for logits in ranks.run(built, layout):
        assert (logits - expected).norm() <= 1e-5 * expected.norm()


def drawn(rank: int, layout: dict[str, Any], family: str, seed: int) -> dict[str, torch.Tensor]:
    config = tiny_models.FAMILIES[family](tie_word_embeddings=family == "qwen3_moe")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    torch.manual_seed(rank)
    parallelize(model, layout)
    assert all(parameter.is_meta for parameter in model.parameters())
    initialize(model, seed)
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()
    return {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_initial_values_depend_on_the_seed_alone(ranks: RankPool, family: str) -> None:
    first, *others = [ranks.run(drawn, layout, family, 7) for layout in LAYOUTS]
    alone = ranks.run(drawn, {"tp_size": 1}, family, 7, world=1)
    for values in [*first, *[v for other in others for v in other], *alone]:
        assert all(torch.equal(values[name], tensor) for name, tensor in first[0].items())
    again = ranks.run(drawn, LAYOUTS[0], family, 8)[0]
    weight = "model.layers.1.self_attn.o_proj.weight"
    assert not torch.equal(again[weight], first[0][weight])
    assert 0.015 < first[0][weight].std() < 0.025
    assert torch.equal(first[0]["model.norm.weight"], torch.ones(32))
    if family == "qwen3_moe":
        assert torch.equal(first[0]["lm_head.weight"], first[0]["model.embed_tokens.weight"])


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)


def plain_module(rank: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Plain()
    parallelize(model, {"fsdp_size": 4, "fsdp_plan": {"first": "free_full_weight"}})
    initialize(model, 3)
    with pytest.raises(ValueError, match="has values"):
        initialize(model, 3)
    return {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}


def test_other_modules_are_initialized_by_their_own_method(ranks: RankPool) -> None:
    found = ranks.run(plain_module, world=4)
    assert torch.equal(found[0]["norm.weight"], torch.ones(5))
    assert 0.1 < found[0]["first.weight"].abs().max() < 1 / 6**0.5 + 1e-6
    assert all(torch.equal(each["first.weight"], found[0]["first.weight"]) for each in found)


class Angles(nn.Module):
    """A buffer and no parameter, which a rule fills or not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0))


class FilledAngles(Angles):
    def reset_parameters(self) -> None:
        self.angles = torch.arange(4.0, device=self.angles.device)


class Buffered(nn.Module):
    def __init__(self, angles: type[Angles]) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.angles = angles()


def with_buffers(rank: int) -> dict[str, torch.Tensor]:
    layout = {"fsdp_size": 2, "fsdp_plan": {"first": "free_full_weight"}}
    with torch.device("meta"):
        filled, unfilled = Buffered(FilledAngles), Buffered(Angles)
    initialize(parallelize(filled, layout))
    with pytest.raises(TypeError, match=r"angles\.angles .*nothing in Angles gives it values"):
        initialize(parallelize(unfilled, layout))
    return {name: full_tensor(tensor) for name, tensor in filled.state_dict().items()}


def test_buffers_are_filled_or_their_module_is_named(ranks: RankPool) -> None:
    for found in ranks.run(with_buffers, world=2):
        assert torch.equal(found["norm.running_var"], torch.ones(5))
        assert found["norm.num_batches_tracked"] == 0
        assert torch.equal(found["angles.angles"], torch.arange(4.0))


def test_only_a_sharded_model_is_initialized() -> None:
    with pytest.raises(ValueError, match="parallelize"):
        initialize(Plain())


def by_name(rank: int) -> tuple[torch.Tensor, int]:
    calls = [0]

    class Counting(AllToAll):
        """A user's own implementation: it counts, and leaves the work to the built-in one."""

        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            calls[0] += 1
            return super().__call__(*args, **kwargs)

    EPImplementationInterface.register("my_ep", Counting)
    layout = dispatching(tp_size=2, fsdp_size=4, ep_size=4)
    model = parallelize(build(), {**layout, "ep_implementation": "my_ep"})
    model(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        return model(IDS).logits, calls[0]


def test_an_implementation_of_ones_own_is_chosen_by_name(ranks: RankPool) -> None:
    expected = build()(IDS).logits
    for logits, calls in ranks.run(by_name):
        assert (logits - expected).norm() <= 1e-5 * expected.norm()
        assert calls == 2 * 2  # two layers, two forwards


def kept(rank: int, recompute: str) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Bytes kept for backward beside parameters, the loss, and the gathered gradients."""
    model = parallelize(build(), LAYOUTS[0], experts_recompute=recompute)
    storages: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ids = IDS.repeat(4, 30)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: full_tensor(p.grad) for name, p in model.named_parameters()}
    return sum(storages.values()), loss.item(), gradients


def test_experts_may_be_computed_again_in_backward(ranks: RankPool) -> None:
    """Less is kept, and the numbers are the same."""
    plain = ranks.run(kept, "none")
    for (more, loss, expected), (less, again, found) in zip(
        plain, ranks.run(kept, "gate_up"), strict=True
    ):
        assert less < more
        assert again == loss
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_an_unknown_option_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match=r"'chunks' is no setting of ep_implementation='auto'"):
        AutoModelForCausalLM.from_pretrained(
            "nowhere", distributed_config={"ep_size": 1}, ep_options={"chunks": 2}
        )


class Packed(torch.Tensor):
    """Shows float32 and holds eight bits, as quantized weights of torchao do."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function is torch.ops.aten.detach.default, "only shown"
        return Packed(args[0].values)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, Packed], ids=str)
def test_a_quantization_that_leaves_experts_out_is_told(dtype: Any) -> None:
    def quantized_weight(weight: torch.Tensor) -> nn.Parameter:
        values = Packed(weight.detach().char()) if dtype is Packed else weight.detach().to(dtype)
        return nn.Parameter(values, requires_grad=False)

    model = build()
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "o_proj"):
            getattr(attention, name).weight = quantized_weight(getattr(attention, name).weight)
    experts = model.model.layers[0].mlp.experts
    sizes = [experts.gate_up_proj.nbytes, experts.down_proj.nbytes]
    told = (
        rf"q_proj.weight and 3 others .*: model.layers.\*.mlp.experts.gate_up_proj \(2 x {sizes[0]} bytes "
        rf"in torch.float32\), model.layers.\*.mlp.experts.down_proj \(2 x {sizes[1]} bytes in "
        rf"torch.float32\), {2 * sum(sizes)} bytes in all"
    )
    with pytest.raises(ValueError, match=told):
        parallelize(model, {"fsdp_size": 1})
    with pytest.raises(ValueError, match=told):
        check_not_quantized(model)
    for layer in model.model.layers:  # all of it: experts with their scales
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            setattr(experts, name, quantized_weight(getattr(experts, name)))
        experts.gate_up_proj_scale_inv = nn.Parameter(torch.ones(8, 1, 1), requires_grad=False)
    quantized, whole = quantized_parameters(model)
    assert len(quantized) == 8
    assert whole == []
    assert wide_experts(model) == "", "their scales are no experts"


def test_an_unknown_way_to_recompute_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"experts_recompute='gate' is unknown; known are none, gate_up"
    ):
        parallelize(build(), {"fsdp_size": 1}, experts_recompute="gate")
