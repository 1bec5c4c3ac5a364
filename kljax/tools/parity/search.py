"""Names the cause of each difference of a dump: the one choice or number under which its field agrees."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from kljax.tools.parity.causes import Cause, causes_of
from kljax.tools.parity.comparison import Residual, compare_field, describe, is_permuted, offsets, residual_of
from kljax.tools.parity.dump import METRIC
from kljax.tools.parity.invariants import invariants_of
from kljax.tools.parity.numbers import DIGITS, UnknownNumber, fit, numbers_of
from kljax.tools.parity.positions import over_tokens
from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import MissingFields, Replay
from kljax.tools.parity.report import Difference, Finding, ParityReport
from kljax.tools.parity.rounding import narrowest_dtype, round_to
from kljax.tools.parity.routes import compare_routes, route_loads, uncompared_routes
from kljax.tools.parity.stages import count_stages, recorded_results

# Causes of one report, and ties that are kept.
MAX_CAUSES = 4
TIES = 8
# Positions of a batch up to which causes are tried on all rows; of a larger one, on a sample of rows.
SMALL = 1 << 14
SAMPLE = 8
# Numbers that show a dtype by their grid, or other rows and positions by their agreement.
DISTINCT = 4
# Digits that a number may have more than the simplest that mends as much.
SPARE_DIGITS = 2
COARSER = {"float64": ("float32", "float16", "bfloat16"), "float32": ("float16", "bfloat16")}
# The fields that would decide where a cause is unknown or tied.
DECIDING = {
    "mask": ("tokens", "tool_mask"),
    "log_probs": ("hidden and head of one row",),
    "ref_log_probs": ("ref_hidden and ref_head of one row",),
    "advantages": ("row_ids", "kl", "rewards"),
    "token_loss": ("ratio", "weights", "advantages"),
    "loss": ("token_loss", "kl", "weights", "divisor", "grad_log_probs"),
    "grad_log_probs": ("token_loss", "kl", "loss"),
    "kl": ("ref_logits or ref_hidden and ref_head of one row",),
}


def make_report(batch: Replay) -> ParityReport:
    """Compares every field on all rows, and explains the differing ones."""
    reasons = recorded_results(batch)
    fields = [name for name, reason in reasons.items() if not reason]
    differences = [compare_field(batch, name, batch.recipe) for name in fields]
    judged = [*invariants_of(batch)]
    search = Search(batch, fields, sample_of(batch, differences))
    # A candidate may divide by 0 or overflow; it then does not agree.
    with np.errstate(all="ignore"):
        findings = search.explain() if any(not difference.agrees for difference in differences) else []
    reasons = {name: reason for name, reason in reasons.items() if reason}
    names = {difference.field for difference in differences if difference.compared}
    names |= {name for name, invariant in judged if invariant.holds is not None and name != "mask"}
    hidden = "undetermined by rounding, whose bounds are as large as the recorded numbers"
    notes = [*search.notes(), *(f"{x.field}: {hidden}" for x in differences if x.agrees and not x.determined)]
    # The experts decide log-probs, and nothing that is replayed decides them.
    routes, of_routes, flips = compare_routes(batch.dump)
    return ParityReport(
        (*routes, *differences),
        (*of_routes, *findings),
        (*reasons.items(), *uncompared_routes(batch.dump)),
        batch.dtype,
        count_stages(batch, names, reasons),
        tuple(invariant for _, invariant in judged),
        (*notes, *flips, *route_loads(batch.dump)),
    )


def sample_of(batch: Replay, differences: Sequence[Difference]) -> np.ndarray:
    """Selects the rows that causes are tried on, by number: all rows of a small batch.

    Of a large one: rows that differ in each field, with both signs of the advantage, of several lengths, with logits.
    """
    if math.prod(batch.shape) <= SMALL:
        return batch.rows
    lengths = batch.arrays["mask"].sum(1)
    chosen: list[int] = []
    for difference in differences:
        differing = sorted(difference.rows, key=lambda row: -lengths[row])
        chosen += [differing[0], differing[len(differing) // 2], differing[-1]] if differing else []
    if "rows" in batch.dump:
        chosen += batch.dump.read("rows").tolist()
    if "advantages" in batch.arrays:
        values = np.where(batch.arrays["mask"], over_tokens(batch.arrays["advantages"], batch.shape), 0).sum(1)
        chosen += [int(np.argmax(values)), int(np.argmin(values))]
    chosen += np.argsort(-lengths, kind="stable")[np.linspace(0, len(lengths) - 1, SAMPLE).astype(int)].tolist()
    size = max(SAMPLE, SMALL // batch.shape[1])
    return np.array(sorted([*dict.fromkeys(chosen)][:size]))


class Search:
    """Finds the causes of the differences, one after the other in the order of the data.

    Attributes:
      batch: the replay of all rows.
      replay: that of the rows on which causes are tried.
      compared: the fields that are compared on all rows, in the order of the data.
      fields: those that are compared on the rows of `replay`.
      skipped: those of unknown cause.
      tried: how many causes were tried.
    """

    def __init__(self, batch: Replay, fields: Sequence[str], rows: np.ndarray) -> None:
        self.batch = batch
        self.replay = batch.part(rows)
        self.sampled = self.replay is not batch
        # A scalar is of all rows.
        self.compared = fields
        self.fields = [name for name in fields if batch.arrays[name].ndim or not self.sampled]
        self.skipped: set[str] = set()
        self.tried = 0

    def notes(self) -> Iterator[str]:
        """Yields what was tried, and on which rows."""
        if self.tried:
            yield f"tried: {self.tried} causes of one setting"
        if self.sampled and self.tried:
            rows = ", ".join(map(str, self.replay.rows))
            yield f"every number of {len(self.batch.rows)} rows was compared; causes were tried on rows {rows}"

    def explain(self) -> list[Finding]:
        """Returns a finding for each field that differs once the causes of earlier ones are applied."""
        findings: list[Finding] = []
        recipe = self.batch.recipe
        while (name := next((x for x in self._open() if not self._agrees(x, recipe)), None)) is not None:
            difference = compare_field(self.batch, name, recipe)
            sources = self._sources(name)
            causes = [] if sources or len(findings) >= MAX_CAUSES else self._mending(name, recipe)
            if causes:
                advice = self._advice(name, tied=True) if len(causes) > 1 else ""
                findings.append(Finding(difference, tuple(causes), advice))
                recipe = causes[0].apply(recipe)
                continue
            self.skipped.add(name)
            if not sources and is_permuted(self.replay, name, recipe):
                text = f"{name} are the expected ones in another order: those of other rows"
                cause = Cause(self.replay.stages[name].settings[-1], "in another order", text)
                findings.append(Finding(difference, (cause,)))
            else:
                findings.append(self._unknown(difference, recipe, sources))
        # Fields that differ on other rows, or as a sum over all.
        for name in self.compared if self.sampled else ():
            difference = compare_field(self.batch, name, recipe)
            if name not in self.skipped and not difference.agrees:
                findings.append(self._unknown(difference, recipe, self._sources(name)))
        return findings

    def _sources(self, name: str) -> set[str]:
        """Returns the fields of unknown cause that a field is computed with: the loss of all rows, with all of them."""
        if name == "grad_log_probs":
            return self.skipped & {"kl", "token_loss", "loss"}
        return self.skipped if name == "loss" and self.sampled else set()

    def _unknown(self, difference: Difference, recipe: Recipe, sources: set[str]) -> Finding:
        """Returns the finding of a field of unknown cause, or of one that follows from another."""
        if sources:
            return Finding(difference, follows=next(name for name in self.fields if name in sources))
        # A description needs the numbers of all rows, unless they are too many.
        replay = self.replay if self.batch.arrays[difference.field].ndim else self.batch
        shape = describe(replay, difference.field, recipe)
        return Finding(difference, advice=self._advice(difference.field), shape=shape)

    def _open(self) -> list[str]:
        """Lists the fields whose cause is not unknown."""
        return [name for name in self.fields if name not in self.skipped]

    def _after(self, name: str) -> list[str]:
        """Lists the open fields after one, without metrics."""
        later = self.fields[self.fields.index(name) + 1 :]
        return [field for field in later if field not in self.skipped and not field.startswith(METRIC)]

    def _agrees(self, name: str, recipe: Recipe) -> bool:
        residual = self._residual((name,), recipe)
        return residual is not None and residual.agrees

    def _residual(self, names: Sequence[str], recipe: Recipe) -> Residual | None:
        """Returns the residual of some fields; None for settings that a function of the library refuses."""
        try:
            return residual_of(self.replay, names, recipe)
        except (ValueError, TypeError, MissingFields):
            if recipe == self.batch.recipe:
                raise
            return None

    def _mending(self, name: str, recipe: Recipe) -> list[Cause]:
        """Returns the causes that mend a field and explain the most others: choices before numbers."""
        stages = self.replay.stages[name].settings
        choices = [cause for cause in causes_of(self.replay, recipe) if cause.stage in stages]
        numbers = [number for number in numbers_of(self.replay, recipe) if number.stage in stages]
        self.tried += len(choices) + len(numbers)
        mending = [cause for cause in choices if self._mends(cause, name, recipe)]
        rounding = None if mending else self._rounding(name, recipe)
        if rounding is not None:
            return [rounding]
        solved = [cause for number in numbers if (cause := self._fit(number, name, recipe)) is not None]
        mending += [cause for cause in solved if self._mends(cause, name, recipe)]
        scores = [sum(self._agrees(field, cause.apply(recipe)) for field in self._open()) for cause in mending]
        best = [cause for cause, score in zip(mending, scores, strict=True) if score == max(scores)]
        return _preferred(best)[:TIES]

    def _mends(self, cause: Cause, name: str, recipe: Recipe) -> bool:
        """Whether a field and all before it agree once the cause is applied."""
        changed = cause.apply(recipe)
        # One number may be mended by chance: the arrays that depend on it have to agree as well.
        scalar = self.replay.arrays[name].size == 1
        arrays = [field for field in self._after(name) if scalar and self.replay.arrays[field].size > 1]
        if changed == recipe or not all(self._agrees(field, changed) for field in (*arrays, name)):
            return False
        before = [field for field in self.fields[: self.fields.index(name)] if field not in self.skipped]
        return (
            not self._drops(name, recipe, changed)
            and compare_field(self.replay, name, changed).determined
            and all(self._agrees(field, changed) for field in before)
        )

    def _drops(self, name: str, recipe: Recipe, changed: Recipe) -> bool:
        """Whether a change takes numbers that differ, and that no mask set to 0, out of the comparison."""
        after = self.replay.predict(name, changed).at
        recorded = self.replay.arrays[name]
        difference, bound, before = offsets(recorded, self.replay.predict(name, recipe))
        if np.array_equal(before, after):
            return False
        wrong = before & ~(np.abs(difference) <= bound)
        if all(getattr(recipe, mask) == getattr(changed, mask) for mask in ("mask_rule", "mask", "kl_mask")):
            # Rows or positions are moved, some of them to where nothing is recorded: the others show it, or those that
            # could not be compared before.
            gained = len(np.unique(recorded[after & ~before]))
            return max(int((wrong & after).sum()), gained) < DISTINCT
        nonzero = recorded != 0
        # A mask that is in the record sets all that it takes out to 0.
        if (wrong & ~after & ~nonzero).any() and (before & ~after & nonzero).any():
            return True
        dropped = wrong & ~after & nonzero
        return bool(dropped.any() and 2 * dropped.sum() >= wrong.sum())

    def _rounding(self, name: str, recipe: Recipe) -> Cause | None:
        """Returns the coarser dtype that a field was rounded to: its grid holds all the numbers of the field."""
        values = self.replay.arrays[name]
        kind = narrowest_dtype(values)
        if kind not in COARSER.get(self.batch.dtype, ()):
            return None
        if len(np.unique(values)) < DISTINCT:
            # Chance has one number on the grid once in 8,192 or 65,536 cases: it has to be that of the recipe, rounded.
            value, bound, _ = self.replay.predict(name, recipe)
            low = round_to(value - bound, kind)
            high = round_to(value + bound, kind)
            if values.size != 1 or not values.any() or not low <= values <= high:
                return None
        cause = Cause("rounding", kind, f"rounding of {kind} from {name} on", (("rounding", ((name, kind),)),))
        return cause if self._agrees(name, cause.apply(recipe)) else None

    def _fit(self, number: UnknownNumber, name: str, recipe: Recipe) -> Cause | None:
        """Solves a number from a field, or in place of a scalar from the arrays after it that depend on the number."""
        names = [name]
        later = [field for field in self._after(name) if number.stage in self.replay.stages[field].settings]
        if self.replay.arrays[name].size == 1 and later and not self._unmoved(number, later, recipe):
            names = later
        cause = self._solve(number, names, recipe)
        if cause is None or cause.limits is None or names == [name] or self._agrees(name, cause.apply(recipe)):
            return cause
        # Of the thresholds that the arrays leave open, the scalar decides.
        return self._solve(dataclasses.replace(number, grid=cause.limits), [name, *names], recipe)

    def _solve(self, number: UnknownNumber, names: Sequence[str], recipe: Recipe) -> Cause | None:
        before = self._residual(names, recipe)
        if before is None or before.agrees:
            return None
        return fit(number, self.replay, recipe, lambda changed: self._residual(names, changed), before)

    def _unmoved(self, number: UnknownNumber, names: Sequence[str], recipe: Recipe) -> bool:
        """Whether some fields do not depend on a number, as the gradient on the coefficient of a recorded entropy."""
        value = number.value_in(recipe)
        other = number.cause(recipe, 2 * value + 0.1 if value is not None else 0.1).apply(recipe)
        before, after = (self._residual(names, each) for each in (recipe, other))
        return before is not None and after is not None and np.array_equal(before.difference, after.difference)

    def _advice(self, name: str, *, tied: bool = False) -> str:
        """Names the field that would decide."""
        missing = [field for field in DECIDING.get(name, ("token_loss", "kl")) if field not in self.replay.arrays]
        if not missing:
            return "" if tied else "record logits, or hidden and head, of the row where it is largest"
        return f"record {', '.join(missing)}"


def _preferred(causes: list[Cause]) -> list[Cause]:
    """Sorts choices before numbers, which explain as much with a free value; of these, small factors remain.

    Thresholds that lie anywhere in an interval remain too: they fit as easily. Numbers of many digits are left out
    where one of few digits mends as much: chance makes no such number.
    """
    choices = [cause for cause in causes if cause.number is None]
    if choices:
        factors = [cause for cause in causes if cause.number is not None and _is_small_factor(cause)]
        return choices + factors + [cause for cause in causes if cause not in factors and cause.limits is not None]
    exact = [_digits(cause) for cause in causes if cause.limits is None]
    limit = min(exact, default=0) + SPARE_DIGITS
    return [cause for cause in causes if cause.limits is not None or _digits(cause) <= limit]


def _digits(cause: Cause) -> int:
    """Counts the significant digits of a number, or the digits of n in 1/n."""
    value = cause.number or 0.0
    inverse = 1 / value if value else 0.0
    values = (value, inverse) if abs(inverse - round(inverse)) < 1e-9 * abs(inverse) else (value,)
    return min(next((n for n in DIGITS if float(f"{x:.{n}g}") == x), DIGITS[-1] + 1) for x in values)


def _is_small_factor(cause: Cause) -> bool:
    size = max(abs(cause.number), 1 / abs(cause.number)) if cause.number else 0.0
    return cause.name.startswith("scale") and 1 < size <= 64 and size == round(size)
