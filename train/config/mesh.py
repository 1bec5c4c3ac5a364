"""The mesh of devices: its axes, outermost first, and how messages name them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from train.config.types import Count, Section

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


class Mesh(Section):
    data: Count = 1
    """Devices that split the rows and replicate the parameters."""
    fsdp: Count = 1
    """Devices that split rows and parameters."""
    expert: Count = 1
    """Devices that split the experts of a mixture by number; rows and other parameters as fsdp does."""
    context: Count = 1
    """Devices that split the tokens of a row, for long sequences; scoring and updates gather keys and values."""
    tensor: Count = 1
    """Devices that split heads, MLP and vocabulary."""
    slices: Count = 1
    """Slices of TPUs that only a network connects, each with an equal part of data; GPUs on one fabric are one."""

    def parts(self, axes: Sequence[str] = AXES) -> Parts:
        """Returns the parts that axes split a size into together."""
        sizes = {axis: getattr(self, axis) for axis in axes}
        return Parts(math.prod(sizes.values()), tuple(f"mesh.{axis}" for axis in usual_sizes(sizes)))
