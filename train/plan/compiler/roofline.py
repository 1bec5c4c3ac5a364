"""A lower bound of the time of a program: its operations and bytes over the published rates of the device.

All rates are peaks, and arithmetic, memory and exchange are taken to overlap perfectly. A real run takes longer.
"""

import dataclasses
from typing import Literal

from train.models.devices import Device

Resource = Literal["matrix units", "memory", "links", "network"]


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one device in one run of a program.

    Attributes:
      flops: operations of its matmuls.
      memory: bytes read from and written to its memory.
      links: bytes sent within its slice or host.
      network: bytes sent to other slices or hosts.
    """

    flops: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    network: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        """Adds the work of another program."""
        return Work(
            *(
                mine + other_part
                for mine, other_part in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
            )
        )

    def __mul__(self, times: float) -> "Work":
        """Repeats the work."""
        return Work(*(times * value for value in dataclasses.astuple(self)))

    def seconds(self, device: Device) -> dict[Resource, float]:
        """Computes the time that each resource needs at its published rate."""
        return {
            "matrix units": self.flops / device.flops,
            "memory": self.memory / device.bandwidth,
            "links": self.links / device.links,
            "network": self.network / device.network,
        }

    def bound(self, device: Device) -> tuple[Resource, float]:
        """Returns the resource that needs the longest, and its seconds: no run is faster."""
        return max(self.seconds(device).items(), key=lambda item: item[1])
