"""The devices of this machine, in a process that ends before the next one needs them."""

from typing import Any

import jax

from benchmarks.harness import machine


class Probe:
    """Describes the machine."""

    def versions(self) -> dict[str, str]:
        """Returns the versions of the libraries."""
        return machine.versions()

    def describe(self) -> dict[str, Any]:
        """Returns the description of the machine, with the platform and the number of its devices."""
        device = jax.devices()[0]
        return machine.describe(device) | {"platform": device.platform, "devices": jax.device_count()}


load = Probe
