"""What a GPU and its links can do, and which share of it a run is assumed to reach."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """A GPU, its links, and the shares that a run reaches. `dataclasses.replace` makes another one.

    Peaks are those of the vendor's data sheets, dense. Shares are assumptions, the same for all presets.

    Attributes:
        name: of the device.
        flops_16bit, flops_32bit: peak FLOP/s of matrix products in bfloat16 or float16, and in float32.
        memory_bytes: what it has.
        memory_bandwidth: bytes/s.
        link_bandwidth: bytes/s to the other devices of a node, one direction.
        link_latency: seconds of a collective inside a node, whatever it moves.
        network_bandwidth: bytes/s to other nodes, of one device, one direction.
        network_latency: as `link_latency`, between nodes.
        devices_per_node: ranks that follow each other lie in one node.
        matmul_share, memory_share, link_share: of the peaks, for large operations.
        launch_seconds: the host's time for one kernel, the Python around it included.
        kernel_seconds: the least time of a kernel on the device.
        sync_seconds: from the end of a copy to the host until the host goes on.
    """

    name: str
    flops_16bit: float
    flops_32bit: float
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float = 15e-6
    network_bandwidth: float = 50e9
    network_latency: float = 40e-6
    devices_per_node: int = 8
    matmul_share: float = 0.6
    memory_share: float = 0.85
    link_share: float = 0.75
    launch_seconds: float = 5e-6
    kernel_seconds: float = 2e-6
    sync_seconds: float = 10e-6

    def matmul_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of products of a dtype."""
        peak = self.flops_16bit if dtype.itemsize <= 2 else self.flops_32bit
        return peak * self.matmul_share

    def kernel_time(self, flops: float, moved: float, kernels: int, dtype: torch.dtype) -> float:
        """Seconds of an operation: the slowest of its FLOPs, its bytes, and its kernels' least time."""
        return max(
            flops / self.matmul_rate(dtype),
            moved / (self.memory_bandwidth * self.memory_share),
            kernels * self.kernel_seconds,
        )

    def link_time(self, inside: float, outside: float) -> float:
        """Seconds of a collective of which a rank sends `inside` bytes in its node and others out."""
        latency = self.network_latency if outside else self.link_latency
        share = self.link_share
        return latency + max(
            inside / (self.link_bandwidth * share), outside / (self.network_bandwidth * share)
        )


DEVICES = {
    "h100": Device("h100", 989e12, 67e12, 80 * GIB, 3.35e12, 450e9),
    "h100_pcie": Device("h100_pcie", 756e12, 51e12, 80 * GIB, 2.0e12, 64e9),
    "h200": Device("h200", 989e12, 67e12, 141 * 10**9, 4.8e12, 450e9),
    "b200": Device("b200", 2250e12, 80e12, 180 * 10**9, 7.7e12, 900e9),
    "a100": Device("a100", 312e12, 19.5e12, 80 * GIB, 2.039e12, 300e9, network_bandwidth=25e9),
    "a100_pcie": Device(
        "a100_pcie", 312e12, 19.5e12, 80 * GIB, 1.935e12, 32e9, network_bandwidth=25e9
    ),
}
"""NVLink in a node except for `*_pcie`; 400 Gbit/s InfiniBand per device between nodes, 200 for A100."""


def device_of(device: str | Device) -> Device:
    """A preset by name, or the device itself.

    Raises:
        ValueError: there is no such preset.
    """
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ValueError(
            f"device={device!r} is no preset; there are {', '.join(DEVICES)}. Or pass a Device."
        )
    return DEVICES[device]
