"""How it learns: a transformers Trainer for expert-parallel models."""

from ep_trainer.accelerator import LayoutAccelerator
from ep_trainer.trainer import EPTrainer

__all__ = ["EPTrainer", "LayoutAccelerator"]
