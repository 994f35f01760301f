"""Memory, traffic and time of a training step, estimated on a machine without the devices."""

from .api import estimate
from .calibrate import calibrate
from .devices import DEVICES, Device
from .report import Estimate, MemoryPeak, StepTime, Traffic
from .routing import RoutingModel

__all__ = [
    "DEVICES",
    "Device",
    "Estimate",
    "MemoryPeak",
    "RoutingModel",
    "StepTime",
    "Traffic",
    "calibrate",
    "estimate",
]
