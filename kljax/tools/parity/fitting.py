"""Fits the numbers of a stage, such as a clip or a coefficient, to the arrays of a dump."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kljax.tools.parity.causes import Cause
from kljax.tools.parity.comparison import residual_of
from kljax.tools.parity.fields import ORDER
from kljax.tools.parity.numbers import UnknownNumber, note_on_factor
from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import Replay
from kljax.tools.parity.solvers import Residual, agreeing_interval, is_simple, simplest, solve_between, solve_linear

# Results by which one number is looked for while another may be wrong as well.
PEELED = 3


class Equation(NamedTuple):
    """The differences of fields as a function of one number.

    Attributes:
      replay: the recorded arrays.
      number: the number that is looked for.
      fields: the fields.
      recipe: the settings of everything else.
      element: the only result that counts, by its position among the results of the fields; None counts all.
    """

    replay: Replay
    number: UnknownNumber
    fields: tuple[str, ...]
    recipe: Recipe
    element: int | None = None

    def residual(self, value: float) -> Residual | None:
        """Returns the differences at a value of the number.

        Returns:
          The `Residual`, or None if the library refuses the value.
        """
        try:
            residual = residual_of(self.replay, self.fields, self.number.cause(self.recipe, value).apply(self.recipe))
        except (ValueError, TypeError):
            return None
        if self.element is None:
            return residual
        part = slice(self.element, self.element + 1)
        return Residual(residual.difference[part], residual.bound[part])


def fit_number(
    replay: Replay,
    number: UnknownNumber,
    name: str,
    recipe: Recipe,
    *,
    later: Sequence[str] = (),
    element: int | None = None,
) -> Cause | None:
    """Solves a number from a field, and from the fields after it if the field is one number.

    Args:
      name: a field that does not agree.
      recipe: the settings of all other numbers.
      later: the fields after it.
      element: solve it from one number of the field alone, without proof.

    Returns:
      The cause that the number has the value under which the field agrees, or None.
    """
    start = value_of(number, recipe)
    for fields in fields_of(replay, number, name, later):
        equation = Equation(replay, number, fields, recipe, element)
        if number.grid:
            value = _solved_between(equation, start)
        else:
            value = solve_linear(equation.residual, start or 0.0, 2 * start if start else 1.0)
        if value is None:
            continue
        value = simplest(equation.residual, value)
        if value == start or (element is None and not _is_proved(equation, value)):
            continue
        note, limits = note_on_factor(replay, number, value), None
        if number.grid and element is None:
            limits = agreeing_interval(equation.residual, value, number.grid)
            note = note if limits is None else f" (all from {limits[0]:.4g} to {limits[1]:.4g} agree)"
        return dataclasses.replace(number.cause(recipe, value, note), limits=limits)
    return None


def fields_of(replay: Replay, number: UnknownNumber, name: str, later: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Lists the fields that a number is solved from: a field of one number together with later fields, then alone.

    Args:
      name: a field that does not agree.
      later: the fields after it.
    """
    if replay.arrays[name].size > 1 or name not in ORDER:
        return [(name,)]
    joint = (name, *(field for field in later if number.stage in ORDER[field]))
    return [joint, (name,)] if len(joint) > 1 else [(name,)]


def value_of(number: UnknownNumber, recipe: Recipe) -> float | None:
    """Returns the value of a number in a recipe; None if it has none."""
    step = getattr(recipe, number.stage)
    if not number.argument:
        value = getattr(step, number.setting)
        return None if value is None else float(value)
    changed = dict(step.arguments)
    return changed.get(number.setting, number.declared)


def _solved_between(equation: Equation, start: float | None) -> float | None:
    """Solves a number from all results, or else from a few of them in turn, where all then agree."""
    grid = sorted({*equation.number.grid, *(() if start is None else (start,))})
    value = solve_between(equation.residual, grid)
    before = residual_of(equation.replay, equation.fields, equation.recipe)
    if value is not None or equation.element is not None or before.difference.size < 2:
        return value
    for position in np.argsort(-np.abs(before.units), kind="stable")[:PEELED]:
        candidate = solve_between(equation._replace(element=int(position)).residual, grid)
        residual = None if candidate is None else equation.residual(candidate)
        if residual is not None and residual.agrees:
            return candidate
    return None


def _is_proved(equation: Equation, value: float) -> bool:
    """Tells whether more results than one show the number, or whether it is too simple for chance."""
    before = residual_of(equation.replay, equation.fields, equation.recipe)
    differing = np.flatnonzero(np.abs(before.difference) > before.bound)
    if len(differing) > 1:
        return True
    near, there = equation.residual(value * (1 + 1e-3) if value else 1e-3), equation.residual(value)
    if near is None or there is None:
        return False
    # How far the number that this result alone shows lies from the simple one.
    slope = np.abs(near.difference - there.difference) / 1e-3
    element = int(np.argmax(slope / np.maximum(there.bound, 1e-300)))
    if not slope.any() and len(differing):
        # A threshold, beyond which the result is another one: by chance it would not be the recorded one.
        return bool(there.bound[differing[0]] < abs(before.difference[differing[0]]) / 300)
    return slope[element] > 0 and is_simple(value, float(abs(there.difference[element]) / slope[element]))
