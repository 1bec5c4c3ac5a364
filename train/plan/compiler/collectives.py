"""The collectives of a compiled program: their kinds, bytes and groups, with the iterations of loops."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from train.plan.compiler.hlo import HloModule, Instruction, array_bytes, executions

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
          "collective-broadcast")  # fmt: skip
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(\S*mesh\[[^\]]*\][^{]*\{[^}]*\}|\{\{.*?\}\}|\{\}|\S+?)(?:,? |,?$)"
)
_MESH = re.compile(r"\S*mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>.*)\))? \{(?P<axes>[^}]*)\}")
ASYNCHRONOUS_STEP = "async_collective_fusion"
"""Part of the name of a TPU's computation that does a step of a collective beside other work."""
BETWEEN_SLICES = "slices "
"""Start of the kinds that go from slice to slice of TPUs, whose compiler writes them as transfers by the hosts."""
_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_GRID = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of a program.

    Attributes:
      kind: "all-gather", "all-reduce", "reduce-scatter", ..., or "slices all_reduce" and so on.
      shape: of its result, as the compiler writes it, without layouts.
      payload: bytes of the whole array that is gathered, reduced or sent, on one device.
      executions: in one run of the program.
      groups: the devices that take part in each exchange, as the compiler writes them.
      scope: named scopes and operation that it comes from, as JAX writes them.
    """

    kind: str
    shape: str
    payload: int
    executions: float
    groups: str = ""
    scope: str = ""

    @property
    def total(self) -> float:
        """Returns the bytes on one device in one run of the program."""
        return self.payload * self.executions


class SentBytes(NamedTuple):
    """Bytes that a device sends: over the links of its slice or host, and over the network between these."""

    links: float
    network: float


def collectives(module: HloModule, expected: Mapping[str, float] | None = None) -> list[Collective]:
    """Lists the collectives, largest first; equal ones at different places are merged.

    Args:
      module: the program.
      expected: iterations of loops that depend on data, see `hlo.trip_count`.
    """
    counts = executions(module, expected=expected)
    sites = dict[object, Collective]()
    for name, instructions in module.computations.items():
        for instruction in instructions:
            collective = read_collective(instruction, counts.get(name, 0))
            if collective is None or not collective.executions:
                continue
            # The steps of one asynchronous collective are printed in several fusions.
            fused = ASYNCHRONOUS_STEP in name
            site = (collective.kind, collective.shape, channel(instruction)) if fused else (name, instruction.name)
            sites[site] = collective
    merged: Counter[Collective] = Counter()
    for collective in sites.values():
        merged[dataclasses.replace(collective, executions=0)] += collective.executions  # type: ignore[assignment]
    scaled = (dataclasses.replace(collective, executions=times) for collective, times in merged.items())
    return sorted(scaled, key=lambda operation: -operation.total)


def read_collective(instruction: Instruction, executions: float = 1) -> Collective | None:
    """Returns the collective that an instruction is or starts; None if it is none."""
    between = _SLICES.search(instruction.line) if instruction.opcode == "send" else None
    kind = BETWEEN_SLICES + between[1].lower() if between else instruction.opcode.removesuffix("-start")
    if kind not in _KINDS and not between:
        return None
    shape = re.sub(r"\{[^{}]*\}", "", instruction.shape)
    groups = _GROUPS.search(instruction.line)
    payload = _payload(kind, instruction)
    return Collective(kind, shape, payload, executions, groups[1] if groups else "", instruction.op_name)


def channel(instruction: Instruction) -> str:
    """Returns the number that the parts of one collective have in common; empty without one."""
    found = re.search(r"channel_id=(\d+)", instruction.line)
    return found[1] if found else ""


def bytes_by_kind(operations: Sequence[Collective]) -> dict[str, tuple[float, float]]:
    """Sums executions and bytes of each kind, largest first."""
    sums: dict[str, tuple[float, float]] = {}
    for operation in operations:
        times, size = sums.get(operation.kind, (0.0, 0.0))
        sums[operation.kind] = (times + operation.executions, size + operation.total)
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def sent(collective: Collective, islands: Sequence[int]) -> SentBytes:
    """Computes the bytes that a device sends in one run, at least, by the best algorithm of the kind.

    In a group of n, an all-gather brings (n - 1) / n of its payload to every device; an all-reduce is a reduce-scatter
    and an all-gather. Where a group lies in several islands, every device gets the part of its own from its neighbours
    and shares the rest of the network with them.

    Args:
      collective: the collective.
      islands: [devices], the slice (TPU) or host (GPU) of each device in the order of the mesh.
    """
    if collective.kind.startswith(BETWEEN_SLICES):
        return SentBytes(0, collective.total)
    if collective.kind == "collective-permute":
        pairs = [(islands[a], islands[b]) for a, b in group_members(collective.groups, len(islands)) if a != b]
        crossing = sum(a != b for a, b in pairs) / max(len(pairs), 1)
        return SentBytes(collective.total * (1 - crossing), collective.total * crossing)
    group = group_members(collective.groups, len(islands))[0]
    members = len(group)
    parts = len({islands[device] for device in group})
    twice = 2 if collective.kind == "all-reduce" else 1
    neighbours = members / parts
    across = twice * collective.total * (1 - 1 / parts) / neighbours
    return SentBytes(twice * collective.total * (1 - 1 / neighbours), across)


def group_members(groups: str, devices: int) -> list[list[int]]:
    """Lists the devices of each group of a collective.

    Groups are a list, `{{0,4},{1,5}}`, which is empty for all devices; a grid, `[groups,members]<=[4,4]T(1,0)`; or axes
    of a mesh, `mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'b'}`.

    Args:
      groups: as the compiler writes them.
      devices: the number of devices of the program.

    Raises:
      ValueError: the text has none of these forms.
    """
    if listed := re.fullmatch(r"\{((?:\{[\d,]*\},?)*)\}", groups):
        members = [[int(device) for device in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", listed[1])]
        return members or [list(range(devices))]
    if grid := re.fullmatch(r"\[(?:\d+,)*(\d+)\]<=(.*)", groups):
        return _numbers(grid[2]).reshape(-1, int(grid[1])).tolist()
    if mesh := _MESH.fullmatch(groups):
        return _mesh_groups(mesh["sizes"], mesh["ids"], mesh["axes"])
    raise ValueError(f"replica_groups: got {groups[:200]!r}, expected lists, a grid or axes of a mesh")


def _numbers(grid: str) -> np.ndarray:
    """Lists the devices of a grid, `[4,2]T(1,0)`, in its order, or of a list, `0,2,1,3`."""
    if match := _GRID.fullmatch(grid):
        sizes, axes = (tuple(map(int, text.split(","))) if text else () for text in match.groups())
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        return (numbers.transpose(axes) if axes else numbers).reshape(-1)
    return np.array([int(number) for number in grid.split(",")])


def _mesh_groups(sizes: str, ids: str | None, axes: str) -> list[list[int]]:
    """Lists the devices that differ in some axes of a mesh only; `'a':(2)4` is the part of size 4 after a part of 2."""
    inner = {name: (int(before or 1), int(size or 0)) for name, before, size in _AXIS.findall(axes)}
    shape: list[int] = []
    inside: list[int] = []
    for name, text in re.findall(r"'([^']+)'=(\d+)", sizes):
        before, size = inner.get(name, (1, 1))
        size = size or int(text)
        inside += [len(shape) + 1] if name in inner else []
        shape += [before, size, int(text) // before // size]
    numbers = np.arange(math.prod(shape)) if ids is None else _numbers(ids)
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    members = math.prod(shape[axis] for axis in inside)
    return numbers.reshape(shape).transpose([*outside, *inside]).reshape(-1, members).tolist()


def _payload(kind: str, instruction: Instruction) -> int:
    if kind.startswith(BETWEEN_SLICES):
        return sum(array_bytes(_parts(instruction.shape)[0]))
    shape = instruction.shape
    asynchronous = instruction.opcode.endswith("-start")
    if asynchronous and kind != "all-reduce":
        # The type of an asynchronous operation has operands, results, and perhaps its state.
        operands, results = _parts(shape)[:2]
        return sum(array_bytes(operands if kind == "reduce-scatter" else results))
    sizes = array_bytes(shape)
    if kind != "reduce-scatter":
        return sum(sizes)
    groups = _GROUPS.search(instruction.line)
    return sum(sizes) * len(group_members(groups[1] if groups else "", 1)[0])


def _parts(shape: str) -> list[str]:
    """Splits the text of a tuple type into its parts; nested tuples stay whole."""
    parts = [""]
    depth = 0
    for character in shape.strip()[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
