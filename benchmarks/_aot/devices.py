"""The accelerators that are compiled for, none of which has to be here."""

import dataclasses
import pathlib

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

TARGETS = pathlib.Path(__file__).parents[1] / "gpu_targets"
AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of accelerator.

    Attributes:
      platform: whose compiler, "tpu" or "cuda".
      one: topology whose first device stands for one chip; libtpu describes no smaller ones than a host.
      many: topology of 16 chips; None where only one is compiled for.
      hertz: clock of the matrix units, that which yields the published peak rate; turns estimated cycles into seconds.
    """

    platform: str
    one: str
    many: str | None = None
    hertz: float | None = None


DEVICES = {
    "v5e": Device("tpu", "v5e:2x2", "v5e:4x4", 1.5e9),
    "v5p": Device("tpu", "v5p:2x2x1", "v5p:2x2x4", 1.75e9),
    "v6e": Device("tpu", "v6e:2x2", "v6e:4x4", 1.75e9),
    "h100": Device("cuda", "1x1x1"),
    "h200": Device("cuda", "1x1x1"),
}


def describe(name: str, topology: str) -> list[jax.Device]:
    """The devices of a topology, for compiling only."""
    if DEVICES[name].platform == "tpu":
        return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    target = (TARGETS / f"{name}.txtpb").read_text()
    return topologies.get_topology_desc(
        topology_name="", platform="cuda", target_config=target, topology=topology
    ).devices


def mesh_of(name: str, layout: str) -> Mesh:
    """One device, or 16 as `fsdp=4 x tensor=4`, with all axes of the trainer."""
    device = DEVICES[name]
    if layout == "one":
        return Mesh(np.array(describe(name, device.one)[:1]).reshape(1, 1, 1), AXES)
    assert device.many is not None
    return Mesh(np.array(describe(name, device.many)).reshape(1, 4, 4), AXES)
