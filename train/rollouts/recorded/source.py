"""A source that reads recorded completions instead of sampling."""

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import grain
import numpy as np

import kljax
from train.config.errors import UserError
from train.config.plan import Layout
from train.config.rollout import FileSourceSection, RolloutSection
from train.config.types import RECORDING
from train.context import RunContext
from train.data.tasks.rewards import check_names, warn_of_unweighted
from train.rollouts.lag import reads_lags
from train.rollouts.recorded.files import RowFile, RowPosition, open_files
from train.rollouts.recorded.record import RecordedRow, find_parent, parse_row
from train.rollouts.source import Completions, InTurn, Request, SourceError
from train.sequences.token_fields import TOKEN_FIELDS, VERSIONS, recorded_names
from train.weights.model import trained_pad, warn_of_pad

_LOG = logging.getLogger(__name__)
Group = tuple[RowPosition, ...]


@dataclasses.dataclass
class _Scan:
    """Result of the first pass.

    Attributes:
      groups: the groups that fit.
      too_long: the number of longer groups.
      longest: tokens of the longest prompt and of the longest completion.
      sizes: the per-token fields of the rows, with the sizes of their trailing axes, the longest of a ragged one; None
        before the first row.
      rewards: the names of the rewards in the rows.
      rows: the number of all rows.
      padded: the number of rows with the token of `trained_pad`.
      episodes: whether a row is no episode of its own.
    """

    groups: list[Group] = dataclasses.field(default_factory=list)
    too_long: int = 0
    longest: tuple[int, int] = (0, 0)
    sizes: dict[str, tuple[int, ...]] | None = None
    rewards: frozenset[str] | None = None
    rows: int = 0
    padded: int = 0
    episodes: bool = False


def _merge_sizes(before: dict[str, tuple[int, ...]] | None, fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the sizes of the rows before and of one more; raises ValueError if it has other fields or other sizes."""
    sizes = {name: cast(tuple[int, ...], TOKEN_FIELDS[name].sizes(values)) for name, values in fields.items()}
    if before is None:
        return sizes
    for key, name in recorded_names().items():
        if (name in sizes) != (name in before):
            raise ValueError(f"{key}: {'given' if name in sizes else 'missing'}, but not in the rows before")
        size = before.get(name, ())
        # An empty completion has no sizes.
        if fields.get(name) and any(size) and size != sizes[name] and not TOKEN_FIELDS[name].ragged:
            raise ValueError(f"{key}: got values of {list(sizes[name])}, but the rows before have {list(size)}")
        if name in before:
            sizes[name] = tuple(map(max, size, sizes[name]))
    return sizes


def _check_episode(row: RecordedRow, number: int, section: RolloutSection) -> None:
    """Raises ValueError if the config has no place for a row that is no episode itself.

    Args:
      row: the row.
      number: rows of its group before it.
      section: of the config.
    """
    if row.group_size not in (None, section.samples_per_prompt):
        raise ValueError(
            f"episode: got a group of {row.group_size}, but rollout.samples_per_prompt is {section.samples_per_prompt}"
        )
    if row.episode not in (None, -1, number % section.samples_per_prompt) and section.fork_rows == 0:
        raise ValueError("episode: got a fork of another row; set rollout.fork_rows as in the run that recorded it")


class FileSource(InTurn):
    """Groups of recorded completions, in file order or shuffled by the seed; a pure function of the step.

    Step `s` has the groups at indices `s * prompts_per_step + 0, 1, ...` of endless epochs, each a new permutation if
    shuffled, so a resumed run continues with the next row.

    Attributes:
      row_count: number of rows in the groups that fit.
    """

    def __init__(self, context: RunContext, section: FileSourceSection) -> None:
        """Reads and checks every row once.

        Raises:
          UserError: a row is malformed (names file, line and field), no group fits, or the rows have no log-probs and
            the objective needs them.
        """
        super().__init__()
        self._context = context
        self._path = Path(section.path)
        self._files = open_files(self._path)
        scan = self._scan()
        self._check(scan)
        self.groups = scan.groups
        self.too_long = scan.too_long
        self._has_episodes = scan.episodes
        self._sizes = dict(scan.sizes or {})
        if section.shuffle:
            # They count the steps of the run that recorded them, which the order of the file alone repeats.
            self._sizes.pop(VERSIONS, None)
        order = grain.MapDataset.source(range(len(scan.groups))).seed(context.config.seed)
        self._order = (order.shuffle() if section.shuffle else order).repeat()

        self.row_count = len(scan.groups) * context.config.rollout.samples_per_prompt

    def update(self, policy: kljax.Policy, version: int) -> None:
        """No-op: recorded completions do not depend on the weights."""

    def sample(self, request: Request) -> Completions:
        """Reads the groups of a step; ignores the prompts of the request."""
        count = request.rows.count // request.samples
        numbers = [self._order[index] for index in range(request.step * count, (request.step + 1) * count)]
        positions = [position for number in numbers for position in self.groups[number]]
        rows = [self._read(positions[row]) for row in request.rows.held]
        judged = request.rows.select_own(np.arange(len(rows)))
        recorded = np.array(numbers)[:, None] * request.samples + np.arange(request.samples)
        return Completions.of(
            rows,
            [rows[number].example for number in judged],
            self._sizes,
            length=self._context.config.data.row_length(),
            pad_id=self._context.tokenizer.pad_id,
            judged=judged,
            recorded_rows=recorded.reshape(-1),
            episode_rows=self._episode_rows(rows, request) if self._has_episodes else None,
        )

    def _episode_rows(self, rows: list[RecordedRow], request: Request) -> np.ndarray:
        """Returns the row of the episode of each row that this process holds."""
        numbers = request.rows.held
        own = [
            number
            if row.episode is None
            else -1
            if row.episode < 0
            else number - number % request.samples + row.episode
            for number, row in zip(numbers.tolist(), rows, strict=True)
        ]
        return np.array(own, np.int32)

    def close(self) -> None:
        """No-op."""

    def _read(self, position: RowPosition) -> RecordedRow:
        """Reads a row behind all rows that it continues, the first of them first."""
        file = self._files[position.file]
        chain = [position]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        parent = None
        try:
            for each in reversed(chain[1:]):
                parent = parse_row(self._files[each.file].read(each.offset), self._context, parent)
            return parse_row(file.read(position.offset), self._context, parent)
        except (OSError, ValueError) as error:
            raise SourceError(
                f"rollout.source.path: {file.path}, line {position.line}: changed since the start of the run ({error})"
            ) from error

    def _scan(self) -> _Scan:
        scan = _Scan()
        samples = self._context.config.rollout.samples_per_prompt
        data = self._context.config.data
        # Sequences of an episode may begin with other prompts, where each row has its own.
        shared = Layout.of(self._context.config).group > 1

        def key(pair: tuple[RowPosition, RecordedRow]) -> tuple[Any, list[int] | None]:
            return pair[1].group, pair[1].prompt_ids if shared else None

        for index, file in enumerate(self._files):
            for _, group in itertools.groupby(self._checked_rows(index, file, scan), key=key):
                pairs = list(group)
                if len(pairs) % samples:
                    last = pairs[-1][0].line
                    raise UserError(
                        f"rollout.source.path: {file.path}, line {last}: ends a group of {len(pairs)} completions of "
                        f"one prompt, expected a multiple of rollout.samples_per_prompt = {samples}"
                    )
                fits = all(
                    len(row.prompt_ids) <= data.max_prompt_length
                    and len(row.completion_ids) <= data.max_completion_length
                    and len(row.ids) <= data.row_length()
                    for _, row in pairs
                )
                positions = [position for position, _ in pairs]
                groups = [tuple(positions[start : start + samples]) for start in range(0, len(positions), samples)]
                scan.groups += groups if fits else []
                scan.too_long += 0 if fits else len(groups)
        return scan

    def _checked_rows(self, index: int, file: RowFile, scan: _Scan) -> Iterator[tuple[RowPosition, RecordedRow]]:
        """Yields the rows of a file, and checks that all rows have the same optional fields."""
        pad = trained_pad(self._context.config)
        group: Any = None
        # Those of the group before a row, which it may continue.
        earlier: list[tuple[RowPosition, RecordedRow]] = []
        for offset, line, record in file:
            try:
                if record.get("group") not in (None, group):
                    earlier = []
                number = find_parent(record, len(earlier))
                parent, parent_row = (None, None) if number is None else earlier[number]
                row = parse_row(record, self._context, parent_row)
                if row.group != group:
                    earlier = []
                names = frozenset(row.rewards or ())
                scan.sizes = _merge_sizes(scan.sizes, row.fields)
                _check_episode(row, len(earlier), self._context.config.rollout)
                if scan.rewards not in (None, names):
                    raise ValueError(
                        f"rewards: got {', '.join(sorted(names)) or 'none'}, but the rows before have "
                        f"{', '.join(sorted(scan.rewards or ())) or 'none'}"
                    )
            except (ValueError, UserError) as error:
                raise UserError(f"rollout.source.path: {file.path}, line {line}: {error}") from error
            group = row.group
            position = RowPosition(index, offset, line, parent)
            earlier.append((position, row))
            scan.rewards = names
            scan.rows += 1
            scan.episodes |= row.episode is not None
            scan.padded += pad in row.prompt_ids or pad in row.completion_ids
            lengths = len(row.prompt_ids), len(row.completion_ids)
            scan.longest = max(scan.longest[0], lengths[0]), max(scan.longest[1], lengths[1])
            yield position, row

    def _check(self, scan: _Scan) -> None:
        config = self._context.config
        data = self._context.config.data
        limits = (
            f"data.max_prompt_length = {data.max_prompt_length}, "
            f"data.max_completion_length = {data.max_completion_length}"
            + ("" if data.max_tokens is None else f", data.max_tokens = {data.max_tokens}")
        )
        longest = f"the longest prompt has {scan.longest[0]} tokens, the longest completion {scan.longest[1]}"
        if not scan.groups:
            raise UserError(
                f"rollout.source.path: {self._path} has no group of completions that fits; {scan.too_long} are longer "
                f"than {limits}; {longest}"
            )
        if scan.too_long:
            total = scan.too_long + len(scan.groups)
            text = "%d of %d groups are longer than %s and are left out; %s"
            _LOG.warning(text, scan.too_long, total, limits, longest)
        warn_of_pad(trained_pad(config), scan.padded, scan.rows, "recorded rows")
        if scan.rewards:
            check_names(config.rewards.weights, tuple(scan.rewards))
            # Every row has a total, which weights replace.
            warn_of_unweighted(config.rewards.weights, tuple(scan.rewards - {"reward"}))
        elif config.task == RECORDING:
            raise UserError(f"rollout.source.path: the rows of {self._path} have no rewards; add them, or set a task")
        if "rollout_log_probs" not in (scan.sizes or {}) and self._context.plan.rollout_log_probs:
            raise UserError(
                f"rollout.source.path: {self._path} has no log_probs, which this config needs (kl.rollout, "
                "correction, or a ratio to the policy that sampled)"
            )
        if VERSIONS not in (scan.sizes or {}) and reads_lags(self._context.plan):
            raise UserError(
                f"rollout.source.path: {self._path} has no {VERSIONS}, the policy versions whose lag this config reads "
                "(correction); record them, or remove the entry"
            )
