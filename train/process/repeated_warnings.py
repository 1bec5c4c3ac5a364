"""Warnings that many steps would give, as a few lines."""

import math

WARN_EVERY = 50
"""Steps between warnings that a limit is left; one that is left ten times as far is reported at once."""


class Warnings:
    """Counts the steps beyond a limit and chooses the reported ones, so that many of them are a few lines."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._worst = 0.0
        self._silent = 0

    def count(self, step: int, factor: float) -> tuple[bool, int]:
        """Returns whether a step is reported, and the number of steps since the last report that were not."""
        if step < self._last + WARN_EVERY and not factor >= 10 * self._worst:
            self._silent += 1
            return False, 0
        before = self._silent
        self._silent = 0
        self._last = step
        self._worst = factor
        return True, before
