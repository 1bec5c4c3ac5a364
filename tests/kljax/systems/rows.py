"""Rows of `kljax.systems` on the recorded cases of their system: which cases, and with which arguments.

An exercise runs a row on one case. What stands around the row in the recorded function (an epsilon in a divisor, the
reduction of a loss, the KL in a reward) is written in the exercise, or taken from another row of the same case; what
the row claims is taken from the row.
"""

import re
from collections.abc import Callable
from typing import Any

import kljax
from kljax.systems import Call, Golden, Row
from tests.goldens import cases
from tests.goldens.cases import Case

Exercise = Callable[[Row, Case], None]
EXERCISES: dict[tuple[str, str], Exercise] = {}


def exercise(*functions: tuple[str, str]) -> Callable[[Exercise], Exercise]:
    """Registers the exercise of the given (system, function) pairs."""

    def register(function: Exercise) -> Exercise:
        EXERCISES.update(dict.fromkeys(functions, function))
        return function

    return register


def matches(golden: Golden, case: Case) -> bool:
    """Whether a case is one that a row names; None stands for an argument that is absent or off."""
    given = {name: case.params.get(name) for name in golden.params}
    return case.function == golden.function and all(
        (given[name] or None) == value if value is None else given[name] == value
        for name, value in golden.params.items()
    )


def cases_of(row: Row, golden: Golden) -> list[Case]:
    """The recorded cases that a row names."""
    return [case for case in cases.all_cases() if case.system == row.system and matches(golden, case)]


def part(kind: str, row: Row, case: Case) -> Row | None:
    """The row of a kind that this case is about: the row itself, or the one that names the case."""
    if row.kind == kind:
        return row
    found = [r for r in kljax.systems.rows(system=case.system, kind=kind) if any(matches(g, case) for g in r.goldens)]
    assert len(found) <= 1, [r.key for r in found]
    return found[0] if found else None


def options(row: Row, case: Case) -> dict[str, Any]:
    """The arguments that the case gives: `given` names the options of the system, `a, else b` the first that is set."""
    found = {}
    for argument, source in row.given.items():
        for name in source.split(", else "):
            key = re.sub(r"^1 [-+] | - 1$", "", name).rpartition(".")[2].lstrip("-").replace("-", "_")
            value = case.params.get(key)
            if value is not None:
                found[argument] = _converted(name, value)
                break
    return found


def _converted(source: str, value: Any) -> Any:
    if source.startswith("1 - "):
        return 1 - value
    if source.startswith("1 + "):
        return 1 + value
    return value - 1 if source.endswith(" - 1") else value


def call_of(row: Row | None) -> Call:
    """The call, which a row that is exercised has."""
    assert row is not None
    assert row.call is not None
    return row.call
