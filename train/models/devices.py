"""Memory and published rates of accelerators, one row for each kind of device."""

import dataclasses
import os
from typing import Literal

from train.process.xla_flags import MEMORY_FRACTION, NEW_MEMORY_FRACTION

Platform = Literal["tpu", "cuda"]
GIB = 2**30
JAX_FRACTION = 0.75
"""Part of a GPU's memory that JAX allocates without a variable; runs have `xla_flags`."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as JAX counts them: a chip, one of its two cores (v4, tpu7x), or a GPU. Rates are peaks of data sheets.

    Attributes:
      name: its name in a topology, such as "v5p".
      platform: of its compiler.
      kinds: starts of `jax.Device.device_kind`.
      memory: bytes that the compiler lets programs use (TPU), or that the device has (GPU).
      flops: operations per second of its matrix units in bfloat16, without sparsity.
      bandwidth: bytes per second of its memory.
      links: bytes per second that it sends over all links of its slice or host, in one direction.
      network: bytes per second that it sends to another slice or host, its share of the host's network.
      per_chip: devices of a chip.
    """

    name: str
    platform: Platform
    kinds: tuple[str, ...]
    memory: int
    flops: float
    bandwidth: float
    links: float
    network: float
    per_chip: int = 1

    @property
    def usable(self) -> int:
        """Returns the bytes that a run can use: of a GPU, the part that JAX allocates at its start."""
        return self.memory if self.platform == "tpu" else round(self.memory * gpu_fraction())


# TPUs: docs.cloud.google.com/tpu/docs, the pages of the versions; their interconnect counts both directions. Memory is
# the limit that libtpu 0.0.42 names where a program does not fit. GPUs: the data sheets of H100 SXM and H200 SXM, whose
# NVLink counts both directions; a network of 400 Gbit/s for each GPU, as in a DGX.
DEVICES = {
    device.name: device
    for device in (
        Device("v4", "tpu", ("TPU v4",), round(15.25 * GIB), 137.5e12, 614e9, 150e9, 3.125e9, per_chip=2),
        Device("v5e", "tpu", ("TPU v5 lite", "TPU v5e"), round(15.75 * GIB), 197e12, 819e9, 200e9, 3.125e9),
        Device("v5p", "tpu", ("TPU v5", "TPU v5p"), round(95.74 * GIB), 459e12, 2765e9, 600e9, 6.25e9),
        Device("v6e", "tpu", ("TPU v6 lite", "TPU v6e"), round(31.25 * GIB), 918e12, 1638e9, 400e9, 12.5e9),
        Device("tpu7x", "tpu", ("TPU7x",), round(94.75 * GIB), 1153.5e12, 3690e9, 300e9, 6.25e9, per_chip=2),
        Device("h100", "cuda", ("NVIDIA H100",), 84_942_979_072, 989e12, 3350e9, 450e9, 50e9),
        Device("h200", "cuda", ("NVIDIA H200",), 151_397_597_184, 989e12, 4800e9, 450e9, 50e9),
    )
}


def gpu_fraction() -> float:
    """Returns the part of a GPU's memory that JAX allocates, which a variable of the environment sets."""
    values = [os.environ[name] for name in (NEW_MEMORY_FRACTION, MEMORY_FRACTION) if os.environ.get(name)]
    return float(values[0]) if values else JAX_FRACTION


def find_device(kind: str) -> Device | None:
    """Finds a device by `jax.Device.device_kind`; None for one that the table lacks.

    Example:
      >>> find_device("TPU v5 lite").name, find_device("cpu")
      ('v5e', None)
    """
    matches = [
        (len(start), device.name) for device in DEVICES.values() for start in device.kinds if kind.startswith(start)
    ]
    return DEVICES[max(matches)[1]] if matches else None
