"""`PipelineRunner`: training steps of a model that is split into pipeline stages.

[Note: the loss of a pipeline]
The batch of a data shard is cut into M micro-batches, and with N labels in the global batch (all D
shards, all micro-batches) the last stage's loss of a micro-batch is `D * sum / N`. Gradients add up over
micro-batches and are the mean over shards: they are those of `sum / N` over the global batch, however
unevenly the labels are spread.

[Note: the auxiliary loss of a pipeline]
The stages add up how often each expert was chosen, how probable it was, and how many tokens there were,
and hand the sums on with the hidden states; the last stage makes the loss of all layers of them, over
the micro-batch of all data shards, and autograd carries its gradient back the same way. The loss is not
linear in the choices, and the first backward runs before the last micro-batch was routed: so it is the
mean over micro-batches of the loss of each, not the loss of the batch as a whole. Under "gpipe", where
all forwards come first, it is that of the batch: it depends on the sums of all micro-batches alone, its
gradient is the same for each one's sums, and the last forward leaves it for the backwards.
The z-loss is a mean over tokens, whose number is known: each stage adds its layers' terms to a number
that is handed on too.

Shapes: E experts of a layer, T tokens, L sequence length, H hidden size.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_plans import parallel_state
from ep_plans.micro_batches import count_rows, micro_batch_count, split_batch
from ep_plans.pipelining import PipelineSteps
from ep_plans.shared_weights import SharedWeights
from ep_plans.sizes import hidden_size, num_experts, text_config
from ep_plans.stage_forward import stage_forward
from ep_trainer._compat import is_view, maybe_install_capturing_hooks
from ep_trainer.balancing import BalancingLoss, balancing_loss_of_shards, load_sums
from ep_trainer.data import count_labels
from ep_trainer.z_loss import RouterZLoss

Batch = Mapping[str, Any]
ComputeLoss = Callable[[nn.Module, dict[str, Any], Tensor | None, int], Tensor]
"""Makes a micro-batch's loss, without the auxiliary one, of the last stage (a module that takes the
micro-batch), the micro-batch, N and M."""


class PipelineRunner:
    """Runs forward and backward of whole batches over the stages of a pipeline.

    Every rank makes one, and calls `step` with the batch of its data shard. Then
    `ep_plans.clip_grad_norm_(model.parameters(), ...)` and the optimizer's step, as ever:

        runner = PipelineRunner(model)
        loss = runner.step(batch)

    Args:
        model: sharded with `pp_size > 1`, by `expert_parallel` or `ep_plans.parallelize`.
        compute_loss: see `ComputeLoss`; its sum over micro-batches is the shard's loss, whose mean over
            shards is the step's. None: the model's own, over the labels of the global batch.
        balanced: add the auxiliary loss where the model would.
        reduce_each: let FSDP2 reduce the gradients after each micro-batch instead of once: gradients
            lie in shards all the time, for M times the traffic. Not for `"zero_bubble"`, which can't.
        context: entered around the forward of each stage, such as autocast.
        z_loss: the router z-loss to add, made of the same model.

    Raises:
        ValueError: the model isn't split into stages, or `reduce_each` with `"zero_bubble"`.

    Cost: at construction an exchange of parameter names over the pipeline and a broadcast of a dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compute_loss: ComputeLoss | None = None,
        balanced: bool = True,
        reduce_each: bool = False,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        z_loss: RouterZLoss | None = None,
    ) -> None:
        state = parallel_state(model)
        if state is None or state.pipeline is None:
            raise ValueError(
                "PipelineRunner needs a model that is split into pipeline stages: shard it with "
                "DistributedConfig(pp_size=...) above 1."
            )
        if reduce_each and state.config.pp_schedule == "zero_bubble":
            raise ValueError(
                "reduce_each=True: pp_schedule='zero_bubble' computes the gradients of weights apart, so "
                "FSDP2 can only reduce them at the end. Use '1f1b', 'interleaved_1f1b' or 'gpipe', or leave it "
                "out."
            )
        self.model, self.mesh, self.config = model, state.mesh, state.config
        self._compute_loss = compute_loss or self._own_loss
        self._context, self._reduce_each, self._z_loss = context, reduce_each, z_loss
        self._balancing = BalancingLoss.of(model, self.mesh) if balanced else None
        pipeline = state.pipeline
        # While all layers are in their places: transformers does it once, at the first stage's call.
        layers_of: Any = model.get_submodule(pipeline.parts.embedding.rpartition(".")[0])
        maybe_install_capturing_hooks(layers_of)
        self._last = len(pipeline.stages) - 1
        self._modules, self._summing = (
            {
                stage: stage_forward(
                    model,
                    pipeline,
                    stage,
                    sums=self._sums if balances or z_loss is not None else None,
                    finish=self._keep_sums,
                    with_logits=balances,
                )
                for stage in pipeline.here
            }
            for balances in (False, True)
        )
        self._steps = PipelineSteps(
            model,
            self._modules,
            self._run,
            len(pipeline.stages),
            self.config.pp_schedule,
            self.mesh.group("pp"),
            self.mesh.device,
        )
        self._shared = SharedWeights(model, self.mesh)
        self._dtype = self._dtype_of_hidden_states(pipeline.parts.embedding)
        self._micro_batches: list[dict[str, Any]] = []
        self._masks: Sequence[Tensor | None] = ()
        self._items: Tensor | None = None
        self._tokens: Tensor | None = None
        self._loss_scale = 1.0
        self._balances = False
        self._micro_batch = 0
        self._sums_of_batch = torch.zeros(())
        self._gradient_of_sums: list[Tensor] = []
        self._totals: tuple[Tensor, ...] = ()
        self._mask: Tensor | None = None
        self._boundary: tuple[Tensor, ...] = ()

    # -- the step

    def step(
        self,
        batch: Batch,
        *,
        num_items_in_batch: Tensor | None = None,
        real_rows: int | None = None,
        reduce: bool = True,
        tokens_in_step: Tensor | None = None,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Forward and backward of a batch; gradients are added up in `.grad`, reduced.

        Args:
            batch: the model's arguments for this data shard, `labels` among them, the same on all ranks
                of its pipeline and its TP group, on the device.
            num_items_in_batch: N, int64 []. None: counted here, over the data shards.
            real_rows: so many rows are in the global batch, the others only fill up. None: all.
            reduce: False keeps the gradients on the ranks, for a later step to reduce (gradient
                accumulation with one reduction).
            tokens_in_step: what the z-loss is a mean over, see `RouterZLoss.count`. None: this batch's.
            loss_scale: multiplies the gradients, such as a `WorldGradScaler`'s `get_scale()`.

        Returns:
            The loss of the global batch, a scalar, on every rank; not scaled.

        Raises:
            ValueError: the batch can't be cut into the micro-batches of the config, has no labels, or data
                shards have different numbers of rows. On all ranks that hold it, before the stages run.

        Cost: beside the stages, an all-reduce of three numbers over the data shards (a host
        synchronization) and of one over the world; where first and last stage share weights, an exchange
        of their gradients.
        """
        if self._compute_loss == self._own_loss and not isinstance(batch.get("labels"), Tensor):
            raise ValueError(
                "a pipeline's batch needs labels: the last stage computes the loss. Add `labels` "
                f"[rows, length] to the batch, which has {', '.join(batch)}."
            )
        rows = count_rows(batch)
        counted = self._agree(batch, rows)
        count = micro_batch_count(
            rows, self.mesh.size("pp"), self.config.pp_schedule, self.config.pp_micro_batches
        )
        self._items = counted if num_items_in_batch is None else num_items_in_batch
        self._micro_batches = split_batch(batch, count)
        self._loss_scale, self._tokens = loss_scale, tokens_in_step
        if self._z_loss is not None and tokens_in_step is None:
            self._tokens = self._z_loss.count([batch], self.mesh.device)
        self._balances = self._is_balanced(batch)
        self._boundary = self._handed_on(self._micro_batches[0])
        masks = self._token_masks(batch, real_rows, count) if self._balances else [None] * count
        self._masks = masks
        self._shared.set_aside()
        total = self._steps.run(
            count,
            self._boundary,
            split_backward=not _recomputes(self.model),
            reduce_each=self._reduce_each,
            reduce=reduce,
        )
        self._micro_batches, self._masks = [], ()
        if reduce:
            self._shared.sum()
        return self._mean_over_shards(total)

    def _run(
        self, stage: int, received: tuple[Tensor, ...], micro_batch: int
    ) -> Tensor | tuple[Tensor, ...]:
        """Stage `stage` on a micro-batch, with the hidden states (and sums) it received."""
        inputs = self._micro_batches[micro_batch]
        self._mask, self._micro_batch = self._masks[micro_batch], micro_batch
        module = (self._summing if self._balances else self._modules)[stage]
        with self._context():
            if stage < self._last:
                handed = module(*received, **inputs)
                return tuple(
                    _as_sent(value, like)
                    for value, like in zip(handed, self._boundary, strict=True)
                )
            last = _LastStage(module, received)
            loss = self._compute_loss(last, dict(inputs), self._items, len(self._micro_batches))
        totals, self._totals = self._totals, ()
        if self._balances:
            loss = loss + self._balancing_term(totals[0])
        if self._z_loss is not None:
            loss = loss + totals[-1].squeeze(0)
        return loss * self._loss_scale

    def _balancing_term(self, sums: Tensor) -> Tensor:
        """What the last stage adds to a micro-batch's loss, see the note above."""
        assert self._balancing is not None
        count, group = len(self._micro_batches), self.mesh.group("dp")
        if self.config.pp_schedule != "gpipe":
            whole = balancing_loss_of_shards(sums, group)
            return self._balancing.coefficient / count * whole
        if self._micro_batch == 0:
            self._sums_of_batch, self._gradient_of_sums = torch.zeros_like(sums), []
        self._sums_of_batch = self._sums_of_batch + sums.detach()
        term: Tensor = _LaterGradient.apply(sums, self._gradient_of_sums)
        if self._micro_batch < count - 1:
            return term
        every = self._sums_of_batch.requires_grad_()
        whole = self._balancing.coefficient * balancing_loss_of_shards(every, group)
        self._gradient_of_sums.extend(torch.autograd.grad(whole, every))
        return term + whole.detach()

    def _own_loss(
        self, model: nn.Module, inputs: dict[str, Any], items: Tensor | None, micro_batches: int
    ) -> Tensor:
        """The model's own loss over the labels of the global batch, times the data shards."""
        assert items is not None
        shards = self.mesh.layout.data_parallel_size
        if _takes(self.model, "num_items_in_batch"):
            loss: Tensor = model(**inputs, num_items_in_batch=items).loss
            return loss * shards
        labels = count_labels([inputs], shifted=True)
        assert labels is not None
        own: Tensor = model(**inputs).loss
        # A mean over no labels is no number.
        return torch.where(labels > 0, own, 0.0 * own.nan_to_num()) * labels * shards / items

    # -- what the ranks agree on

    def _agree(self, batch: Batch, rows: int) -> Tensor | None:
        """Labels of the global batch (None without), after a check that all shards have as many rows."""
        labels = batch.get("labels")
        count = count_labels([batch], shifted=True) if isinstance(labels, Tensor) else None
        device, shards = self.mesh.device, self.mesh.layout.data_parallel_size
        mine = torch.tensor([float(rows), float(rows) ** 2, 0.0], dtype=torch.float64)
        mine = mine.to(device)
        if count is not None:
            mine[2] = count
        if shards > 1:
            dist.all_reduce(mine, group=self.mesh.group("dp"))
            total, squares = mine[:2].tolist()
            if squares * shards != total**2:
                raise ValueError(
                    f"the {shards} data shards have batches of different sizes, {total:.0f} rows together "
                    f"({rows} here): a pipeline runs the same micro-batches on all of them. Fill them up."
                )
        return None if count is None else mine[2].clamp(min=1).to(torch.int64)

    def _dtype_of_hidden_states(self, embedding: str) -> torch.dtype:
        """The embedding's, which the first stage holds; told to all."""
        if self.config.fsdp_mixed_precision and self.config.dp_size > 1:
            return torch.bfloat16
        weight = dict(self.model.named_parameters(remove_duplicate=False)).get(
            f"{embedding}.weight"
        )
        told: list[Any] = [None if weight is None else weight.dtype]
        first = self.mesh.layout.group("pp", self.mesh.rank)[0]
        dist.broadcast_object_list(told, src=first, group=self.mesh.group("pp"))
        dtype: torch.dtype = told[0]
        return dtype

    def _mean_over_shards(self, total: Tensor | None) -> Tensor:
        """The step's loss on all ranks, from those of the last stage."""
        copies = self.mesh.layout.data_parallel_size * self.mesh.size("tp")
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if total is not None:
            loss += total / (copies * self._loss_scale)
        dist.all_reduce(loss)
        return loss.to(torch.float32)

    # -- what a stage hands on

    def _handed_on(self, micro_batch: Batch) -> tuple[Tensor, ...]:
        """On the meta device: hidden states [rows, L, H], sums [2E + 1] and z-loss [1] where there are any."""
        ids = micro_batch.get("input_ids", micro_batch.get("inputs_embeds"))
        if not isinstance(ids, Tensor):
            raise ValueError(
                f"a pipeline's batch needs input_ids [rows, length], got {', '.join(micro_batch)}."
            )
        shape = (ids.shape[0], ids.shape[1], hidden_size(self.model))
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        sizes = [2 * num_experts(self.model) + 1] if self._balances else []
        sizes += [1] if self._z_loss is not None else []
        return hidden, *(
            torch.empty(size, dtype=torch.float32, device="meta", requires_grad=True)
            for size in sizes
        )

    def _is_balanced(self, batch: Batch) -> bool:
        asked = batch.get("output_router_logits")
        if asked is None:
            asked = getattr(text_config(self.model), "output_router_logits", False)
        return bool(asked) and self._balancing is not None and "labels" in batch

    def _sums(
        self, logits: Sequence[Tensor], hidden: Tensor, kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        """Of the stage's own layers: what `_handed_on` has beside the hidden states."""
        sums = [self._load_sums(logits, hidden.device)] if self._balances else []
        if self._z_loss is not None:
            assert self._tokens is not None
            batch = self._micro_batches[self._micro_batch]
            sums.append(self._z_loss.of(batch, self._tokens).reshape(1))
        return tuple(sums)

    def _load_sums(self, logits: Sequence[Tensor], device: torch.device) -> Tensor:
        """Choices [E], probabilities [E], tokens, as one vector."""
        assert self._balancing is not None
        if not logits:
            return torch.zeros(2 * num_experts(self.model) + 1, dtype=torch.float32, device=device)
        choices, probabilities, tokens = load_sums(logits, self._balancing.top_k, self._mask)
        return torch.cat([choices, probabilities, tokens.reshape(1)]).float()

    def _keep_sums(self, output: Any, totals: tuple[Tensor, ...], kwargs: Mapping[str, Any]) -> Any:
        self._totals = totals
        return output

    def _token_masks(
        self, batch: Batch, real_rows: int | None, count: int
    ) -> Sequence[Tensor | None]:
        """Which tokens the auxiliary loss counts, per micro-batch; None: all."""
        mask = batch.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        rows = count_rows(batch)
        if real_rows is not None and real_rows < rows:
            ids = batch.get("input_ids", batch.get("inputs_embeds"))
            assert isinstance(ids, Tensor)
            mask = ids.new_ones(ids.shape[:2], dtype=torch.int64) if mask is None else mask.clone()
            mask[real_rows:] = 0
        return [None] * count if mask is None else mask.chunk(count)


class _LaterGradient(torch.autograd.Function):
    """Zero, whose gradient with respect to `x` is in a list by the time of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.gradient[0], None


class _LastStage(nn.Module):
    """The last stage as a model that takes a micro-batch."""

    def __init__(self, stage: nn.Module, received: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._stage, self._received = [stage], received

    def forward(self, **inputs: Any) -> Any:
        return self._stage[0](*self._received, **inputs)


def _as_sent(value: Tensor, like: Tensor) -> Tensor:
    """In the dtype and layout that the next stage expects; a leaf where nothing needs a gradient."""
    value = value.to(like.dtype).contiguous()
    if not value.requires_grad:
        return value.detach().requires_grad_()
    # torch detaches what was sent in place, which views refuse.
    return value.clone() if is_view(value) else value


def _takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward takes this argument."""
    parameters = inspect.signature(type(model).forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _recomputes(model: nn.Module) -> bool:
    """Whether a layer's forward runs again in its backward."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
