"""What a compiled program moves between devices, and how long its compiler thinks that it takes."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks._aot.hlo import Instruction, Module, executions

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64} | {
    f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)
}
_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
# The compiler writes a huge number where it has no estimate.
_NO_ESTIMATE = 10**15


class Collective(NamedTuple):
    """One place of a program where devices exchange something.

    Attributes:
      kind: "all-gather", "all-reduce", "reduce-scatter", ...
      shape: of its result, as the compiler writes it, without layouts.
      payload: bytes of the array that is gathered, reduced or sent, whole, on one device.
      executions: how often it happens in one run of the program.
    """

    kind: str
    shape: str
    payload: int
    executions: int

    @property
    def total(self) -> int:
        """Bytes on one device in one run of the program."""
        return self.payload * self.executions


def array_bytes(shape: str) -> list[int]:
    """Bytes of each array in the text of a type; layouts and their padding do not count."""
    return [
        math.prod(int(size) for size in sizes.split(",") if size) * _BITS[kind] // 8
        for kind, sizes in _ARRAY.findall(shape)
        if kind in _BITS
    ]


def group_size(line: str) -> int:
    """How many devices take part in one group of a collective.

    Written as a list of groups, `{{0,4},{1,5}}`; as a grid, `[groups,members]<=[4,4]T(1,0)`; or as axes of a mesh,
    `mesh['a'=4,'b'=2] {'b'}`.

    Raises:
      ValueError: if the line says it in no known way.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if grid := re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]<=", line):
        return int(grid[1])
    if mesh := re.search(r"replica_groups=\S*mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']+)'", mesh[2]))
    raise ValueError(f"replica_groups: got {line.strip()[:200]!r}, expected lists, a grid or axes of a mesh")


def _payload(kind: str, instruction: Instruction) -> int:
    sizes = array_bytes(instruction.shape)
    if kind == "reduce-scatter":
        # What is asynchronous has its operand in the type as well.
        return max(sizes) if instruction.opcode.endswith("-start") else sum(sizes) * group_size(instruction.line)
    asynchronous = instruction.opcode.endswith("-start") and kind != "all-reduce"
    return max(sizes) if asynchronous or kind == "collective-permute" else sum(sizes)


def _sites(module: Module) -> Iterator[tuple[object, Collective]]:
    counts = executions(module)
    for name, instructions in module.computations.items():
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind not in _KINDS or not counts[name]:
                continue
            shape = re.sub(r"\{[^{}]*\}", "", instruction.shape)
            collective = Collective(kind, shape, _payload(kind, instruction), counts[name])
            channel = re.search(r"channel_id=(\d+)", instruction.line)
            # The steps of one asynchronous collective are printed in several fusions.
            fused = "async_collective_fusion" in name
            yield ((collective, channel and channel[1]) if fused else (name, instruction.name)), collective


def collectives(module: Module) -> list[Collective]:
    """All collectives, those that move most first; equal ones at different places are merged."""
    merged: dict[tuple[str, str, int], int] = {}
    for collective in dict(_sites(module)).values():
        key = collective[:3]
        merged[key] = merged.get(key, 0) + collective.executions
    return sorted((Collective(*key, times) for key, times in merged.items()), key=lambda c: -c.total)


def estimated_cycles(module: Module) -> int:
    """Sum of the TPU compiler's estimates over all that runs, loops as often as they run.

    A static model: one thing after the other, no waiting for memory that the compiler did not foresee, and collectives
    and copies that run beside the arithmetic are free.
    """
    total = 0
    for name, times in executions(module, kernels=False).items():
        for instruction in module.computations[name]:
            found = _CYCLES.search(instruction.line)
            if found and int(found[1]) < _NO_ESTIMATE:
                total += times * int(found[1])
    return total
