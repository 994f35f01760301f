"""When a step is done: a host that launches, a device that computes, a link that carries.

[Note: the three clocks]
The host spends `launch_seconds` on each kernel and collective, in the order of the program. The device
runs kernels one after the other, none before it is launched. A collective that its caller waits for
(TP, EP) holds the device until it is done. An exchange of rows that was sent off (chunks, shared experts)
holds it only where it is waited for; the next exchange begins when it is done. FSDP2's run beside the
kernels: a gather begins as soon as it is launched and holds up the copy out of its buffer alone; a
reduce-scatter begins when its input is there, and holds up the end of the step. All share one link, so an
exchange that comes in between moves them back by its own time. Where the host reads a number from the
device, it waits for the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from .devices import Device

Carried = Literal["waited_for", "sent_off", "gather", "reduce"]


@dataclass
class Timeline:
    """The clocks, in seconds from the start of the step, and what the device did until then."""

    device: Device
    host: float = 0.0
    compute: float = 0.0
    link: float = 0.0
    busy: float = 0.0
    waited_for_link: float = 0.0
    waited_for_host: float = 0.0
    carried: float = 0.0
    launches: int = 0
    _exchanged: float = 0.0
    _gathers: deque[float] = field(default_factory=deque)

    def kernels(self, number: int, seconds: float) -> None:
        """Launch kernels that take so long together."""
        self._launch(number)
        self.waited_for_host += max(0.0, self.host - self.compute)
        self.compute = max(self.compute, self.host) + seconds
        self.busy += seconds

    def collective(self, seconds: float, how: Carried) -> float:
        """Launch a collective; gives when it is done."""
        self._launch(1)
        self.carried += seconds
        if how == "gather":
            self.link = max(self.link, self.host) + seconds
            self._gathers.append(self.link)
        elif how == "reduce":
            self.link = max(self.link, self.host, self.compute) + seconds
        else:
            begin = max(self.host, self.compute, self._exchanged)
            self._exchanged = begin + seconds
            if self.link > begin:
                self.link += seconds
                pending = [end + seconds if end > begin else end for end in self._gathers]
                self._gathers = deque(pending)
            if how == "waited_for":
                self.wait(self._exchanged)
            return self._exchanged
        return self.link

    def gathered(self) -> None:
        """Wait for the oldest gather."""
        if self._gathers:
            self.wait(self._gathers.popleft())

    def read(self) -> None:
        """Read a number on the host."""
        self.host = max(self.host, self.compute) + self.device.sync_seconds

    def end(self) -> float:
        """When all is done."""
        self.wait(max(self.link, self._exchanged))
        return max(self.host, self.compute)

    def wait(self, until: float) -> None:
        """Hold the device until then."""
        begin = max(self.compute, self.host)
        if until > begin:
            self.waited_for_link += until - begin
        self.compute = max(self.compute, until)

    def _launch(self, number: int) -> None:
        self.launches += number
        self.host += number * self.device.launch_seconds
