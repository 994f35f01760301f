"""Expert parallelism for Hugging Face mixture-of-experts models."""

from typing import TYPE_CHECKING, Any

from ep_mesh import DistributedConfig
from ep_plans import clip_grad_norm_
from expert_parallel.agreement import OtherRankError
from expert_parallel.auto import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from expert_parallel.generation import generate
from expert_parallel.initializing import initialize
from expert_parallel.loading import load_report
from expert_parallel.lora import add_lora, load_lora, save_lora
from expert_parallel.parallel import parallelize
from expert_parallel.reading import LoadReport
from expert_parallel.saving import save_pretrained

if TYPE_CHECKING:
    from ep_trainer import EPTrainer

__all__ = [
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMaskedLM",
    "AutoModelForMultimodalLM",
    "AutoModelForQuestionAnswering",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "DistributedConfig",
    "EPTrainer",
    "LoadReport",
    "OtherRankError",
    "add_lora",
    "clip_grad_norm_",
    "generate",
    "initialize",
    "load_lora",
    "load_report",
    "parallelize",
    "save_lora",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    # Training imports much that generating does not need.
    if name == "EPTrainer":
        from ep_trainer import EPTrainer

        return EPTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
