"""Floating-point operations of a token, from the shapes of a model's weights and its config.

[Note: what is counted]
A product of [m, k] and [k, n] is `2 m k n` operations. Of one token's forward:

    a weight of n elements that every token meets                   2 n
    stacked experts, n elements each, K chosen                      2 K n
    attention: N heads, scores over d_qk, values of d_v, c keys     2 N (d_qk + d_v) c

`c` is the mean number of keys of a query in a sequence of S: (S + 1) / 2 with a causal mask, less in
a sliding window or in chunks, S without a mask. A training step takes the forward three times, since
backward multiplies for the inputs and for the weights; twice where a weight is frozen. Not counted:
embeddings, norms, activations, softmax, rotations, convolutions, scans of linear attention and state
spaces, scores of indexers, what runs again in backward, vision and audio towers. That is the model FLOPs
of PaLM (arXiv:2204.02311, appendix B), with the causal half that FlashAttention's figures take.

    K experts per token, E experts of a layer, S tokens of a sequence
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ep_plans.sizes import experts_per_token, hidden_size, text_config

_ATTENTION = re.compile(r"(^|_)(attn|attention)$")
_KINDS_OF_LINEAR_ATTENTION = {"linear_attention", "mamba", "mamba2", "conv", "recurrent"}


@dataclass(frozen=True)
class Flops:
    """Operations of one token's forward, by part of the model.

    Attributes:
        attention: the projections.
        scores: queries with keys, and the sum of values.
        experts: the routed experts that a token takes.
        shared_experts: the experts that every token takes, and their gate.
        router: the choice of experts.
        dense: layers without experts, and whatever else multiplies.
        head: the output embeddings.
        frozen: of all these, products with weights that get no gradient.
    """

    attention: float = 0.0
    scores: float = 0.0
    experts: float = 0.0
    shared_experts: float = 0.0
    router: float = 0.0
    dense: float = 0.0
    head: float = 0.0
    frozen: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        """Part by part."""
        names = [each.name for each in dataclasses.fields(self)]
        return Flops(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def forward(self) -> float:
        """All parts."""
        return (
            self.attention
            + self.scores
            + self.experts
            + self.shared_experts
            + self.router
            + self.dense
            + self.head
        )

    @property
    def training(self) -> float:
        """Forward and backward; nothing is computed again."""
        return 3 * self.forward - self.frozen


@dataclass(frozen=True)
class Attention:
    """The scores of one attention layer.

    Attributes:
        heads: query heads, N.
        query_size: d_qk, what a query and a key are multiplied over.
        value_size: d_v.
        window: keys that a query sees at most; None: all before it.
        chunk: a query sees its own chunk of so many tokens alone; None: no chunks.
    """

    heads: int
    query_size: int
    value_size: int
    window: int | None = None
    chunk: int | None = None

    def keys(self, sequence_length: int, *, causal: bool = True) -> float:
        """c, the keys of a query on average."""
        if not causal:
            return float(sequence_length)
        if self.chunk is not None and sequence_length > self.chunk:
            chunks, rest = divmod(sequence_length, self.chunk)
            seen = chunks * self.chunk * (self.chunk + 1) / 2 + rest * (rest + 1) / 2
            return seen / sequence_length
        window = min(self.window or sequence_length, sequence_length)
        return (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length

    def flops(self, sequence_length: int, *, causal: bool = True) -> float:
        """Of one token."""
        width = self.query_size + self.value_size
        return 2 * self.heads * width * self.keys(sequence_length, causal=causal)


@dataclass(frozen=True)
class ModelFlops:
    """What a model computes for a token; plain data, that can be sent and joined.

    Attributes:
        weights: by module, the products with its weights.
        attentions: by module, the scores.
    """

    weights: Mapping[str, Flops] = field(default_factory=dict)
    attentions: Mapping[str, Attention] = field(default_factory=dict)

    def __or__(self, other: ModelFlops) -> ModelFlops:
        """With the modules that another stage of the same model holds; what both hold counts once."""
        return ModelFlops(
            {**self.weights, **other.weights}, {**self.attentions, **other.attentions}
        )

    def by_module(self, sequence_length: int, *, causal: bool = True) -> dict[str, Flops]:
        """Of one token in a sequence of S tokens, by module name."""
        found = dict(self.weights)
        for name, attention in self.attentions.items():
            scores = Flops(scores=attention.flops(sequence_length, causal=causal))
            found[name] = found.get(name, Flops()) + scores
        return found

    def at(self, sequence_length: int, *, causal: bool = True) -> Flops:
        """Of one token in a sequence of S tokens; `causal=False`: without the causal half.

        Raises:
            ValueError: S is no whole number >= 1.
        """
        if sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1, got {sequence_length}.")
        found = self.by_module(sequence_length, causal=causal).values()
        return sum(found, start=Flops())


def model_flops(model: nn.Module) -> ModelFlops:
    """What `model` computes for a token; see the note above.

    Args:
        model: on any device (meta too), sharded or not; of a pipeline stage: what the stage holds. Of a
            model with several modalities, the text decoder and its head.

    Raises:
        ValueError: an encoder-decoder; a config that doesn't tell the experts per token or the heads.
    """
    if getattr(text_config(model), "is_encoder_decoder", False):
        raise ValueError(
            f"FLOPs of a token are known for decoders, and {type(model).__name__} is an "
            "encoder-decoder: its tokens do not all meet the same weights."
        )
    weights: dict[str, Flops] = {}
    attentions: dict[str, Attention] = {}
    moe_blocks, looked_up = _moe_blocks(model), _embedding(model)
    for name, module in _text_modules(model):
        counted = Flops()
        for weight, parameter in module.named_parameters(recurse=False):
            if module is looked_up or not _multiplies(module, weight, parameter):
                continue
            stacked = parameter.ndim == 3
            elements = float(parameter.numel())
            if stacked and _holds_experts(name, module):
                elements *= experts_per_token(model) / parameter.shape[0]
                part = "experts"
            else:
                part = _part_of(model, name, module, moe_blocks)
            frozen = 0.0 if parameter.requires_grad else 2 * elements
            counted += Flops(**{part: 2 * elements, "frozen": frozen})
        if counted.forward:
            weights[name] = counted
        found = _attention(model, name, module)
        if found is not None and not any(name.startswith(f"{other}.") for other in attentions):
            attentions[name] = found
    return ModelFlops(weights, attentions)


def _text_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the decoder and the head, with their full names."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    head = _head(model)
    names = {id(module): name for name, module in model.named_modules()}
    if decoder is None or decoder is model or id(decoder) not in names:
        yield from model.named_modules()
        return
    prefix = names[id(decoder)]
    for name, module in model.named_modules():
        if name == prefix or name.startswith(f"{prefix}.") or module is head:
            yield name, module


def _head(model: Any) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def _embedding(model: Any) -> nn.Module | None:
    """What stands for the input embeddings, which may hold a weight without being an Embedding."""
    get = getattr(model, "get_input_embeddings", None)
    with contextlib.suppress(NotImplementedError, AttributeError):
        return None if get is None else get()
    return None


def _moe_blocks(model: nn.Module) -> list[str]:
    """The modules whose children are stacked experts and a router."""
    found = []
    for name, module in model.named_modules():
        stacked = any(p.ndim == 3 for p in module.parameters(recurse=False))
        if stacked and _holds_experts(name, module):
            found.append(name.rpartition(".")[0])
    return found


def _multiplies(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(module, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)) or "bias" in name:
        return False
    if parameter.ndim == 3:
        return True
    return parameter.ndim == 2 and (isinstance(module, nn.Linear) or name.endswith("weight"))


def _holds_experts(name: str, module: nn.Module) -> bool:
    last = name.rpartition(".")[2]
    named = last.endswith("experts") and "shared" not in last
    return named or isinstance(getattr(module, "num_experts", None), int)


def _part_of(model: nn.Module, name: str, module: nn.Module, moe_blocks: list[str]) -> str:
    if module is _head(model) or name.rpartition(".")[2] == "lm_head":
        return "head"
    parts = name.split(".")
    if any(_ATTENTION.search(part) for part in parts):
        return "attention"
    if any(name.startswith(f"{block}.") for block in moe_blocks):
        if any("shared" in part for part in parts):
            return "shared_experts"
        if any(part == "gate" or "router" in part for part in parts):
            return "router"
    return "dense"


def _attention(model: nn.Module, name: str, module: nn.Module) -> Attention | None:
    """The scores of an attention module; None if it is none, or keeps a state instead of keys."""
    config = text_config(model)
    last = name.rpartition(".")[2]
    if not _ATTENTION.search(last) or last.startswith("linear"):
        return None
    if not any(isinstance(child, nn.Linear) for child in module.modules()):
        return None
    layer = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or []
    kind = kinds[layer] if isinstance(layer, int) and layer < len(kinds) else None
    if kind in _KINDS_OF_LINEAR_ATTENTION:
        return None
    heads = _first_int((module, config), ("num_attention_heads", "num_heads", "n_head", "n_heads"))
    if heads is None:
        raise ValueError(
            f"The attention heads of {name} are not known: its config has no num_attention_heads."
        )
    size = _first_int((module, config), ("head_dim",)) or hidden_size(model) // heads
    window = getattr(config, "sliding_window", None)
    slides = kind == "sliding_attention" or (kind is None and window is not None)
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    return Attention(
        heads,
        _first_int((module,), ("qk_head_dim",)) or size,
        _first_int((module,), ("v_head_dim",)) or size,
        window if slides else None,
        chunk,
    )


def _first_int(places: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    for place in places:
        for name in names:
            if isinstance(number := getattr(place, name, None), int):
                return number
    return None
