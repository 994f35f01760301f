"""Sharded checkpoints: every rank writes its part, any layout resumes from any other.

[Note: the directory]
::

    checkpoint-100/
      manifest.json              written last: step, layout, size and CRC-32 of every small file
      sharded/model/             rank-00000.safetensors ... and index.json
      sharded/optimizer/         moments, in the same boxes as their parameters
      sharded/extra/             tensors of what was registered
      optimizer.json             what is in the optimizer, options per parameter name
      scheduler.pt  position.json  order.pt  extra.json  trainer_state.json  random/rank-00000.pt
      config.json, tokenizer     beside the model, as transformers has them
      model*.safetensors         with `save_hf`, or after `ep checkpoint export`

Experts have their global ids: a chunk's offset in the expert dimension is the first one's id.
"""

from ep_trainer.checkpoint.checkpointer import Checkpointer, Contents
from ep_trainer.checkpoint.errors import CheckpointError
from ep_trainer.checkpoint.manifest import Manifest, check_checkpoint, checkpoints, read_manifest
from ep_trainer.checkpoint.options import CheckpointOptions
from ep_trainer.checkpoint.planner import BoxLoadPlanner, BoxSavePlanner
from ep_trainer.checkpoint.storage import SafetensorsReader, SafetensorsWriter

__all__ = [
    "BoxLoadPlanner",
    "BoxSavePlanner",
    "CheckpointError",
    "CheckpointOptions",
    "Checkpointer",
    "Contents",
    "Manifest",
    "SafetensorsReader",
    "SafetensorsWriter",
    "check_checkpoint",
    "checkpoints",
    "read_manifest",
]
