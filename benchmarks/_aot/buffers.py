"""The largest temporary buffers, from the assignment of buffers that the compiler leaves in its dump."""

import re
from typing import NamedTuple

_ALLOCATION = re.compile(r"allocation \d+: size \d+, (.*)")
_VALUE = re.compile(r"\s+value: .*\(size=(\d+),offset=(\d+)\): (.+)")
_LAYOUT = re.compile(r"\{[^{}]*\}")


class Buffer(NamedTuple):
    """Bytes of one place in memory, and the types of the values that live there one after the other."""

    size: int
    values: str


def _is_temporary(kind: str) -> bool:
    """On-chip memories have a colour; what is left is the main memory."""
    return "preallocated-temp" in kind and "color" not in kind


def largest(assignment: str, count: int = 6) -> list[Buffer]:
    """The largest buffers among the temporaries; those that share a place at different times are one."""
    places: dict[int, dict[str, int]] = {}
    temporary = False
    for line in assignment.splitlines():
        if allocation := _ALLOCATION.match(line):
            temporary = _is_temporary(allocation[1])
        elif temporary and (value := _VALUE.match(line)):
            places.setdefault(int(value[2]), {})[_LAYOUT.sub("", value[3])] = int(value[1])
    found = [Buffer(max(values.values()), ", ".join(sorted(values))) for values in places.values()]
    return sorted(found, reverse=True)[:count]
