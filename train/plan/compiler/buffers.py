"""The largest buffers of a compiled program, and where they come from."""

import re
from typing import NamedTuple

_ALLOCATION = re.compile(r"allocation \d+: size \d+, (.*)")
_VALUE = re.compile(r"\s+value: <\d+ (?P<name>[\w.\-]+).*\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<type>.+)")
_LAYOUT = re.compile(r"\{[^{}]*\}")


class Buffer(NamedTuple):
    """Bytes of one place in memory, the types of the values that occupy it one after the other, and their origin.

    Attributes:
      size: bytes.
      values: types.
      origin: named scopes and operation of its largest value, as JAX writes them; empty where the compiler made it.
    """

    size: int
    values: str
    origin: str = ""


def largest_buffers(assignment: str, count: int = 6, program: str = "") -> list[Buffer]:
    """Returns the largest temporary buffers of a buffer assignment; values that share a place are one buffer.

    Args:
      assignment: the compiler's report.
      count: the number of buffers.
      program: the text of the compiled program, for the origins.
    """
    places: dict[int, dict[str, tuple[int, str]]] = {}
    temporary = False
    for line in assignment.splitlines():
        if allocation := _ALLOCATION.match(line):
            # On-chip memories have a colour.
            temporary = "preallocated-temp" in allocation[1] and "color" not in allocation[1]
        elif temporary and (value := _VALUE.match(line)):
            values_here = places.setdefault(int(value["offset"]), {})
            values_here[_LAYOUT.sub("", value["type"])] = (int(value["size"]), value["name"])
    largest = sorted(((max(values.values()), sorted(values)) for values in places.values()), reverse=True)[:count]
    origins = _origins(program, {name for (_, name), _ in largest})
    return [Buffer(size, ", ".join(values), origins.get(name, "")) for (size, name), values in largest]


def _origins(program: str, names: set[str]) -> dict[str, str]:
    """Finds the scopes of instructions by their names."""
    origins = {}
    for line in program.splitlines():
        name = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
        if name and name[1] in names and (scope := re.search(r'op_name="([^"]*)"', line)):
            origins[name[1]] = scope[1]
    return origins
