"""A causal language model whose loss is computed in its head, a chunk of tokens at a time.

The model's own code runs as it is: base model, head, loss function. While it trains and has labels, the
head gives the sum of the losses in place of logits, and the loss function divides that. The head does the
work because FSDP gathers its weight for its forward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from ep_mesh.world import gathered
from ep_plans import around_forward, local_parameters, parallel_state
from ep_trainer._compat import causal_lm_loss
from ep_trainer.cross_entropy import chunked_cross_entropy
from ep_trainer.data import IGNORED


def chunk_loss(model: nn.Module, chunk_tokens: int = 1024, *, label_smoothing: float = 0.0) -> None:
    """Let `model` compute its training loss without the logits of all tokens.

    In training mode, with labels, the loss and all gradients are those of the model's own loss, and the
    output holds no logits. Elsewhere the model is as before. `EPTrainer(loss_chunk_tokens=...)` calls
    this; for a loop of one's own call it after `parallelize`. Called again, it changes the settings.

    Args:
        model: a causal LM of transformers. Its head is a linear layer: whole, cut over the vocabulary by
            TP, sharded by FSDP, tied to the embedding, or several of these.
        chunk_tokens: the tokens whose logits exist at one time.
        label_smoothing: as `TrainingArguments.label_smoothing_factor`.

    Raises:
        ValueError: the model has no such head, or another loss than transformers' for causal LMs.

    Cost: as `chunked_cross_entropy`. Over pipeline stages a gather of a verdict, and the last one does it.
    """
    state = parallel_state(model)
    if state is None or state.pipeline is None:
        _chunk(model, chunk_tokens, label_smoothing)
        return
    problem: str | None = None
    try:
        if state.pipeline.is_last:
            _chunk(model, chunk_tokens, label_smoothing)
    except ValueError as error:
        problem = str(error)
    problem = next((text for text in gathered(problem) if text is not None), None)
    if problem is not None:
        raise ValueError(problem)


def _chunk(model: nn.Module, chunk_tokens: int, label_smoothing: float) -> None:
    if type(chunk_tokens) is not int or chunk_tokens < 1:
        raise ValueError(f"loss_chunk_tokens must be an int of at least 1, got {chunk_tokens!r}.")
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator] # of PEFT: the model that has the loss
    own = getattr(model, "loss_function", None)
    before = getattr(own, "__self__", None)
    if isinstance(before, _ChunkedLoss):
        before.chunk_tokens, before.label_smoothing = chunk_tokens, label_smoothing
        return
    if own is not causal_lm_loss:
        raise ValueError(
            "a chunked loss takes the place of transformers' ForCausalLMLoss, and the loss of this "
            f"{type(model).__name__} is {getattr(own, '__qualname__', own)}: leave loss_chunk_tokens out."
        )
    config: Any = model.config
    text = config.get_text_config()
    head = _head(model)
    chunked = _ChunkedLoss(
        model=model,
        head=head,
        group=_vocabulary_group(model, head),
        chunk_tokens=chunk_tokens,
        label_smoothing=label_smoothing,
        softcap=getattr(text, "final_logit_softcapping", None),
        own_loss=own,
    )
    around_forward(model, chunked.run_model)
    around_forward(head, chunked.run_head)
    model.loss_function = chunked.loss  # type: ignore[assignment]


@dataclass
class _ChunkedLoss:
    """What the three patched functions of one model share.

    Attributes:
        model, head: whose forwards are changed.
        group: the ranks that the vocabulary is cut over, or None.
        chunk_tokens, label_smoothing, softcap: as in `chunked_cross_entropy`.
        own_loss: the model's loss function.
        labels: of the forward that runs, shifted, until the head takes them.
        total: the sum of the losses, from the head until the loss function takes it.
    """

    model: nn.Module
    head: nn.Linear
    group: ProcessGroup | None
    chunk_tokens: int
    label_smoothing: float
    softcap: float | None
    own_loss: Callable[..., Tensor]
    labels: Tensor | None = None
    total: Tensor | None = None

    def run_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        labels = kwargs.get("labels")
        if labels is None or not self.model.training:
            return forward(*args, **kwargs)
        shifted = kwargs.get("shift_labels")
        if shifted is None:
            shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        self.labels = shifted
        try:
            output = forward(*args, **kwargs)
        finally:
            self.labels = self.total = None
        if isinstance(output, tuple):
            return output
        # What the model took for its logits is of no use to anybody.
        return type(output)(**{key: value for key, value in output.items() if key != "logits"})

    def run_head(self, forward: Callable[..., Any], hidden_states: Tensor, *args: Any) -> Tensor:
        """The head's forward: the sum of the losses where there are labels, else the logits."""
        if self.labels is None:
            logits: Tensor = forward(hidden_states, *args)
            return logits
        labels, self.labels = self.labels, None
        with local_parameters(self.head):
            total = chunked_cross_entropy(
                hidden_states,
                self.head.weight,
                labels.to(hidden_states.device),
                bias=self.head.bias,
                chunk_tokens=self.chunk_tokens,
                num_items=1.0,
                label_smoothing=self.label_smoothing,
                softcap=self.softcap,
                group=self.group,
                vocab_size=self.head.out_features,
            )
        # Not a view: as a unit's output that would lose FSDP2's hook when it is changed in place.
        self.total = total.expand(1, 1, 1).clone()
        return self.total

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss function: the head's sum by the number of labels."""
        total, self.total = self.total, None
        if total is None:
            return self.own_loss(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
                **kwargs,
            )
        if logits is not total and self.softcap is None:
            raise ValueError(
                f"{type(self.model).__name__} changes its logits between the head and the loss, which a "
                "chunked loss can't see: leave loss_chunk_tokens out for this model."
            )
        if num_items_in_batch is not None:
            number = num_items_in_batch
        else:
            counted = labels[..., 1:] if shift_labels is None else shift_labels
            number = counted.ne(IGNORED).sum()
        if isinstance(number, Tensor):
            number = number.to(total.device)
        return total.view(()) / number


def _head(model: nn.Module) -> nn.Linear:
    get = getattr(model, "get_output_embeddings", None)
    head = None if get is None else get()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            "a chunked loss needs a model whose get_output_embeddings() is a linear layer, and that of "
            f"{type(model).__name__} is {type(head).__name__}: leave loss_chunk_tokens out."
        )
    return head


def _vocabulary_group(model: nn.Module, head: nn.Linear) -> ProcessGroup | None:
    """The ranks that the head's vocabulary is cut over; None if each has all of it."""
    state = parallel_state(model)
    if state is None:
        return None
    name = next(name for name, module in model.named_modules() if module is head)
    shardings = [state.shardings[f"{name}.{own}"] for own, _ in head.named_parameters()]
    for sharding in shardings:
        whole = sharding.cut is None or (sharding.cut.axis, sharding.cut.dim) == ("tp", 0)
        if not whole or sharding.partial_over is not None or sharding.mean_over is not None:
            raise ValueError(
                f"a chunked loss needs a head that is whole or cut over the vocabulary, and {name} is "
                "sharded in another way by the TP plan: leave loss_chunk_tokens out, or take its rule out."
            )
    return state.mesh.group("tp") if any(sharding.cut for sharding in shardings) else None
