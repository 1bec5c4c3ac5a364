"""Failures of episodes: the first of a step is shown, and a step with too many of them ends the run."""

import collections
from collections.abc import Sequence

from train.config.errors import warn
from train.distributed.exchange import exchange_json
from train.process.repeated_warnings import Warnings
from train.rollouts.episodes.turns import Episode
from train.rollouts.source import Request, SourceError


class FailureWatch:
    """Warns of episodes that failed, each kind at most once in 50 steps, and ends a run with too many of them."""

    def __init__(self, most: float, field: str) -> None:
        """Watches the episodes of a source.

        Args:
          most: share of the episodes of a step that may fail.
          field: of the config, with this share.
        """
        self._most = most
        self._field = field
        self._kinds: dict[tuple[str, bool], Warnings] = {}

    def check(self, episodes: Sequence[Episode], request: Request) -> None:
        """Shows the first failure of the episodes of a request, unless failures of its name were shown of late.

        All processes call it, each with its own episodes.

        Raises:
          SourceError: more failed than may, or all episodes of a step, which has nothing to train on then.
        """
        failed = [episode.failure for episode in episodes if episode.failure is not None]
        parts = exchange_json(self._field, [len(episodes), failed])
        total = sum(count for count, _ in parts)
        failures = [(name, text) for _, part in parts for name, text in part]
        if not failures:
            return
        held_out = request.first_row is not None
        counts = collections.Counter(name for name, _ in failures)
        listed = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        name, text = failures[0]
        told = (
            f"{len(failures)} of {total} {'held-out ' * held_out}episodes failed ({listed}); the first: "
            f"{_printable(text)}"
        )
        if len(failures) > self._most * total:
            raise SourceError(f"{self._field}: got {self._most:g}, but {told}")
        if len(failures) == total and not held_out:
            raise SourceError(f"{self._field}: got {self._most:g}, but nothing is left to train on: {told}")
        step = request.step + (not held_out)
        shown, before = self._kinds.setdefault((name, held_out), Warnings()).count(step, len(failures) / total)
        if shown:
            more = f"\nSo did episodes of {before} batches since the last such warning" if before else ""
            warn(f"step {step}: {told}{more}")


def _printable(text: str) -> str:
    """Returns a text of another program without characters that a terminal obeys; lines stay lines."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
