"""The source whose completions were recorded: nothing is sampled."""

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np

import kljax
from train.config.errors import UserError
from train.config.rollout import FileSource as Section
from train.rl.objective import required_fields
from train.rollouts.context import RunContext
from train.rollouts.layout import lay_out
from train.rollouts.recorded.record import Recorded, read_record
from train.rollouts.recorded.rows import Place, Rows, open_rows
from train.rollouts.source import Completions, Request

_LOG = logging.getLogger(__name__)
Group = tuple[Place, ...]


@dataclasses.dataclass
class _Found:
    """What a first pass over the files finds: whole groups, how many are too long, and what the rows hold."""

    groups: list[Group] = dataclasses.field(default_factory=list)
    too_long: int = 0
    log_probs: bool | None = None
    rewards: frozenset[str] | None = None


def _prompt_of(pair: tuple[Place, Recorded]) -> tuple[Any, list[int]]:
    """What the completions of a group share; the ids too, as only the first row's go through the model."""
    return pair[1].group, pair[1].prompt_ids


class FileSource:
    """Groups of completions in an order that the seed decides, or the file; a pure function of the step.

    A resumed run reads on at the very row where it stopped: step `s` holds places `s * prompts_per_step + 0, 1, ...` of
    endless epochs, each another permutation of the groups.
    """

    def __init__(self, context: RunContext, section: Section) -> None:
        """Reads every row once.

        Raises:
          UserError: a row is not as it must be, naming file, line and field; no group fits; the rows lack what the
            objective needs.
        """
        self._context, self._path = context, Path(section.path)
        self._rows = open_rows(self._path)
        found = self._scan()
        self._check(found)
        self.groups, self.too_long = found.groups, found.too_long
        order = grain.MapDataset.source(range(len(found.groups))).seed(context.config.seed)
        self._order = (order.shuffle() if section.shuffle else order).repeat()

    def update(self, policy: kljax.Policy, step: int) -> None:
        """The weights change nothing."""

    def sample(self, request: Request) -> Completions:
        """The groups of a step; the prompts of the request are those of the task, and not used."""
        count = len(request.examples)
        places = range(request.step * count, (request.step + 1) * count)
        return self._completions([self._read(place) for group in places for place in self.groups[self._order[group]]])

    def close(self) -> None:
        """Holds nothing."""

    def _completions(self, rows: list[Recorded]) -> Completions:
        data = self._context.config.data
        recorded = [row.log_probs for row in rows if row.log_probs is not None]
        judged = [row.rewards for row in rows if row.rewards is not None]
        return Completions(
            examples=[row.example for row in rows],
            **lay_out(
                [row.prompt_ids for row in rows],
                [row.completion_ids for row in rows],
                recorded or None,
                lengths=(data.max_prompt_length, data.max_completion_length),
                pad_id=self._context.tokenizer.pad_id,
            ),
            finished=np.array([row.finished for row in rows], bool),
            texts=[row.text for row in rows],
            rewards={name: np.array([each[name] for each in judged], np.float32) for name in judged[0]}
            if judged
            else None,
        )

    def _read(self, place: Place) -> Recorded:
        return read_record(self._rows[place.file].read(place.at), self._context)

    def _scan(self) -> _Found:
        found, samples = _Found(), self._context.config.rollout.samples_per_prompt
        data = self._context.config.data
        for file, rows in enumerate(self._rows):
            for _, group in itertools.groupby(self._checked(file, rows, found), key=_prompt_of):
                pairs = list(group)
                if len(pairs) % samples:
                    last = pairs[-1][0].line
                    raise UserError(
                        f"rollout.source.path: {rows.path}, line {last}: ends a group of {len(pairs)} completions of "
                        f"one prompt, expected a multiple of rollout.samples_per_prompt = {samples}"
                    )
                fits = all(
                    len(row.prompt_ids) <= data.max_prompt_length
                    and len(row.completion_ids) <= data.max_completion_length
                    for _, row in pairs
                )
                places = [place for place, _ in pairs]
                cut = [tuple(places[start : start + samples]) for start in range(0, len(places), samples)]
                found.groups += cut if fits else []
                found.too_long += 0 if fits else len(cut)
        return found

    def _checked(self, file: int, rows: Rows, found: _Found) -> Iterator[tuple[Place, Recorded]]:
        """Every row of a file, as long as all of them hold the same things."""
        for at, line, record in rows:
            try:
                row = read_record(record, self._context)
                has, names = row.log_probs is not None, frozenset(row.rewards or ())
                if found.log_probs not in (None, has):
                    raise ValueError(f"log_probs: {'given' if has else 'missing'}, but not in the rows before")
                if found.rewards not in (None, names):
                    raise ValueError(
                        f"rewards: got {', '.join(sorted(names)) or 'none'}, but the rows before have "
                        f"{', '.join(sorted(found.rewards or ())) or 'none'}"
                    )
            except ValueError as error:
                raise UserError(f"rollout.source.path: {rows.path}, line {line}: {error}") from error
            found.log_probs, found.rewards = has, names
            yield Place(file, at, line), row

    def _check(self, found: _Found) -> None:
        data = self._context.config.data
        limits = (
            f"data.max_prompt_length = {data.max_prompt_length}, "
            f"data.max_completion_length = {data.max_completion_length}"
        )
        if not found.groups:
            raise UserError(
                f"rollout.source.path: {self._path} has no group of completions that fits; {found.too_long} are longer "
                f"than {limits}"
            )
        if found.too_long:
            total = found.too_long + len(found.groups)
            _LOG.warning("%d of %d groups are longer than %s and are left out", found.too_long, total, limits)
        if not found.log_probs and "rollout_log_probs" in required_fields(self._context.config):
            raise UserError(
                f"rollout.source.path: {self._path} has no log_probs, which this config needs (kl.rollout, or a ratio "
                "to the policy that sampled)"
            )
