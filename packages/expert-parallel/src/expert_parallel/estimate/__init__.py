"""Memory, traffic and time of a training step, estimated on a machine without the devices."""

from .api import estimate
from .calibrate import calibrate
from .devices import DEVICES, Device
from .report import Estimate, MemoryPeak, StepTime, Traffic
from .routing import RoutingModel
from .search import Choice, Found, Refused, search

__all__ = [
    "DEVICES",
    "Choice",
    "Device",
    "Estimate",
    "Found",
    "MemoryPeak",
    "Refused",
    "RoutingModel",
    "StepTime",
    "Traffic",
    "calibrate",
    "estimate",
    "search",
]
