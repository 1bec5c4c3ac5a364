"""Which of several sets of causes that mend a field equally well are named."""

from kljax.tools.parity.causes import Cause
from kljax.tools.parity.solvers import DIGITS

# Digits that a number may have more than the simplest that mends as much.
SPARE_DIGITS = 2
Causes = tuple[Cause, ...]


def preferred(candidates: list[Causes]) -> list[Causes]:
    """Sorts choices before numbers, which explain as much with a free value; of these, small factors remain.

    Of choices, rare ones are last. Thresholds that lie anywhere in an interval remain too: they fit as easily. So do
    numbers of one digit where all choices are rare.

    Args:
      candidates: sets of causes that mend a field equally well.

    Returns:
      The choices, small factors and thresholds, or without choices the numbers that are simple enough.
    """
    choices = [causes for causes in candidates if all(cause.number is None for cause in causes)]
    choices.sort(key=lambda causes: sum(cause.alone for cause in causes))
    if not choices:
        return _simplest_numbers(candidates)
    factors = [causes for causes in candidates if causes not in choices and all(map(_is_small_factor, causes))]
    are_rare = all(any(cause.alone for cause in causes) for causes in choices)

    def is_likely(cause: Cause) -> bool:
        return cause.number is None or cause.limits is not None or (are_rare and _digits(cause) == 1)

    others = [causes for causes in candidates if causes not in choices + factors]
    return choices + factors + [causes for causes in others if all(map(is_likely, causes))]


def _simplest_numbers(candidates: list[Causes]) -> list[Causes]:
    """Leaves out numbers of many digits where one of few digits mends as much: chance makes no such number."""
    exact = [sum(map(_digits, causes)) for causes in candidates if all(cause.limits is None for cause in causes)]
    limit = min(exact, default=0) + SPARE_DIGITS
    return [
        causes
        for causes in candidates
        if any(cause.limits is not None for cause in causes) or sum(map(_digits, causes)) <= limit
    ]


def _digits(cause: Cause) -> int:
    """Counts the significant digits of a number, or the digits of n in 1/n."""
    value = cause.number or 0.0
    inverse = 1 / value if value else 0.0
    values = (value, inverse) if abs(inverse - round(inverse)) < 1e-9 * abs(inverse) else (value,)
    return min(next((n for n in DIGITS if float(f"{x:.{n}g}") == x), DIGITS[-1] + 1) for x in values)


def _is_small_factor(cause: Cause) -> bool:
    if cause.number is None:
        return True
    size = max(abs(cause.number), 1 / abs(cause.number)) if cause.number else 0.0
    return cause.name.startswith("scale") and 1 < size <= 64 and size == round(size)
