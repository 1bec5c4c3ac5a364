"""The text of a compiled program as computations, and how often each of them runs."""

import re
from collections import Counter
from collections.abc import Iterator
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
# Instructions that pass control on; the computations of all others are parts of one kernel.
CONTROL = frozenset({"while", "conditional", "call"})


class Instruction(NamedTuple):
    """One line; `shape` is the text of the type of its result."""

    name: str
    shape: str
    opcode: str
    line: str


class Module(NamedTuple):
    """All computations by name, and which of them is the program."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str


def parse(text: str) -> Module:
    """The computations of a module.

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
    """How often the body of a `while` runs.

    The GPU's compiler writes it down. The TPU's does not; there it is the constant that the condition compares with,
    which holds for loops that count up from 0 by 1, as `scan` and `fori_loop` do.

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


def called(module: Module, instruction: Instruction) -> Iterator[tuple[str, int]]:
    """The computations that an instruction names, with how often each runs when it runs once.

    Each branch of a conditional counts as if it were taken, so that sums over branches are upper bounds.
    """
    trips = trip_count(module, instruction) if instruction.opcode == "while" else 1
    for attribute, names in _CALLED.findall(instruction.line):
        for name in re.findall(r"[\w.\-]+", names):
            if name in module.computations:
                yield name, trips if attribute in _LOOP else 1


def executions(module: Module, *, kernels: bool = True) -> Counter[str]:
    """How often each computation runs in one run of the program; without `kernels`, those in fusions do not count."""
    counts: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        counts[name] += times
        for instruction in module.computations[name]:
            if kernels or instruction.opcode in CONTROL:
                for inner, repeats in called(module, instruction):
                    visit(inner, times * repeats)

    visit(module.entry, 1)
    return counts
