"""Callbacks that measure: tokens per second, memory, how the experts are loaded."""

from ep_trainer.meters.base import Meter
from ep_trainer.meters.experts import ExpertLoad
from ep_trainer.meters.jsonlines import JsonLines
from ep_trainer.meters.memory import Memory
from ep_trainer.meters.speed import Speed

__all__ = ["ExpertLoad", "JsonLines", "Memory", "Meter", "Speed"]
