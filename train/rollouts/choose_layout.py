"""The choice of the layout for sampling, a pure function of sizes: which mesh, why, and the bytes of a device."""

import dataclasses
from collections.abc import Sequence

from train.config.mesh import describe_mesh

USABLE = 0.9
"""The part of a device's memory that both layouts together may fill; the rest is for programs and fragments."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A mesh `data x tensor` for sampling.

    Attributes:
      tensor: devices that split a weight.
      weights: bytes of the weights on a device.
      cache: bytes of the KV cache and of the logits of a decode step on a device.
    """

    tensor: int
    weights: int
    cache: int


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layout and its reason.

    Attributes:
      tensor: of the chosen option; None: the weights stay as the update lays them out.
      reason: why, in words.
    """

    tensor: int | None
    reason: str


def tensor_sizes(devices: int, tensor: int, parts: int, sizes: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Lists the tensor sizes of meshes over these devices to which weights move in parts, the best first.

    The size of the training mesh comes first: its weights move by one all-gather. A larger one makes weights smaller on
    a device, and adds to the all-reduces of a decode step; a smaller one makes them larger.

    Args:
      devices: of both meshes.
      tensor: `mesh.tensor`.
      parts: `mesh.fsdp x mesh.tensor`, the devices that hold all weights once.
      sizes: of the decoder, each of which tensor splits.
      rows: numbers of rows, each of which the data axis splits.

    Example:
      >>> tensor_sizes(16, 2, 16, sizes=(8, 24), rows=(64,))
      [2, 4, 8, 1]
    """
    fitting = [
        size
        for size in range(1, parts + 1)
        if parts % size == 0
        and (size % tensor == 0 or tensor % size == 0)
        and all(size_of_array % size == 0 for size_of_array in sizes)
        and all(count % (devices // size) == 0 for count in rows)
    ]
    return sorted(fitting, key=lambda size: (size < tensor, abs(size - tensor)))


def choose(options: Sequence[Option], *, resident: int, memory: int | None, gathers: bool, narrows: bool) -> Choice:
    """Chooses the first option that fits beside the state of the run.

    Args:
      options: the best first.
      resident: bytes of a device that weights, optimizer and references of the update take.
      memory: bytes of a device; None: unknown, as on CPUs.
      gathers: whether the update splits weights over rows' devices, so that sampling in place gathers them.
      narrows: whether the copy has a narrower dtype.
    """
    if memory is None:
        return Choice(None, "the memory of this device is not known")
    if not gathers and not narrows:
        return Choice(None, "no weight is gathered there")
    if not options:
        return Choice(None, "no other mesh divides the model and the rows")
    for option in options:
        needed = resident + option.weights + option.cache
        if needed <= USABLE * memory:
            why = "no decode step gathers weights" if gathers else "decode steps read fewer bytes"
            return Choice(option.tensor, f"{why}, and both layouts fit")
    least = min(option.weights + option.cache for option in options)
    return Choice(None, f"both layouts need {_size(resident + least)} of {_size(memory)}")


def describe(
    choice: Choice, option: Option, *, data: int, expert: int = 1, dtype: str, resident: int, memory: int | None
) -> str:
    """Describes a layout in one line.

    Args:
      choice: the choice.
      option: bytes of the layout that is used; its weights are 0 where they stay in place.
      data: devices that split the rows.
      expert: `mesh.expert`.
      dtype: of the sampler.
      resident: see `choose`.
      memory: see `choose`.
    """
    where = "laid out once per step" if option.weights else "in place"
    if choice.tensor is not None:
        where += f", {describe_mesh({'data': data // expert, 'expert': expert, 'tensor': choice.tensor})}"
    total = "" if memory is None else f", of {_size(memory)}"
    return (
        f"sampling: weights {where}, {dtype} ({choice.reason}); a device holds {_size(resident)} of state, "
        f"{_size(option.weights)} of weights for sampling, {_size(option.cache)} of KV cache and logits{total}"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 // 10 else f"{count / 2**20:.1f} MiB"
