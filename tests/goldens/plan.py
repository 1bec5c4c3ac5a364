"""A planned case: which function of which release runs with which arguments on which batches."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

BOTH = ("base", "holes")
# Notes of cases whose numbers a clamp of the release decides, and of cases without an option of the release.
REACHES_BOUND, RELEASE_DEFAULTS = "reaches a bound of the release", "the defaults of the release"
# A dual clip or a threshold far away leaves the clamps at 20 and at 10 to decide.
FAR_AWAY = 1e12


@dataclasses.dataclass(frozen=True)
class RecordingPlan:
    """One call of one function, on each of the batches."""

    function: str
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batches: tuple[str, ...] = BOTH
    gradient_of: str | None = "log_probs"
    note: str | None = None


def grid(**choices: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination of the choices, as arguments."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def identities(system: str, plans: Iterable[RecordingPlan]) -> list[tuple[str, RecordingPlan, str]]:
    """The id, the plan and the batch of every case, in order; ids count per function."""
    counts: dict[str, int] = {}
    cases = []
    for plan in plans:
        for batch in plan.batches:
            number = counts[plan.function] = counts.get(plan.function, -1) + 1
            cases.append((f"{system}.{plan.function}.g{number:02d}", plan, batch))
    return cases
