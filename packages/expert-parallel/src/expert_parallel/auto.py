"""transformers' Auto classes, with sharded loading: change the import, keep the script."""

from __future__ import annotations

from typing import Any

import transformers

from expert_parallel.loading import load


class _Sharded:
    """What each Auto class here adds to transformers' one of the same name."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers' method of the same class, and sharded if `distributed_config` is given.

        Args:
            pretrained_model_name_or_path: as for transformers; safetensors files.
            *args: as for transformers.
            **kwargs: as for transformers, and `distributed_config` (a `DistributedConfig`, a dict
                of its fields, or native transformers' object): every rank must call then.
                `experts_implementation` not given (or None) computes experts by `ep_kernels`,
                whatever the checkpoint's config names; `"deepgemm_megamoe"` stands for the
                `ep_implementation` of that name; any other name computes them by transformers' own
                implementation of that name.
                `experts_recompute`, `experts_backend`, `ep_options` and `fused_operators` are those
                of `parallelize`.

        Raises:
            ValueError: the config does not fit the model or the number of processes, or the files
                are not safetensors.

        Costs per rank: reads the bytes of its shards; for the memory see the note in
        `expert_parallel.reading`.
        """
        if kwargs.get("distributed_config") is None:
            return super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, *args, **kwargs
            )
        return load(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)  # type: ignore[misc]


class AutoModel(_Sharded, transformers.AutoModel):
    """`transformers.AutoModel`, which loads sharded if `distributed_config` is given."""


class AutoModelForCausalLM(_Sharded, transformers.AutoModelForCausalLM):
    """`transformers.AutoModelForCausalLM`, sharded if `distributed_config` is given."""


class AutoModelForImageTextToText(_Sharded, transformers.AutoModelForImageTextToText):
    """`transformers.AutoModelForImageTextToText`, sharded if `distributed_config` is given."""


class AutoModelForMultimodalLM(_Sharded, transformers.AutoModelForMultimodalLM):
    """`transformers.AutoModelForMultimodalLM`, sharded if `distributed_config` is given."""


class AutoModelForMaskedLM(_Sharded, transformers.AutoModelForMaskedLM):
    """`transformers.AutoModelForMaskedLM`, sharded if `distributed_config` is given."""


class AutoModelForSeq2SeqLM(_Sharded, transformers.AutoModelForSeq2SeqLM):
    """`transformers.AutoModelForSeq2SeqLM`, sharded if `distributed_config` is given."""


class AutoModelForSequenceClassification(_Sharded, transformers.AutoModelForSequenceClassification):
    """`transformers.AutoModelForSequenceClassification`, sharded as the others."""


class AutoModelForTokenClassification(_Sharded, transformers.AutoModelForTokenClassification):
    """`transformers.AutoModelForTokenClassification`, sharded as the others."""


class AutoModelForQuestionAnswering(_Sharded, transformers.AutoModelForQuestionAnswering):
    """`transformers.AutoModelForQuestionAnswering`, sharded as the others."""
