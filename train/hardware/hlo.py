"""Reads compiled programs: how often computations run, collectives, estimated cycles, and the largest buffers."""

import math
import re
from collections import Counter
from typing import NamedTuple

# A tuple type may hold spaces and nested parentheses; the opcode is the first word after it.
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\(")
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_LOOP = ("body", "condition")
_BRANCH = ("true_computation", "false_computation", "branch_computations")
_CALLED = re.compile(
    rf"\b(body|condition|calls|to_apply|called_computations|{'|'.join(_BRANCH)})=(\{{[^}}]*\}}|%?[\w.\-]+)"
)
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_LIMIT = re.compile(r" [su](?:32|64)\[\]\S* constant\((\d+)\)")
# Control flow; the computations of other instructions are parts of one kernel.
CONTROL = frozenset({"while", "conditional", "call"})
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64} | {
    f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)
}
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
          "collective-broadcast")  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
# The compiler writes a huge number where it has no estimate.
_NO_ESTIMATE = 10**15
_ALLOCATION = re.compile(r"allocation \d+: size \d+, (.*)")
_VALUE = re.compile(r"\s+value: .*\(size=(\d+),offset=(\d+)\): (.+)")
_LAYOUT = re.compile(r"\{[^{}]*\}")


class Instruction(NamedTuple):
    """One line of a computation; `shape` is the text of its result's type."""

    name: str
    shape: str
    opcode: str
    line: str


class Module(NamedTuple):
    """All computations by name, and the name of the entry computation."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str


def parse(text: str) -> Module:
    """Parses the text of a module.

    Raises:
      ValueError: if the text holds no program.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and not line.startswith("HloModule"):
            current = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(Instruction(found["name"], found["shape"], found["opcode"], line))
    if entry is None:
        raise ValueError(f"text: got {text[:80]!r}..., expected a compiled module with an ENTRY computation")
    return Module({name: tuple(lines) for name, lines in computations.items()}, entry)


def trip_count(module: Module, loop: Instruction) -> int:
    """Returns the number of iterations of a `while`.

    The GPU's compiler writes it into the program. The TPU's does not; there it is the constant in the condition, which
    is right for loops that count up from 0 by 1, as `scan` and `fori_loop` do.

    Raises:
      ValueError: if it depends on data.
    """
    known = _KNOWN_TRIPS.search(loop.line)
    if known:
        return int(known[1])
    condition = dict(_CALLED.findall(loop.line))["condition"].lstrip("%")
    limits = {int(n) for instruction in module.computations[condition] for n in _LIMIT.findall(instruction.line)}
    if len(limits) != 1:
        raise ValueError(f"{loop.name}: got the limits {sorted(limits)}, expected one constant in {condition}")
    return limits.pop()


def executions(module: Module, *, kernels: bool = True) -> Counter[str]:
    """Counts the executions of each computation in one run; without `kernels`, computations of fusions do not count.

    Each branch of a conditional counts as taken, so that sums over branches are upper bounds.
    """
    counts: Counter[str] = Counter()

    def visit(computation: str, times: int) -> None:
        counts[computation] += times
        for instruction in module.computations[computation]:
            if not kernels and instruction.opcode not in CONTROL:
                continue
            trips = trip_count(module, instruction) if instruction.opcode == "while" else 1
            for attribute, names in _CALLED.findall(instruction.line):
                for name in re.findall(r"[\w.\-]+", names):
                    if name in module.computations:
                        visit(name, times * trips if attribute in _LOOP else times)

    visit(module.entry, 1)
    return counts


class Collective(NamedTuple):
    """A collective operation of a program.

    Attributes:
      kind: "all-gather", "all-reduce", "reduce-scatter", ...
      shape: of its result, as the compiler writes it, without layouts.
      payload: bytes of the whole array that is gathered, reduced or sent, on one device.
      executions: in one run of the program.
    """

    kind: str
    shape: str
    payload: int
    executions: int

    @property
    def total(self) -> int:
        """Returns the bytes on one device in one run of the program."""
        return self.payload * self.executions


def array_bytes(shape: str) -> list[int]:
    """Returns the bytes of each array in the text of a type, without layouts and padding."""
    return [
        math.prod(int(size) for size in sizes.split(",") if size) * _BITS[kind] // 8
        for kind, sizes in _ARRAY.findall(shape)
        if kind in _BITS
    ]


def group_size(line: str) -> int:
    """Returns the number of devices in one group of a collective.

    Groups are a list, `{{0,4},{1,5}}`; a grid, `[groups,members]<=[4,4]T(1,0)`; or axes of a mesh,
    `mesh['a'=4,'b'=2] {'b'}`.

    Raises:
      ValueError: if the line has none of these forms.
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
    shape, asynchronous = instruction.shape, instruction.opcode.endswith("-start")
    if asynchronous and kind != "all-reduce":
        # The type of an asynchronous operation has operands, results, and perhaps its state.
        operands, results = _parts(shape)[:2]
        return sum(array_bytes(operands if kind == "reduce-scatter" else results))
    sizes = array_bytes(shape)
    return sum(sizes) * group_size(instruction.line) if kind == "reduce-scatter" else sum(sizes)


def _parts(shape: str) -> list[str]:
    """Splits the text of a tuple type into its parts; nested tuples stay whole."""
    parts, depth = [""], 0
    for character in shape.strip()[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def collectives(module: Module) -> list[Collective]:
    """Lists the collectives, largest first; equal ones at different places are merged."""
    counts, sites = executions(module), dict[object, Collective]()
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
            sites[(collective, channel and channel[1]) if fused else (name, instruction.name)] = collective
    merged: Counter[tuple[str, str, int]] = Counter()
    for collective in sites.values():
        merged[collective[:3]] += collective.executions
    return sorted((Collective(*key, times) for key, times in merged.items()), key=lambda c: -c.total)


def estimated_cycles(module: Module) -> int:
    """Sums the TPU compiler's estimates over all executions.

    The model is static: operations run one after the other, without unforeseen waits for memory, and collectives and
    copies that overlap with arithmetic are free.
    """
    total = 0
    for name, times in executions(module, kernels=False).items():
        for instruction in module.computations[name]:
            found = _CYCLES.search(instruction.line)
            if found and int(found[1]) < _NO_ESTIMATE:
                total += times * int(found[1])
    return total


class Buffer(NamedTuple):
    """Bytes of one place in memory, and the types of the values that occupy it one after the other."""

    size: int
    values: str


def largest_buffers(assignment: str, count: int = 6) -> list[Buffer]:
    """Returns the largest temporary buffers of a buffer assignment; values that share a place are one buffer."""
    places: dict[int, dict[str, int]] = {}
    temporary = False
    for line in assignment.splitlines():
        if allocation := _ALLOCATION.match(line):
            # On-chip memories have a colour.
            temporary = "preallocated-temp" in allocation[1] and "color" not in allocation[1]
        elif temporary and (value := _VALUE.match(line)):
            places.setdefault(int(value[2]), {})[_LAYOUT.sub("", value[3])] = int(value[1])
    found = [Buffer(max(values.values()), ", ".join(sorted(values))) for values in places.values()]
    return sorted(found, reverse=True)[:count]
