"""Collection of a rollout batch: completions from a source, scored, grouped and sharded."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.data.tasks.rewards import Scores, compose, judge
from train.distributed import agree, gather_rows, held_rows, on_leader, run_together, send_to_leader, to_host_rows
from train.models.rows import shard_rows
from train.models.sharding import batch_sharding
from train.rl.batch import Batch
from train.rollouts.context import RunContext
from train.rollouts.recorded import record_rows, write_rows
from train.rollouts.source import Array, Completions, Request, Source, SourceError


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Completions on the devices, which may still sample them: the batch has no rewards yet."""

    batch: Batch
    completions: Completions


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A sampled and scored batch.

    Attributes:
      batch: the arrays on the devices; `rollout_log_probs` only if the config records them.
      metrics: means over the completions of every named reward, the length and `finished`; and metrics of the source.
      timings: measurements of the source that differ between identical runs.
      completions: output of the source.
      scores: named rewards, each [B], before weights and penalties.
      arrived: when the completions were on the host, in seconds of `time.perf_counter`.
    """

    batch: Batch
    metrics: dict[str, float]
    timings: dict[str, float]
    completions: Completions
    scores: dict[str, np.ndarray]
    arrived: float


def collect(context: RunContext, source: Source, step: int) -> Rollout:
    """Samples, judges and optionally records `samples_per_prompt` completions of each prompt of a step.

    Raises:
      SourceError: the source stopped answering, or the recording cannot be written.
    """
    return judge_drawn(context, draw(context, source, step), step)


def draw(context: RunContext, source: Source, step: int) -> Drawn:
    """Takes the completions of a step from a source, and shards their rows over the devices.

    Raises:
      SourceError: the source stopped answering, or its rows are wrong.
    """
    return shard_completions(context, run_together("rollout", lambda: source.sample(Request.of(context, step))))


def judge_drawn(context: RunContext, drawn: Drawn, step: int) -> Rollout:
    """Waits for the completions, judges them, and records them if the config says so.

    The devices go on with what they were given before.

    Raises:
      RewardError: the reward function failed.
      SourceError: the recording cannot be written.
    """
    rollout = judge_rows(context, drawn)
    if context.config.rollout.record is not None:
        _record(context, rollout, Path(context.config.rollout.record), step)
    return rollout


def _record(context: RunContext, rollout: Rollout, directory: Path, step: int) -> None:
    """Writes the rows of all processes to the file of a step."""
    completions = rollout.completions
    names = ("tokens", "token_mask", "completion_mask", "log_probs", "kept_ids")
    arrays = {name: _of_own_rows(getattr(completions, name), completions.rows, context) for name in names}
    own = record_rows(
        dataclasses.replace(completions, **arrays), rollout.scores, context.config.rollout.samples_per_prompt
    )
    numbered = list(zip(_numbers(completions).tolist(), own, strict=True))
    parts = [json.loads(part) for part in send_to_leader("recording", json.dumps(numbered).encode())]
    rows = [row for _, row in sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])]
    on_leader("recording", lambda: write_rows(directory, step, rows))


def shard_completions(context: RunContext, completions: Completions) -> Drawn:
    """Shards the rows of completions over the devices; does not wait for a device that samples."""
    section = context.config.rollout
    run_together("rollout", lambda: _check_rows(completions, context.model.config.vocab_size))
    held = held_rows(batch_sharding(context.mesh), _count(context, completions))
    rows = {
        "tokens": completions.tokens,
        "token_mask": completions.token_mask,
        "completion_mask": completions.completion_mask,
        "group_ids": (held // section.samples_per_prompt).astype(np.int32),
    }
    if section.record_log_probs and completions.log_probs is not None:
        rows["rollout_log_probs"] = completions.log_probs
    if completions.kept_ids is not None:
        rows["kept_ids"] = completions.kept_ids
    # Every process has to put arrays of one layout on the devices.
    agree("rollout", {name: f"{np.dtype(x.dtype)}{list(x.shape[1:])} of a row" for name, x in rows.items()})
    return Drawn(Batch(**shard_rows(rows, context.mesh)), completions)


def judge_rows(context: RunContext, drawn: Drawn) -> Rollout:
    """Scores the completions unless the source did, combines the rewards, and puts them on the devices.

    Each process judges its own rows, and all rewards are collected before a mean is taken, so that it has the bits of a
    run in one process.
    """
    completions = run_together("rollout", drawn.completions.completed)
    arrived, count = time.perf_counter(), _count(context, completions)
    lengths = _of_own_rows(completions.completion_mask, completions.rows, context).sum(-1)
    numbers = _numbers(completions)

    def score() -> Scores:
        if completions.rewards is None:
            return judge(context.task, completions.examples, completions.texts, completions.finished)
        return dict(completions.rewards)

    named_rewards, scores = judge_together(context, "rewards", score, lengths=lengths, numbers=numbers, count=count)
    measured = {"completion_length": lengths, "finished": completions.finished}
    if completions.lags is not None:
        measured["rollout_lag"] = completions.lags
    measured = gather_rows("completions", measured, numbers, count)
    rewards = shard_rows(scores["reward"][held_rows(batch_sharding(context.mesh), count)], context.mesh)
    metrics = {name: float(value.mean(dtype=np.float64)) for name, value in (scores | measured).items()}
    return Rollout(
        dataclasses.replace(drawn.batch, rewards=rewards),
        metrics | dict(completions.metrics),
        dict(completions.timings),
        completions,
        named_rewards,
        arrived,
    )


def _count(context: RunContext, completions: Completions) -> int:
    """Counts the rows of all processes."""
    return len(completions.examples) if completions.rows is None else context.config.rows_per_batch()


def judge_together(
    context: RunContext,
    label: str,
    score: Callable[[], Scores],
    *,
    lengths: np.ndarray,
    numbers: np.ndarray,
    count: int,
) -> tuple[Scores, Scores]:
    """Judges the rows of this process, and collects the rewards of all rows.

    Args:
      context: of the run.
      label: names the rows in errors.
      score: returns the named rewards of the rows of this process.
      lengths: tokens of each of their completions.
      numbers: the numbers of these rows.
      count: number of rows of all processes.

    Returns:
      The named rewards of the rows of this process; and those of all rows with the penalties and "reward", `[count]`.

    Raises:
      UserError: in every process, if the rows of one cannot be judged, or their rewards have other names.
    """
    config = context.config

    def judge_own_rows() -> tuple[Scores, Scores]:
        named = score()
        if not len(numbers):
            return {}, {}
        return named, compose(config.rewards, named, lengths, longest=config.data.max_completion_length)

    named, rewards = run_together(label, judge_own_rows)
    return named, gather_rows(label, rewards, numbers, count)


def _check_rows(completions: Completions, vocab_size: int) -> None:
    """Checks the rows that come from the host, in every process before any of them starts the step.

    Raises:
      SourceError: a token is not of the vocabulary, a completion has padding in it, or a log-prob is not finite.
    """
    tokens, mask = completions.tokens, completions.completion_mask
    if isinstance(tokens, jax.Array) or isinstance(mask, jax.Array):
        return
    log_probs = np.zeros(()) if completions.log_probs is None else np.where(mask, completions.log_probs, 0)
    problems = {
        f"tokens outside of the vocabulary of {vocab_size}": (tokens < 0) | (tokens >= vocab_size),
        "completion tokens that the token mask leaves out": mask & ~np.asarray(completions.token_mask),
        "log-probs that are not finite": ~np.isfinite(log_probs),
    }
    for problem, wrong in problems.items():
        if wrong.any():
            raise SourceError(f"rollout: the completions have {int(wrong.sum())} {problem}")


def _numbers(completions: Completions) -> np.ndarray:
    """Lists the numbers of the rows that this process judges."""
    return np.arange(len(completions.examples)) if completions.rows is None else completions.rows


def _of_own_rows(array: Array | None, rows: np.ndarray | None, context: RunContext) -> Any:
    """Copies the rows that this process judges to the host, from an array of all rows, or of its held rows."""
    if array is None:
        return None
    host = to_host_rows(array) if isinstance(array, jax.Array) else array
    if rows is None:
        return host
    held = held_rows(batch_sharding(context.mesh), context.config.rows_per_batch())
    return host[np.searchsorted(held, rows)]
