"""Recorded rollouts, from the Parquet files of a run or from a token export of prime-rl."""

import dataclasses
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.config.errors import UserError
from train.config.json_text import parse_json
from train.config.regular_file import read_regular
from train.config.storage import is_address
from train.rollouts.recording_format import check_table
from train.sequences.sample import Failure

IDS = ("prompt_ids", "completion_ids", "token_texts", "completion_mask")
PRIME_RL_SCHEMA = 1
PRIME_RL_NAMES = {"trainer_logprobs": "policy_log_probs", "inference_logprobs": "log_probs"}
"""Columns of the export that have a name here; the others keep theirs."""


@dataclasses.dataclass(frozen=True)
class RecordedRollout:
    """A rollout with the values of its tokens.

    Attributes:
      step, row, group, policy_version: of the recording; None if it does not say.
      reward, rewards, finished: the scalar reward, rewards by name, whether the completion ended by itself.
      prompt, answer: of the example.
      completion: text of the sampled tokens, without EOS where the recording knows it.
      ids: prompt and completion.
      token_texts: a text for each id.
      prompt_length: number of ids that were not sampled.
      sampled: for each token after the prompt whether it was sampled, and is no observation; None: all were.
      episode: the row of the episode that it forked from, -1 for none; None: it is one itself.
      failure: of its episode; None if nothing failed, or the recording does not say.
      columns: numbers of each token after the prompt, [n] float32.
      others: values of each token that are no single number, as lists.
    """

    step: int
    row: int
    group: int | None
    policy_version: int | None
    reward: float | None
    rewards: Mapping[str, float]
    finished: bool | None
    prompt: str
    answer: str
    completion: str
    ids: Sequence[int]
    token_texts: Sequence[str]
    prompt_length: int
    columns: Mapping[str, np.ndarray]
    others: Mapping[str, Sequence[Any]]
    sampled: Sequence[bool] | None = None
    episode: int | None = None
    failure: Failure | None = None

    @property
    def length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.ids) - self.prompt_length


@dataclasses.dataclass(frozen=True)
class RolloutSample:
    """Rollouts, and notes about what could not be read or was left out."""

    rollouts: Sequence[RecordedRollout]
    notes: Sequence[str]


def read_parquet(directory: Path, limit: int) -> RolloutSample:
    """Reads at most about `limit` rollouts of a run, evenly over its steps; files that are damaged are noted.

    A run that is going may write or delete files meanwhile.
    """
    from pyarrow import ArrowException, parquet

    files = sorted(path for path in directory.glob("*.parquet") if path.stem.isdigit())

    def read(path: Path) -> list[RecordedRollout]:
        try:
            _check_regular(path)
            content = io.BytesIO(path.read_bytes()) if is_address(path) else path
            file = parquet.ParquetFile(content, page_checksum_verification=True)
            check_table(file.schema_arrow.metadata)
            return list(_from_table(file.read()))
        except KeyError as error:
            raise _Damaged(f"it has no column {error}") from error
        except (ArrowException, OSError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise _Damaged(str(error).partition("\n")[0]) from error

    return _sample(files, read, limit)


def read_prime_rl(path: Path, limit: int) -> RolloutSample:
    """Reads a token export of prime-rl, JSON lines of schema 1: a file, or a directory of them.

    Raises:
      UserError: the path has none, or they have another schema.
    """
    files = sorted(path.rglob("*.jsonl"), key=_numbers) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path} is neither the directory of a run nor a token export: it has no .jsonl file")

    def read(file: Path) -> list[RecordedRollout]:
        try:
            lines = read_regular(file).decode("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise _Damaged(str(error)) from error
        # The last line of a file that is being written has no end.
        records = (_parse_export(line, f"{file}, line {number}") for number, line in enumerate(lines[:-1], start=1))
        return [_of_export(file, record, row) for row, record in enumerate(record for record in records if record)]

    return _sample(files, read, limit)


class _Damaged(Exception):
    """A file that cannot be read."""


def _check_regular(path: Path) -> None:
    if not path.is_file():
        raise _Damaged("it is no regular file")


def _checked(rollout: RecordedRollout) -> RecordedRollout:
    """Returns a rollout whose values are of the kinds that the page shows; raises ValueError naming one that is not."""
    for name in ("prompt", "answer", "completion"):
        if not isinstance(getattr(rollout, name), str):
            raise ValueError(f"row {rollout.row}: {name}: got {getattr(rollout, name)!r}, expected text")
    for name in ("step", "row"):
        if type(getattr(rollout, name)) is not int:
            raise ValueError(f"row {rollout.row}: {name}: got {getattr(rollout, name)!r}, expected an integer")
    for name, number in {"reward": rollout.reward, **rollout.rewards}.items():
        if number is not None and not isinstance(number, int | float):
            raise ValueError(f"row {rollout.row}: {name}: got {number!r}, expected a number")
    if len(rollout.token_texts) != len(rollout.ids):
        raise ValueError(f"row {rollout.row}: {len(rollout.token_texts)} texts of {len(rollout.ids)} tokens")
    lengths = {name: len(x) for name, x in rollout.columns.items()} | {
        name: len(x) for name, x in rollout.others.items()
    }
    if rollout.sampled is not None:
        lengths["completion_mask"] = len(rollout.sampled)
    if wrong := [name for name, length in lengths.items() if length != rollout.length]:
        raise ValueError(f"row {rollout.row}: {wrong[0]}: {lengths[wrong[0]]} values of {rollout.length} tokens")
    return rollout


def _sample(files: Sequence[Path], read: Callable[[Path], list[RecordedRollout]], limit: int) -> RolloutSample:
    """Reads files evenly, the first and the last among them, until there are about `limit` rollouts."""
    rollouts: list[RecordedRollout] = []
    notes = []
    damaged = []
    left_out = 0
    every = None
    for number, path in enumerate(files):
        last = number == len(files) - 1
        if every is not None and number % every and not last:
            left_out += 1
            continue
        try:
            rollouts += read(path)
        except _Damaged as error:
            damaged.append(f"{path.name} ({error})")
        if every is None and rollouts:
            every = max(1, -(-len(files) * len(rollouts) // limit))
    if damaged:
        notes.append(f"{len(damaged)} of {len(files)} files of rollouts cannot be read, such as {damaged[0]}")
    if left_out:
        notes.append(f"shows {len(files) - left_out} of {len(files)} recorded steps; --rollouts N shows more")
    return RolloutSample(rollouts, notes)


def _numbers(path: Path) -> list[int]:
    """Returns the numbers in the names of a file and its folder, so that step_12 comes after step_3."""
    return [int(number) for number in re.findall(r"\d+", f"{path.parent.name}/{path.name}")]


def _from_table(table: Any) -> Iterator[RecordedRollout]:
    """Makes the rollouts of a Parquet table, with the columns of tokens that it has."""
    from pyarrow import types

    numbers: dict[str, list[np.ndarray]] = {}
    nested: list[str] = []
    for field in table.schema:
        if field.name in IDS or not types.is_list(field.type):
            continue
        if types.is_list(field.type.value_type):
            nested.append(field.name)
        else:
            numbers[field.name] = _split(table.column(field.name).combine_chunks())
    plain = [name for name in table.column_names if name not in numbers]
    for index, record in enumerate(table.select(plain).to_pylist()):
        prompt_ids = record["prompt_ids"]
        completion_ids = record["completion_ids"]
        first = -len(completion_ids) or len(prompt_ids)
        rollout = RecordedRollout(
            step=record["step"],
            row=record["row"],
            group=record.get("group"),
            policy_version=record.get("policy_version"),
            reward=record.get("reward"),
            rewards=record.get("rewards") or {},
            finished=record.get("finished"),
            prompt=record["prompt"],
            answer=record["answer"],
            completion=record["completion"],
            ids=prompt_ids + completion_ids,
            token_texts=record["token_texts"],
            prompt_length=len(prompt_ids),
            # A field that the tokens of prompts have too has more values.
            columns={name: rows[index][first:] for name, rows in numbers.items()},
            others={name: record[name][first:] for name in nested},
            sampled=record.get("completion_mask"),
            episode=None if record.get("episode") == record["row"] else record.get("episode"),
            failure=Failure.read(record.get("failure")),
        )
        yield _checked(rollout)


def _split(lists: Any) -> list[np.ndarray]:
    """Returns the numbers of each list of an Arrow array."""
    values = lists.values.to_numpy(zero_copy_only=False).astype(np.float32)
    offsets = lists.offsets.to_numpy()
    return [values[start:end] for start, end in itertools.pairwise(offsets)]


def _parse_export(line: str, location: str) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        record = parse_json(line)
    except ValueError as error:
        raise _Damaged(f"{location}: not JSON") from error
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != PRIME_RL_SCHEMA:
        raise UserError(f"{location}: schema_version: got {version!r}, expected {PRIME_RL_SCHEMA} of prime-rl's export")
    return record


def _of_export(file: Path, record: Mapping[str, Any], row: int) -> RecordedRollout:
    try:
        return _checked(_from_export(record, row))
    except KeyError as error:
        raise _Damaged(f"{file}, row {row}: it has no {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise _Damaged(f"{file}, row {row}: {error}") from error


def _from_export(record: Mapping[str, Any], row: int) -> RecordedRollout:
    """Makes a rollout of a sequence of the export: what its loss mask leaves out at the start is the prompt."""
    ids = record["token_ids"]
    mask = record["loss_mask"]
    start = mask.index(True) if True in mask else len(mask)
    columns = {}
    texts = [f"{number} " for number in ids]
    for name, values in record.items():
        if isinstance(values, list) and name not in ("token_ids", "position_ids", "losses") and len(values) == len(ids):
            numbers = np.array([np.nan if value is None else value for value in values[start:]], np.float32)
            if not np.isnan(numbers).all():
                columns[PRIME_RL_NAMES.get(name, name)] = numbers
    rewards = columns.pop("rewards", None)
    return RecordedRollout(
        step=record.get("export_step", record["step"]),
        row=row,
        group=None,
        policy_version=None,
        reward=None if rewards is None else float(rewards[-1]),
        rewards={},
        finished=None,
        prompt=record.get("env_name") or "",
        answer="",
        completion="".join(texts[start:]),
        ids=ids,
        token_texts=texts,
        prompt_length=start,
        columns=columns,
        others={},
    )


def columns_of(rollouts: Iterable[RecordedRollout]) -> Iterator[str]:
    """Yields the names of the columns that any rollout has, each once."""
    yield from dict.fromkeys(name for rollout in rollouts for name in rollout.columns)
