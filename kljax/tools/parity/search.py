"""Names the cause of each difference of a dump: the one choice or number under which its field agrees."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from kljax.tools.parity.causes import Cause
from kljax.tools.parity.choices import causes_of
from kljax.tools.parity.comparison import (
    Difference,
    Finding,
    ParityReport,
    Residual,
    compare_field,
    describe,
    is_permuted,
    residual_of,
)
from kljax.tools.parity.fields import ORDER
from kljax.tools.parity.invariants import invariants_of
from kljax.tools.parity.numbers import DIGITS, UnknownNumber, fit, note_on_factor, numbers_of
from kljax.tools.parity.positions import over_tokens
from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import MissingFields, Replay
from kljax.tools.parity.rounding import narrowest_dtype, round_to
from kljax.tools.parity.routes import compare_routes, route_loads, uncompared_routes
from kljax.tools.parity.stages import comparable, count_stages, reason_not_compared, recorded

# Causes of one report, and ties that are kept.
MAX_CAUSES, TIES = 4, 8
# Positions of a batch up to which causes are tried on all rows; of a larger one, on a sample of rows.
SMALL = 1 << 14
SAMPLE = 8
# Numbers that show a dtype by their grid, or other rows and positions by their agreement.
DISTINCT = 4
# Digits that a number may have more than the simplest that mends as much.
SPARE_DIGITS = 2
# The stages of the recipe that are masks.
MASKS = ("mask_rule", "mask", "kl_mask")
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
    recipe = batch.plan.recipe
    fields = comparable(batch)
    differences = [compare_field(batch, name, recipe) for name in fields]
    judged = [*invariants_of(batch)]
    search = Search(batch, sample_of(batch, differences))
    # A candidate may divide by 0 or overflow; it then does not agree.
    with np.errstate(all="ignore"):
        findings = search.explain() if any(not difference.agrees for difference in differences) else []
    missing = [name for name in recorded(batch) if name not in fields]
    reasons = {name: reason_not_compared(batch, name) or "" for name in missing}
    names = {difference.field for difference in differences if difference.compared}
    names |= {name for name, invariant in judged if invariant.holds is not None and name != "mask"}
    hidden = "undetermined by rounding, whose bounds are as large as the recorded numbers"
    notes = [*search.notes(), *(f"{x.field}: {hidden}" for x in differences if x.agrees and not x.determined)]
    # The experts decide log-probs, and nothing that is replayed decides them.
    routes, of_routes, flips = compare_routes(batch.dump) or (None, None, ())
    return ParityReport(
        (*(() if routes is None else (routes,)), *differences),
        (*(() if of_routes is None else (of_routes,)), *findings),
        (*reasons.items(), *uncompared_routes(batch.dump)),
        batch.dtype,
        count_stages(batch, names, reasons),
        tuple(invariant for _, invariant in judged),
        (*notes, *flips, *route_loads(batch.dump)),
    )


def sample_of(batch: Replay, differences: Sequence[Difference]) -> np.ndarray:
    """Selects the rows that causes are tried on: of a large batch, rows that differ in each field, and others.

    Returns `[R]` numbers of rows, in order; all rows of a small batch.
    """
    if math.prod(batch.shape) <= SMALL:
        return batch.rows
    lengths = batch.arrays["mask"].sum(1)
    chosen: list[int] = []
    # Rows with both signs of the advantage, of several lengths, with the logits.
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
      whole: the replay of all rows.
      replay: that of the rows on which causes are tried.
      fields: the fields that are compared there.
    """

    def __init__(self, batch: Replay, rows: np.ndarray) -> None:
        self.batch = batch
        self.replay = batch.part(rows)
        self.sampled = self.replay is not batch
        # A scalar is of all rows.
        self.fields = [name for name in comparable(batch) if np.ndim(batch.arrays[name]) or not self.sampled]
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
        recipe = self.batch.plan.recipe
        skipped = set[str]()
        while (first := self._first(recipe, skipped)) is not None:
            difference = compare_field(self.batch, first, recipe)
            source = next((name for name in skipped if _follows(first, name)), "")
            candidates = [] if source or len(findings) >= MAX_CAUSES else self._mending(first, recipe, skipped)
            if candidates:
                advice = self._advice(first, tied=True) if len(candidates) > 1 else ""
                findings.append(Finding(difference, tuple(candidates), advice))
                recipe = candidates[0].apply(recipe)
                continue
            skipped.add(first)
            if not source and is_permuted(self.replay, first, recipe):
                text = f"{first} are the expected ones in another order: those of other rows"
                findings.append(Finding(difference, (Cause(ORDER[first][-1], "in another order", text),)))
                continue
            shape = "" if source else describe(self._shown(first), first, recipe)
            advice = "" if source else self._advice(first)
            findings.append(Finding(difference, advice=advice, follows=source, shape=shape))
        if self.sampled:
            findings += self._elsewhere(recipe, skipped)
        return findings

    def _shown(self, name: str) -> Replay:
        """Returns the replay whose numbers describe a field: of all rows, unless they are too many."""
        return self.replay if np.ndim(self.batch.arrays[name]) else self.batch

    def _elsewhere(self, recipe: Recipe, skipped: set[str]) -> Iterator[Finding]:
        """Yields the fields that differ on other rows, or as a sum over all, once the causes are applied."""
        for name in (name for name in comparable(self.batch) if name not in skipped):
            difference = compare_field(self.batch, name, recipe)
            if not difference.agrees:
                source = next((field for field in skipped if name == "loss" or _follows(name, field)), "")
                shape = "" if source else describe(self._shown(name), name, recipe)
                advice = "" if source else self._advice(name)
                yield Finding(difference, follows=source, shape=shape, advice=advice)

    def _first(self, recipe: Recipe, skipped: set[str]) -> str | None:
        """Returns the first field that does not agree."""
        return next((name for name in self.fields if name not in skipped and not self._agrees(name, recipe)), None)

    def _agrees(self, name: str, recipe: Recipe) -> bool:
        """Whether a field agrees under a recipe; settings that a function of the library refuses do not."""
        residual = self._residual((name,), recipe)
        return residual is not None and residual.agrees

    def _residual(self, names: Sequence[str], recipe: Recipe) -> Residual | None:
        try:
            return residual_of(self.replay, names, recipe)
        except (ValueError, TypeError, MissingFields):
            if recipe == self.batch.plan.recipe:
                raise
            return None

    def _mending(self, name: str, recipe: Recipe, skipped: set[str]) -> list[Cause]:
        """Returns the causes that mend a field and explain the most others: choices before numbers."""
        stages = ORDER.get(name, ORDER["loss"])
        choices = [cause for cause in causes_of(self.replay, recipe) if cause.stage in stages]
        numbers = [number for number in numbers_of(self.replay, recipe) if number.stage in stages]
        self.tried += len(choices) + len(numbers)
        mending = [cause for cause in choices if self._mends(cause, name, recipe, skipped)]
        mending += self._roundings(name, recipe) if not mending else []
        if not any(cause.stage == "rounding" for cause in mending):
            solved = [cause for number in numbers if (cause := self._fit(number, name, recipe, skipped)) is not None]
            mending += [cause for cause in solved if self._mends(cause, name, recipe, skipped)]
        open_fields = [field for field in self.fields if field not in skipped]
        scores = [sum(self._agrees(field, cause.apply(recipe)) for field in open_fields) for cause in mending]
        best = [cause for cause, score in zip(mending, scores, strict=True) if score == max(scores)]
        return _preferred(best)[:TIES]

    def _after(self, name: str, skipped: set[str]) -> list[str]:
        """Lists the fields after one, without metrics."""
        order = list(ORDER)
        position = order.index(name) if name in ORDER else len(order)
        open_fields = [field for field in self.fields if field not in skipped and field in ORDER]
        return [field for field in open_fields if order.index(field) > position]

    def _mends(self, cause: Cause, name: str, recipe: Recipe, skipped: set[str]) -> bool:
        """Whether a field and all before it agree once the cause is applied."""
        changed = cause.apply(recipe)
        # One number may be mended by chance: the arrays that depend on it have to agree as well.
        scalar = self.replay.arrays[name].size == 1
        arrays = [x for x in self._after(name, skipped) if scalar and self.replay.arrays[x].size > 1]
        if changed == recipe or not all(self._agrees(field, changed) for field in (*arrays, name)):
            return False
        before = self.fields[: self.fields.index(name)]
        return (
            not self._drops(name, recipe, changed)
            and compare_field(self.replay, name, changed).determined
            and all(self._agrees(field, changed) for field in before if field not in skipped)
        )

    def _drops(self, name: str, recipe: Recipe, changed: Recipe) -> bool:
        """Whether a change takes numbers that differ, and that no mask set to 0, out of the comparison."""
        before, after = (self.replay.predict(name, each).at for each in (recipe, changed))
        if np.array_equal(before, after):
            return False
        recorded = np.asarray(self.replay.arrays[name], np.float64)
        prediction = self.replay.predict(name, recipe)
        nonzero = recorded != 0
        wrong = before & ~(np.abs(recorded - prediction.value) <= prediction.bound)
        if all(getattr(recipe, stage) == getattr(changed, stage) for stage in MASKS):
            # Rows or positions are moved, some of them to where nothing is recorded: the others show it, or those that
            # could not be compared before.
            gained = len(np.unique(recorded[after & ~before]))
            return max(int((wrong & after).sum()), gained) < DISTINCT
        # A mask that is in the record sets all that it takes out to 0.
        if (wrong & ~after & ~nonzero).any() and (before & ~after & nonzero).any():
            return True
        dropped = wrong & ~after & nonzero
        return bool(dropped.any() and 2 * dropped.sum() >= wrong.sum())

    def _roundings(self, name: str, recipe: Recipe) -> list[Cause]:
        """Returns the coarser dtype that a field was rounded to: its grid holds all the numbers of the field."""
        values = self.replay.arrays[name]
        kind = narrowest_dtype(values)
        if kind not in COARSER.get(self.batch.dtype, ()):
            return []
        if len(np.unique(values)) < DISTINCT and not self._is_rounded(name, kind, recipe):
            return []
        cause = Cause("rounding", kind, f"rounding of {kind} from {name} on", ((name, kind),))
        return [cause] if self._agrees(name, cause.apply(recipe)) else []

    def _is_rounded(self, name: str, kind: str, recipe: Recipe) -> bool:
        """Whether one number is that of a recipe, rounded: chance has it on the grid once in 8,192 or 65,536 cases."""
        recorded = np.asarray(self.replay.arrays[name], np.float64)
        prediction = self.replay.predict(name, recipe)
        if recorded.size != 1 or not recorded.any():
            return False
        low, high = (round_to(prediction.value + side * prediction.bound, kind) for side in (-1, 1))
        return bool(((low <= recorded) & (recorded <= high)).all())

    def _fit(self, number: UnknownNumber, name: str, recipe: Recipe, skipped: set[str]) -> Cause | None:
        """Solves a number from a field, or in place of a scalar from the arrays after it that depend on the number."""
        names = [name]
        later = [field for field in self._after(name, skipped) if number.stage in ORDER[field]]
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

        def evaluate(value: float) -> Residual | None:
            return self._residual(names, number.cause(recipe, value).apply(recipe))

        return fit(number, recipe, evaluate, before, lambda value: note_on_factor(self.replay, number, value))

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


def _follows(name: str, earlier: str) -> bool:
    """Whether a field is recomputed from functions whose own result differs for an unknown reason."""
    return name == "grad_log_probs" and earlier in ("kl", "token_loss", "loss")
