"""How it learns: a transformers Trainer for expert-parallel models."""
