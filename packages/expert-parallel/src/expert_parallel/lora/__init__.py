"""LoRA adapters of sharded models, in PEFT's format."""

from expert_parallel.lora.adding import add_lora, load_lora
from expert_parallel.lora.files import save_lora

__all__ = ["add_lora", "load_lora", "save_lora"]
