"""Runs entries of `kljax.systems` on the recorded cases of their system.

An exercise runs one entry on one case. The exercise itself writes the steps around the entry in the recorded function
(an epsilon in a divisor, the reduction of a loss, the KL in a reward), or takes them from another entry of the same
case. It takes every claim of the entry from the entry.
"""

import re
from collections.abc import Callable
from typing import Any

import kljax
from kljax.systems import Call, Entry, Golden
from tests.goldens import cases
from tests.goldens.cases import Case

Exercise = Callable[[Entry, Case], None]
EXERCISES: dict[tuple[str, str], Exercise] = {}


def exercise(*functions: tuple[str, str]) -> Callable[[Exercise], Exercise]:
    """Registers the exercise of the given (system, function) pairs."""

    def register(function: Exercise) -> Exercise:
        EXERCISES.update(dict.fromkeys(functions, function))
        return function

    return register


def matches(golden: Golden, case: Case) -> bool:
    """Tells whether an entry names a case; None stands for an argument that is absent or off."""
    arguments = {name: case.params.get(name) for name in golden.params}
    return case.function == golden.function and all(
        (arguments[name] or None) == value if value is None else arguments[name] == value
        for name, value in golden.params.items()
    )


def cases_of(entry: Entry, golden: Golden) -> list[Case]:
    """Lists the recorded cases that an entry names."""
    return [case for case in cases.all_cases() if case.system == entry.system and matches(golden, case)]


def part(kind: str, entry: Entry, case: Case) -> Entry | None:
    """Returns the entry of a kind that the case records: the entry itself, or another that names the case."""
    if entry.kind == kind:
        return entry
    candidates = kljax.systems.entries(system=case.system, kind=kind)
    actual = [other for other in candidates if any(matches(golden, case) for golden in other.goldens)]
    assert len(actual) <= 1, [other.key for other in actual]
    return actual[0] if actual else None


def options(entry: Entry, case: Case) -> dict[str, Any]:
    """Returns the arguments of the case by the `sources` of an entry; `a, else b` takes the first that is set."""
    collected = {}
    for argument, source in entry.sources.items():
        for name in source.split(", else "):
            option = re.sub(r"^1 [-+] | - 1$|^the (?:lower|upper) part of ", "", name)
            key = option.rpartition(".")[2].lstrip("-").replace("-", "_")
            value = case.params.get(key)
            if value is not None:
                collected[argument] = _converted(name, value)
                break
    return collected


def _converted(source: str, value: Any) -> Any:
    if source.startswith("1 - "):
        return 1 - value
    if source.startswith("1 + "):
        return 1 + value
    return value - 1 if source.endswith(" - 1") else value


def call_of(entry: Entry | None) -> Call:
    """Returns the call; every entry with an exercise has one."""
    assert entry is not None
    assert entry.call is not None
    return entry.call
