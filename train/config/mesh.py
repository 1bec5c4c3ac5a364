"""The mesh of devices: its axes, outermost first, and how messages name them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from train.config.types import AxisSize, Count, Section

AXES = ("data", "fsdp", "expert", "context", "tensor")
ROW_AXES = ("data", "fsdp", "expert")
"""Axes that split the rows of a batch."""
WIDTH_AXES = ("fsdp", "expert")
"""Axes that split the model width of weights, but of experts, which axis expert splits by number."""
UNUSUAL = ("expert", "context", "slices")
"""Axes that messages name only where they have more than one device."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that fields of a config split a size into.

    Attributes:
      count: their number.
      fields: the fields.
    """

    count: int
    fields: tuple[str, ...]

    def __str__(self) -> str:
        return f"{' x '.join(self.fields)} = {self.count}"


def usual_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Leaves out the unusual axes of size 1."""
    return {name: size for name, size in sizes.items() if name not in UNUSUAL or size > 1}


def describe_mesh(sizes: Mapping[str, int]) -> str:
    """Describes the sizes of axes, as "data=2 x fsdp=4 x tensor=1"."""
    return " x ".join(f"{name}={size}" for name, size in usual_sizes(sizes).items())


REMAINING = -1
"""The size of the one axis that takes all devices which the others leave."""


def fill_axes(sizes: Mapping[str, int], devices: int, name: str) -> dict[str, int]:
    """Replaces the size -1 of an axis by the devices that the others leave.

    Example:
      >>> fill_axes({"data": -1, "tensor": 2}, 8, "mesh")
      {'data': 4, 'tensor': 2}

    Raises:
      ValueError: the others do not divide the devices.
    """
    others = math.prod(size for size in sizes.values() if size != REMAINING)
    if REMAINING in sizes.values() and (devices % others or not devices):
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        raise ValueError(f"{name}: got -1 beside {shown}, which does not divide the {devices} devices")
    return {axis: devices // others if size == REMAINING else size for axis, size in sizes.items()}


class Mesh(Section):
    data: AxisSize = 1
    """Devices that split the rows and replicate the parameters; -1, for one axis: all that the others leave."""
    fsdp: AxisSize = 1
    """Devices that split rows and parameters."""
    expert: AxisSize = 1
    """Devices that split the experts of a mixture by number; rows and other parameters as fsdp does."""
    context: AxisSize = 1
    """Devices that split the tokens of a row, for long sequences; scoring and updates gather keys and values."""
    tensor: AxisSize = 1
    """Devices that split heads, MLP and vocabulary."""
    slices: Count = 1
    """Slices of TPUs that only a network connects, each with an equal part of `slice_axis`; GPUs on one fabric are
    one."""
    slice_axis: Literal["data", "fsdp"] = "data"
    """The axis that goes over the network: data sends gradients, fsdp weights too, for models too large for a slice."""

    def axes(self) -> dict[str, int]:
        """Returns the sizes of the axes by name."""
        return {axis: getattr(self, axis) for axis in AXES}

    def filled(self, devices: int) -> "Mesh":
        """Returns the mesh of this many devices, without -1; raises ValueError if other sizes do not divide them."""
        return self.model_copy(update=fill_axes(self.axes(), devices, "mesh"))

    def smallest(self) -> "Mesh":
        """Returns the mesh with the least size of an axis that is -1."""
        least = self.slices if getattr(self, self.slice_axis) == REMAINING else 1
        return self.filled(least * math.prod(size for size in self.axes().values() if size != REMAINING))

    def is_filled(self) -> bool:
        """Whether no axis is -1."""
        return REMAINING not in self.axes().values()

    def parts(self, axes: Sequence[str] = AXES) -> Parts:
        """Returns the parts that axes split a size into together."""
        sizes = {axis: getattr(self, axis) for axis in axes}
        return Parts(math.prod(sizes.values()), tuple(f"mesh.{axis}" for axis in usual_sizes(sizes)))
