"""How it learns: a transformers Trainer for expert-parallel models."""

from ep_trainer.accelerator import LayoutAccelerator
from ep_trainer.balancing import BalancingLoss
from ep_trainer.bias_balancing import BiasBalancing
from ep_trainer.checkpoint import CheckpointError, CheckpointOptions
from ep_trainer.chunked_loss import chunk_loss
from ep_trainer.cross_entropy import chunked_cross_entropy
from ep_trainer.failures import PeerError
from ep_trainer.in_backward import StepInBackward
from ep_trainer.meters import ExpertLoad, JsonLines, Memory, Meter, Speed
from ep_trainer.muon import Muon
from ep_trainer.pipeline import PipelineRunner
from ep_trainer.replay import record_routes, replay_routes
from ep_trainer.scaler import WorldGradScaler
from ep_trainer.trainer import EPTrainer
from ep_trainer.watch import Watch
from ep_trainer.with_layout import with_layout
from ep_trainer.z_loss import RouterZLoss

__all__ = [
    "BalancingLoss",
    "BiasBalancing",
    "CheckpointError",
    "CheckpointOptions",
    "EPTrainer",
    "ExpertLoad",
    "JsonLines",
    "LayoutAccelerator",
    "Memory",
    "Meter",
    "Muon",
    "PeerError",
    "PipelineRunner",
    "RouterZLoss",
    "Speed",
    "StepInBackward",
    "Watch",
    "WorldGradScaler",
    "chunk_loss",
    "chunked_cross_entropy",
    "record_routes",
    "replay_routes",
    "with_layout",
]
