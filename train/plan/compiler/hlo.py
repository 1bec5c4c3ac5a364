"""Reads compiled programs: their instructions, how often computations run, and the cycles that a compiler estimates."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

# A tuple type may hold spaces and nested parentheses; the opcode is the first word after it.
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\(")
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
# Metadata of a kernel may go over several lines, which begin with braces too.
_END = re.compile(r"\}(, execution_thread=\"\w+\")?$")
_LOOP = ("body", "condition")
_BRANCH = ("true_computation", "false_computation", "branch_computations")
_CALLED = re.compile(
    rf"\b(body|condition|calls|to_apply|called_computations|{'|'.join(_BRANCH)})=(\{{[^}}]*\}}|%?[\w.\-]+)"
)
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_LIMIT = re.compile(r" [su](?:32|64)\[\]\S* constant\((\d+)\)")
# Control flow; the computations of other instructions are parts of one kernel.
CONTROL = frozenset({"while", "conditional", "call"})
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8} | {
    f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)
}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
# The compiler writes a huge number where it has no estimate.
_NO_ESTIMATE = 10**15
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")


class Instruction(NamedTuple):
    """One line of a computation, with the lines that continue it; `shape` is the text of its result's type."""

    name: str
    shape: str
    opcode: str
    line: str

    @property
    def operands(self) -> list[str]:
        """Returns the names of the operands."""
        start = self.line.index(f" {self.opcode}(") + len(self.opcode) + 2
        depth = 1
        end = start
        while depth and end < len(self.line):
            depth += (self.line[end] == "(") - (self.line[end] == ")")
            end += 1
        return _OPERAND.findall(self.line[start:end])

    @property
    def op_name(self) -> str:
        """Returns the path of named scopes and operations that JAX gave; empty where the compiler made it."""
        match = _OP_NAME.search(self.line)
        return match[1] if match else ""

    @property
    def computations(self) -> list[tuple[str, str]]:
        """Returns the computations that it calls, each with the attribute that names it."""
        found = _CALLED.findall(self.line)
        return [(attribute, name) for attribute, names in found for name in re.findall(r"[\w.\-]+", names)]

    def called(self, attribute: str) -> str:
        """Returns the name of the computation that an attribute such as `calls` names; empty without one."""
        return dict(_CALLED.findall(self.line)).get(attribute, "").lstrip("%")


class HloModule(NamedTuple):
    """All computations by name, and the name of the entry computation."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str


def parse(text: str) -> HloModule:
    """Parses the text of a module.

    Raises:
      ValueError: if the text holds no program.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = None
    current = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and not line.startswith("HloModule"):
            current = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif _END.match(line):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(Instruction(match["name"], match["shape"], match["opcode"], line))
        elif current:
            current[-1] = current[-1]._replace(line=f"{current[-1].line}\n{line}")
    if entry is None:
        raise ValueError(f"text: got {text[:80]!r}..., expected a compiled module with an ENTRY computation")
    return HloModule({name: tuple(lines) for name, lines in computations.items()}, entry)


def trip_count(module: HloModule, loop: Instruction, expected: Mapping[str, float] | None = None) -> float:
    """Returns the number of iterations of a `while`.

    The GPU's compiler writes it into the program. The TPU's does not; there it is the constant in the condition, which
    is right for loops that count up from 0 by 1, as `scan` and `fori_loop` do.

    Args:
      module: the program.
      loop: the `while`.
      expected: iterations of loops that depend on data, by the end of the path of named scopes around them.

    Raises:
      ValueError: if it depends on data, and is not expected.
    """
    # A transformation wraps the name of the outermost scope: `transpose(jvp(scope))/while`.
    path = f"/{loop.op_name}"
    paths = path, path.replace("(", "/").replace(")", "")
    named = [scope for scope in expected or () if any(path.endswith(f"/{scope}/while") for path in paths)]
    if expected and named:
        return expected[max(named, key=len)]
    known = _KNOWN_TRIPS.search(loop.line)
    if known:
        return int(known[1])
    condition = loop.called("condition")
    limits = {int(n) for instruction in module.computations[condition] for n in _LIMIT.findall(instruction.line)}
    if len(limits) != 1:
        raise ValueError(f"{loop.name}: got the limits {sorted(limits)}, expected one constant in {condition}")
    return limits.pop()


def executions(
    module: HloModule, *, kernels: bool = True, expected: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Counts the executions of each computation that runs; without `kernels`, computations of fusions do not count.

    Each branch of a conditional counts as taken, so that sums over branches are upper bounds. `expected` are iterations
    of loops that depend on data, see `trip_count`.
    """
    counts: dict[str, float] = {}

    def visit(computation: str, times: float) -> None:
        counts[computation] = counts.get(computation, 0) + times
        for instruction in module.computations[computation]:
            if not kernels and instruction.opcode not in CONTROL:
                continue
            trips = trip_count(module, instruction, expected) if instruction.opcode == "while" else 1
            for attribute, name in instruction.computations:
                if name in module.computations:
                    visit(name, times * trips if attribute in _LOOP else times)

    visit(module.entry, 1)
    return counts


def array_sizes(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the element type and the size along each axis of every array in the text of a type."""
    arrays = ((kind, sizes) for kind, sizes in _ARRAY.findall(shape) if kind in _BITS)
    return [(kind, tuple(int(size) for size in sizes.split(",") if size)) for kind, sizes in arrays]


def array_bytes(shape: str) -> list[int]:
    """Returns the bytes of each array in the text of a type, without layouts and padding."""
    return [math.prod(sizes) * _BITS[kind] // 8 for kind, sizes in array_sizes(shape)]


def estimated_cycles(module: HloModule) -> float:
    """Sums the TPU compiler's estimates over all executions.

    The model is static: operations run one after the other, without unforeseen waits for memory, and collectives and
    copies that overlap with arithmetic are free.
    """
    total: float = 0
    for name, times in executions(module, kernels=False).items():
        for instruction in module.computations[name]:
            match = _CYCLES.search(instruction.line)
            if match and int(match[1]) < _NO_ESTIMATE:
                total += times * int(match[1])
    return total
