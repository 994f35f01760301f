"""Router replay: the experts of one forward, chosen in another, with the weights of the router there.

The reference is plain transformers code whose router is written anew here: it gathers its scores at given
ids. The ids are those of another router (a rollout with older weights), so they are not the model's own.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatching import dispatching
from equality import all_float64, relative_error
from families import build as family
from families import family_names
from test_trainer import Sentences, arguments, build
from torch import Tensor, nn

from ep_mesh import DistributedConfig
from ep_plans import compile_layers, full_tensor, parallel_state
from ep_testing import RankPool
from ep_trainer import EPTrainer, record_routes, replay_routes
from ep_trainer.moe_layers import moe_layers, routed
from expert_parallel import parallelize

LAYOUTS = [
    dispatching(tp_size=2, fsdp_size=2, ep_size=4),
    dispatching(tp_size=2, fsdp_size=2, ep_size=2, enable_sequence_parallel=True),
    dispatching(fsdp_size=4, ep_size=2),
    {"tp_size": 4},
    {
        "tp_size": 4,
        "ep_size": 4,
        "ep_plan": {
            "model.layers.*.mlp.gate": "ep_router",
            "model.layers.*.mlp.experts": "moe_tp_experts",
        },
    },
]
BATCH, POSITIONS = 2, 7  # odd: uneven slices


def batch_of(shard: int) -> Tensor:
    generator = torch.Generator().manual_seed(shard)
    return torch.randint(3, 96, (BATCH, POSITIONS), generator=generator)


def rollout(ids: Tensor) -> dict[str, Tensor]:
    """What a model with other routers chose, but for a token that it did not see."""
    older = build()
    with torch.no_grad():
        for layer in older.model.layers:
            layer.mlp.gate.weight.normal_(generator=torch.Generator().manual_seed(5))
        with record_routes(older) as routes:
            older(input_ids=ids, use_cache=False)
    for chosen in routes.values():
        assert chosen.shape == (*ids.shape, 2)
        chosen[1, 3] = -1
    return dict(routes)


def given_routes(model: nn.Module, routes: dict[str, Tensor]) -> None:
    """Write the routers of plain Qwen3-MoE anew, with given ids."""
    for number, layer in enumerate(model.model.layers):
        recorded = routes[f"model.layers.{number}.mlp.experts"].flatten(0, 1).long()

        def forward(hidden: Tensor, gate: Any = layer.mlp.gate, recorded: Tensor = recorded) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            scores = logits.softmax(-1)
            own = scores.topk(2).indices
            ids = torch.where(recorded < 0, own, recorded)
            weights = torch.stack([scores[range(len(ids)), ids[:, slot]] for slot in (0, 1)], 1)
            return logits, weights / weights.sum(1, keepdim=True), ids

        layer.mlp.gate.forward = forward


def on_rank(rank: int, sizes: dict[str, Any], checkpointing: bool) -> dict[str, float]:
    """The worst errors of logits and gradients; the number of recorded ids that differ."""
    with all_float64():
        plain = build().double()
        model = parallelize(copy.deepcopy(plain), DistributedConfig(**sizes))
        for each in (plain,) if "ep_size" in sizes else (plain, model):
            each.set_experts_implementation("eager")  # grouped_mm is not for float64
        layout = parallel_state(model).mesh.layout
        batches = [batch_of(shard) for shard in range(layout.data_parallel_size)]
        mine = batches[layout.batch_of(rank)]
        with torch.no_grad(), record_routes(plain) as expected_ids:
            plain(input_ids=mine, use_cache=False)
        with torch.no_grad(), record_routes(model) as found_ids:
            model(input_ids=mine, use_cache=False)
        differ = sum(
            found_ids[name].ne(ids).sum().item() if found_ids[name].shape == ids.shape else 1
            for name, ids in expected_ids.items()
        )
        if checkpointing:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
        with replay_routes(model, rollout(mine)):
            outputs = model(input_ids=mine, labels=mine, use_cache=False)
        outputs.loss.backward()  # the context has ended, and layers are computed again
        for ids in batches:
            reference = copy.deepcopy(plain)
            given_routes(reference, rollout(ids))
            found = reference(input_ids=ids, labels=ids, use_cache=False)
            if ids is mine:
                logits = relative_error(outputs.logits, found.logits)
                own = relative_error(plain(input_ids=ids, use_cache=False).logits, found.logits)
                assert own > 1e-2, "the recorded experts are others"
            (found.loss / len(batches)).backward()
            for parameter, other in zip(plain.parameters(), reference.parameters(), strict=True):
                parameter.grad = (
                    other.grad if parameter.grad is None else parameter.grad + other.grad
                )
        expected = dict(plain.named_parameters())
        errors = {
            name: relative_error(full_tensor(p.grad), expected[name].grad)
            for name, p in model.named_parameters()
        }
    routers = [name for name in errors if name.endswith("gate.weight")]
    assert all(expected[name].grad.norm() > 1e-4 for name in routers)
    return {"logits": logits, "gradients": max(errors.values()), "ids": differ}


CASES = [(sizes, checkpointing) for sizes in LAYOUTS for checkpointing in (False, True)]
SAMPLE = [(LAYOUTS[0], False), *((sizes, True) for sizes in LAYOUTS[1:])]


def test_replayed_routes_are_those_of_the_rollout(
    ranks: RankPool, sizes: dict[str, Any], checkpointing: bool
) -> None:
    for errors in ranks.run(on_rank, sizes, checkpointing, world=4):
        assert errors["logits"] < 1e-12
        assert errors["gradients"] < 1e-11
        assert errors["ids"] == 0


# Routers of all kinds; the last three are what can't be replayed: a layer runs three times in a forward, and
# routers choose by a maximum, one after the other.
FAMILIES = [
    "Qwen3MoeConfig",
    "DeepseekV3Config",
    "DeepseekV4Config",
    "GptOssConfig",
    "Gemma4TextConfig",
    "Ernie4_5_VLMoeTextConfig",
    "Llama4TextConfig",
    "Inkling2LoopTextConfig",
    "PhimoeConfig",
    "ZayaConfig",
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--all-layouts")
    if "name" in metafunc.fixturenames:
        known = family_names()
        metafunc.parametrize("name", known if every else [n for n in FAMILIES if n in known])
    if "sizes" in metafunc.fixturenames:
        metafunc.parametrize(("sizes", "checkpointing"), CASES if every else SAMPLE, ids=str)


def test_every_family(name: str) -> None:
    """What is recorded is what the experts got; replayed it changes no bit; other ids reach the experts."""
    tiny = family(name)
    model, inputs = tiny.model.eval(), tiny.inputs(0)
    got: dict[str, Tensor] = {}
    for layer in moe_layers(model):

        def see(module: nn.Module, args: Any, kwargs: Any, name: str = layer.name) -> None:
            got[name] = routed(args, kwargs)[1]

        layer.experts.register_forward_pre_hook(see, with_kwargs=True)
    if name in ("PhimoeConfig", "ZayaConfig"):
        with pytest.raises(RuntimeError, match="chose experts by topk"), record_routes(model):
            model(**inputs)
        return
    with torch.no_grad():
        with record_routes(model) as routes:
            expected = model(**inputs)[0]
        if name == "Inkling2LoopTextConfig":
            with pytest.raises(ValueError, match="sees 32 tokens, and 96 are to be replayed"):
                replayed(model, inputs, routes)
            return
        assert torch.equal(replayed(model, inputs, routes), expected)
        same = not_taken(routes, got)
        others = {part: ids.flip(0) for part, ids in routes.items()}
        assert not torch.equal(replayed(model, inputs, others), expected)
        same |= not_taken(others, got)
    # Llama 4's take every token.
    assert not same or name == "Llama4TextConfig"


def replayed(model: nn.Module, inputs: dict[str, Any], routes: dict[str, Tensor]) -> Tensor:
    with replay_routes(model, routes):
        output: Tensor = model(**inputs)[0]
    return output


def not_taken(routes: dict[str, Tensor], got: dict[str, Tensor | None]) -> set[str]:
    """The layers whose experts got other ids."""
    taken = {part: got[part] for part in routes}
    return {
        part
        for part, ids in taken.items()
        if ids is None or not torch.equal(routes[part].flatten(0, -2), ids.int())
    }


def generated(rank: int) -> None:
    """What `generate` chose, token by token, replayed in a forward of the whole; under compiled layers."""
    sizes = dispatching(tp_size=2, ep_size=2)
    model = parallelize(build().eval(), DistributedConfig(**sizes))
    prompt = batch_of(0)
    with record_routes(model) as routes:
        ids = model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert {ids.shape for ids in routes.values()} == {(BATCH, POSITIONS + 2, 2)}
    with torch.no_grad(), record_routes(model) as whole:
        expected = model(input_ids=ids[:, :-1]).logits
    assert all(torch.equal(whole[name], routes[name]) for name in routes), "no ties here"
    others = {name: chosen.flip(0) for name, chosen in routes.items()}
    with torch.no_grad():
        found = replayed(model, {"input_ids": ids[:, :-1], "use_cache": False}, others)
    assert (found - expected).norm() > 1e-2 * expected.norm()
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    compile_layers(model, backend=backend)
    with torch.no_grad():
        again = model(input_ids=ids[:, :-1], use_cache=False).logits
        torch.testing.assert_close(again, expected)
        graphs = len(compiled)
        again = replayed(model, {"input_ids": ids[:, :-1], "use_cache": False}, others)
        torch.testing.assert_close(again, found)
    assert graphs == len(compiled) > 0


def test_what_generate_chose_is_replayed(ranks: RankPool) -> None:
    ranks.run(generated, world=2)


class Replaying(EPTrainer):
    """Replays, in each micro-step, what `chosen` makes of the model's own choice."""

    chosen: Any = None

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.chosen is None:
            return super().training_step(model, inputs, *args, **kwargs)
        with torch.no_grad(), record_routes(model) as routes:
            model(**self._prepare_inputs(inputs))
        again = {name: self.chosen(ids) for name, ids in routes.items()}
        with replay_routes(model, again):
            return super().training_step(model, inputs, *args, **kwargs)


def trained(rank: int, folder: str) -> list[list[float]]:
    sizes = dispatching(tp_size=2, ep_size=2)
    runs = []
    for chosen in (None, lambda ids: ids, lambda ids: (ids + 1) % 8):
        model = build()
        if chosen is not None:  # what was watched may be sharded later
            with record_routes(model):
                model(input_ids=batch_of(0))
        model = parallelize(model, DistributedConfig(**sizes))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        values = {"max_steps": 2, "bf16": True, "use_cpu": True}
        trainer = Replaying(model, arguments(folder, 4, **values), train_dataset=Sentences(24))
        trainer.chosen = chosen
        trainer.train()
        runs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return runs


def test_in_the_trainer(ranks: RankPool, tmp_path: Path) -> None:
    for plain, same, other in ranks.run(trained, str(tmp_path), world=2, timeout=120):
        assert same == plain
        assert other != plain


def refused(rank: int) -> list[str]:
    model = parallelize(build(), DistributedConfig(**dispatching(fsdp_size=2, ep_size=2)))
    ids = batch_of(rank)
    with record_routes(model) as routes:
        model(input_ids=ids)
    name = "model.layers.0.mlp.experts"
    one = routes[name]
    texts = []
    # Only one rank's ids are wrong: both must hear of it before a forward.
    for wrong in (
        {name: one + 8 * rank},
        {name: one.float() if rank else one},
        {"model.layers.0.mlp.expert": one},
        {},
    ):
        with pytest.raises(ValueError, match="replay_routes") as error, replay_routes(model, wrong):
            pass
        texts.append(str(error.value))
    for wrong in ({name: one[:, 1:]}, {name: one[..., :1]}):
        with (
            pytest.raises(ValueError, match="to be replayed") as error,
            replay_routes(model, wrong),
        ):
            model(input_ids=ids)
        texts.append(str(error.value))
    with pytest.raises(RuntimeError) as late, replay_routes(model, routes):
        pass
    texts.append(str(late.value))
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="reentrant") as error, replay_routes(model, routes):
        model(input_ids=ids, use_cache=False)
    return [*texts, str(error.value)]


def test_wrong_ids_are_refused_on_all_ranks(ranks: RankPool) -> None:
    for texts in ranks.run(refused, world=2):
        expected = [
            r"rank 1\): model.layers.0.mlp.experts: expert ids must lie in \[0, 8\), .* 15",
            r"rank 1\): .* integers \[B, S, K\] or \[T, K\], got torch.float32 \[2, 7, 2\]",
            "did you mean 'model.layers.0.mlp.experts'",
            "no routes; the model's layers are model.layers.0.mlp.experts, ",
            "sees 14 tokens, and 12 are to be replayed",
            "chooses 2 experts per token, and 1 are to be replayed",
            "model.layers.0.mlp.experts chose no experts by topk meanwhile",
            "use_reentrant=False",
        ]
        for text, pattern in zip(texts, expected, strict=True):
            assert re.search(pattern, text), text
