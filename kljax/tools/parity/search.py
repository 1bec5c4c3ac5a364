"""Finds the causes of the differences of a dump: the smallest set of choices and numbers under which all agrees."""

from collections.abc import Iterator, Sequence

import numpy as np

from kljax.tools.parity.candidates import Candidates, Causes, Skipped, applied
from kljax.tools.parity.comparison import Finding, ParityReport, compare_field, is_determined
from kljax.tools.parity.ranking import preferred
from kljax.tools.parity.recipe import Recipe
from kljax.tools.parity.replay import Replay
from kljax.tools.parity.routes import compare_routes, route_loads, uncompared_routes
from kljax.tools.parity.shape import describe
from kljax.tools.parity.stages import reason_not_compared, recorded

# Causes of one report, groups of equally good candidates that are followed at a field, ties that are kept.
MAX_CAUSES, GROUPS, TIES = 4, 3, 12
# Candidates of a search for pairs.
CANDIDATES = 2_000
# The fields that would decide where a cause is unknown or tied.
DECIDING = {
    "mask": ("tokens",),
    "log_probs": ("hidden and head of one row",),
    "ref_log_probs": ("ref_hidden and ref_head of one row",),
    "advantages": ("kl", "rewards"),
    "token_loss": ("ratio", "weights", "advantages"),
    "loss": ("token_loss", "kl", "weights", "grad_log_probs"),
    "grad_log_probs": ("token_loss", "kl", "loss"),
    "kl": ("ref_logits or ref_hidden and ref_head of one row",),
}


class Search:
    """Finds the smallest set of causes under which every field agrees."""

    def __init__(self, replay: Replay, *, candidates: int = CANDIDATES) -> None:
        self.replay = replay
        self.candidates = Candidates(replay, candidates)

    def run(self) -> ParityReport:
        """Compares every field and explains the differing ones.

        Returns:
          The `ParityReport`, with a note if the search for pairs of causes reached its limit.
        """
        recipe = self.replay.plan.recipe
        differences = tuple(compare_field(self.replay, name, recipe) for name in self.candidates.fields)
        # A candidate may divide by 0 or overflow; it then does not agree.
        with np.errstate(all="ignore"):
            findings = self._explain(recipe)
        missing = [name for name in recorded(self.replay) if name not in self.candidates.fields]
        reasons = tuple((name, reason_not_compared(self.replay, name) or "") for name in missing)
        reasons += uncompared_routes(self.replay.dump)
        unknown = any(not finding.explanations for finding in findings)
        notes = (*self.replay.notes, *self._undetermined(recipe), *self.candidates.notes(unknown))
        # The experts decide log-probs, and nothing that is replayed decides them.
        routes, of_routes, flips = compare_routes(self.replay.dump) or (None, None, ())
        differences = differences if routes is None else (routes, *differences)
        findings = findings if of_routes is None else [of_routes, *findings]
        return ParityReport(
            differences, tuple(findings), reasons, self.replay.dtype, (*notes, *flips, *route_loads(self.replay.dump))
        )

    def _undetermined(self, recipe: Recipe) -> Iterator[str]:
        """Yields a remark for each field that agrees only because rounding may make its numbers as large."""
        for name in self.candidates.fields:
            if self.candidates.agrees(name, recipe) and not is_determined(self.replay, name, recipe):
                yield f"{name}: undetermined by rounding, whose bounds are as large as the recorded numbers"

    def _explain(self, recipe: Recipe) -> list[Finding]:
        """Returns the smallest explanation of everything, or else of each field in turn as far as it goes."""
        complete = self._solve(recipe, MAX_CAUSES)
        if complete is not None:
            return complete
        findings: list[Finding] = []
        skipped: Skipped = frozenset()
        while (first := self._first(recipe, skipped)) is not None:
            difference = compare_field(self.replay, first, recipe)
            source = next((name for name in skipped if _follows(first, name)), "")
            candidates = [] if source else self.candidates.mending(first, recipe, skipped)
            if candidates:
                ties = self._ranked(candidates, recipe, skipped)[0]
                advice = self._advice(first, tied=True) if len(ties) > 1 else ""
                findings.append(Finding(difference, tuple(ties), advice))
                recipe = applied(ties[0], recipe)
                continue
            skipped |= {first}
            advice = "" if source else self._advice(first)
            shape = "" if source else describe(self.replay, first, recipe)
            findings.append(Finding(difference, advice=advice, follows=source, shape=shape))
            if first == "ratio":
                recipe = recipe.changed("ratio", recorded=True)
        return findings

    def _solve(self, recipe: Recipe, budget: int) -> list[Finding] | None:
        """Returns findings under which every field agrees, of at most so many causes, or None."""
        none: Skipped = frozenset()
        first = self._first(recipe, none)
        if first is None:
            return []
        difference = compare_field(self.replay, first, recipe)
        singles = self.candidates.singles(first, recipe, none) if budget >= 1 else []
        for ties in self._ranked(singles, recipe, none)[:GROUPS]:
            rest = self._solve(applied(ties[0], recipe), budget - 1)
            if rest is not None:
                advice = self._advice(first, tied=True) if len(ties) > 1 else ""
                return [Finding(difference, tuple(ties), advice), *rest]
        # One number may be mended by chance; an array is not, so that what mends it holds.
        if budget < 2 or (singles and self.replay.arrays[first].size > 1):
            return None
        for ties in self._ranked(self.candidates.pairs(first, recipe, none), recipe, none)[:GROUPS]:
            rest = self._solve(applied(ties[0], recipe), budget - 2)
            if rest is not None:
                advice = self._advice(first, tied=True) if len(ties) > 1 else ""
                return [Finding(difference, tuple(ties), advice), *rest]
        return None

    def _first(self, recipe: Recipe, skipped: Skipped) -> str | None:
        """Returns the first field that does not agree."""
        return next((name for name in self.candidates.open(skipped) if not self.candidates.agrees(name, recipe)), None)

    def _ranked(self, candidates: Sequence[Causes], recipe: Recipe, skipped: Skipped) -> list[list[Causes]]:
        """Groups candidates by how many fields agree with them, the most first; choices come before numbers."""
        groups: dict[int, list[Causes]] = {}
        for candidate in candidates:
            changed = applied(candidate, recipe)
            score = sum(self.candidates.agrees(name, changed) for name in self.candidates.open(skipped))
            groups.setdefault(score, []).append(candidate)
        return [preferred(groups[score])[:TIES] for score in sorted(groups, reverse=True)]

    def _advice(self, name: str, *, tied: bool = False) -> str:
        """Names the field that would decide."""
        missing = [field for field in DECIDING.get(name, ("token_loss", "kl")) if field not in self.replay.arrays]
        if not missing:
            return "" if tied else "record logits, or hidden and head, of the row where it is largest"
        return f"record {', '.join(missing)}"


def _follows(name: str, earlier: str) -> bool:
    """Whether a field is recomputed from functions whose own result differs for an unknown reason."""
    return name == "grad_log_probs" and earlier in ("kl", "token_loss", "loss")
