"""Collection of a rollout batch: completions from a source, scored, grouped and sharded."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from train.context import RunContext
from train.data.tasks.rewards import Scores, compose, judge
from train.distributed.exchange import agree, on_leader, run_together, send_to_leader
from train.distributed.global_arrays import RowSplit, gather_rows, to_host_rows
from train.models.shard_rows import shard_rows
from train.rollouts.episodes.turns import SampledTurn
from train.rollouts.lag import lags_of_rows, measure_lags, reads_lags, token_lags
from train.rollouts.recorded import name_parents, record_rows, write_rows
from train.rollouts.routes import check_routes
from train.rollouts.row_checks import check_fields, check_values
from train.rollouts.row_statistics import check_rows, has_log_prob, measure_rows, without_floors
from train.rollouts.source import Completions, SourceError, batch_rows
from train.rollouts.stream import Stream
from train.sequences.batch import Batch, prompt_lengths
from train.sequences.token_fields import LAGS, VERSIONS
from train.storage.paths import as_path


class Rollout(NamedTuple):
    """The samples of a step, on the host and on the devices.

    Attributes:
      completions: output of the source, which the devices may still sample. Once they are judged, `rewards` has every
        named reward before weights and penalties, and `metrics` also means over the completions of every named reward,
        the length and `finished`, the spread of the rewards, repeated completions, missing log-probs and lags.
      batch: the arrays on the devices; `rollout_log_probs` only if the config records them, `rewards` once judged.
    """

    completions: Completions
    batch: Batch


def collect(context: RunContext, stream: Stream, step: int) -> Rollout:
    """Takes, judges and optionally records `samples_per_prompt` completions of each prompt of a step.

    Raises:
      SourceError: the source stopped answering, or the recording cannot be written.
    """
    return judge_drawn(context, arrive(draw(context, stream, step)), step)


def draw(context: RunContext, stream: Stream, step: int) -> Rollout:
    """Takes the completions of a step from a stream, and shards their rows over the devices.

    Raises:
      SourceError: the source stopped answering, or its rows are wrong.
    """
    completions = run_together("rollout", lambda: stream.batch(step))
    return shard_completions(context, completions, batch_rows(context), step)


def arrive(drawn: Rollout) -> Rollout:
    """Waits for the completions, which the devices sample; they go on with what they were given after."""
    return drawn._replace(completions=run_together("rollout", drawn.completions.completed))


def judge_drawn(context: RunContext, drawn: Rollout, step: int) -> Rollout:
    """Judges completions that arrived, and records them if the config says so.

    Raises:
      RewardError: the reward function failed.
      SourceError: the recording cannot be written.
    """
    rollout = judge_rows(context, drawn, batch_rows(context), step)
    if context.config.rollout.record is not None:
        _record(context, rollout.completions, as_path(context.config.rollout.record), step)
    return rollout


def _record(context: RunContext, completions: Completions, directory: Path, step: int) -> None:
    """Writes the rows of all processes to the file of a step."""
    samples = context.config.rollout.samples_per_prompt
    longest = context.config.data.max_prompt_length
    split = batch_rows(context)
    records = run_together("recording", lambda: record_rows(completions, split, samples, longest))
    numbered = list(zip(split.own.tolist(), records, strict=True))
    parts = [json.loads(part) for part in send_to_leader("recording", json.dumps(numbered).encode())]
    rows = [row for _, row in sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])]
    on_leader("recording", lambda: write_rows(directory, step, name_parents(rows, samples, longest)))


def shard_completions(context: RunContext, completions: Completions, split: RowSplit, step: int) -> Rollout:
    """Shards the rows of completions over the devices; does not wait for a device that samples.

    Args:
      context: of the run.
      completions: of a batch.
      split: its rows.
      step: RL steps done, from which the lag of each token follows.
    """
    section = context.config.rollout

    def check() -> None:
        _check_rows(completions, context)
        check_routes(context, completions, split)

    run_together("rollout", check)
    mask = completions.completion_mask
    fields = dict(completions.fields)
    versions = fields.pop(VERSIONS, None)
    if versions is not None and reads_lags(context.plan):
        fields[LAGS] = token_lags(versions, completions.completion_mask, step)
    log_probs = fields.pop("rollout_log_probs", None)
    recorded = section.record_log_probs and log_probs is not None
    if recorded:
        mask, log_probs = without_floors(mask, log_probs)
    group_ids = (split.held // section.samples_per_prompt).astype(np.int32)
    episodes = completions.episode_rows
    if episodes is not None:
        # Each episode is compared once with those of its group.
        group_ids = np.where(episodes == split.held, group_ids, -1).astype(np.int32)
    rows = {
        "tokens": completions.tokens,
        "token_mask": completions.token_mask,
        "completion_mask": mask,
        "prompt_lengths": prompt_lengths(completions),
        "group_ids": group_ids,
        **({"rollout_log_probs": log_probs} if recorded else {}),
        **({"episode_rows": episodes} if section.fork_rows and episodes is not None else {}),
    }
    # Every process has to put arrays of one layout on the devices.
    agree("rollout", {name: f"{np.dtype(x.dtype)}{list(x.shape[1:])} of a row" for name, x in (rows | fields).items()})
    batch = Batch(**shard_rows(rows, context.mesh), fields=shard_rows(fields, context.mesh))
    if completions.sampled is not None:
        verify_sampled(batch, completions.sampled)
    return Rollout(completions, batch)


def judge_rows(context: RunContext, drawn: Rollout, split: RowSplit, step: int) -> Rollout:
    """Scores the completions unless the source did, combines the rewards, and puts them on the devices.

    Each process judges its own rows, and all rewards are collected before a mean is taken, so that it has the bits of a
    run in one process.

    Raises:
      SourceError: all completions of every group are copies, or too many tokens have no log-prob.
    """
    completions = drawn.completions
    mask = split.select_own(completions.completion_mask)
    lengths = mask.sum(-1)

    def score() -> Scores:
        if completions.rewards is None:
            return judge(context.task, completions.examples, completions.texts, completions.finished)
        return dict(completions.rewards)

    named_rewards, scores = judge_together(context, "rewards", score, lengths=lengths, rows=split)
    measured = {"completion_length": lengths, "finished": completions.finished}
    measured |= {"leading": completions.leading(split)}
    measured = gather_rows("completions", measured, split.own, split.count)
    leading = measured.pop("leading")
    own_statistics = dict(measure_rows(context.config, completions, split))
    if VERSIONS in completions.fields:
        own_statistics |= lags_of_rows(token_lags(split.select_own(completions.fields[VERSIONS]), mask, step))
    statistics = gather_rows("statistics", own_statistics, split.own, split.count)
    judged = {"rewards": shard_rows(scores["reward"][split.held], context.mesh)}
    if context.config.loss.unfinished == "drop":
        finished = shard_rows(measured["finished"][split.held].astype(bool), context.mesh)
        judged["kept_mask"] = drawn.batch.completion_mask & finished[:, None]
    counted = leading if leading.any() else slice(None)
    metrics = {name: float(value[counted].mean(dtype=np.float64)) for name, value in (scores | measured).items()}
    metrics["reward_std"] = float(scores["reward"][counted].std(dtype=np.float64))
    metrics |= run_together(
        "rollout", lambda: check_rows(context.config, statistics, measured["completion_length"], leading)
    )
    metrics |= measure_lags(context.plan, statistics)
    metrics |= completions.metrics
    completions = dataclasses.replace(completions, rewards=named_rewards, metrics=metrics)
    return Rollout(completions, dataclasses.replace(drawn.batch, **judged))


def judge_together(
    context: RunContext,
    label: str,
    score: Callable[[], Scores],
    *,
    lengths: np.ndarray,
    rows: RowSplit,
) -> tuple[Scores, Scores]:
    """Judges the rows of this process, and collects the rewards of all rows.

    Args:
      context: of the run.
      label: names the rows in errors.
      score: returns the named rewards of the rows of this process.
      lengths: tokens of each of their completions.
      rows: the rows of this process, and the number of all.

    Returns:
      The named rewards of the rows of this process; and rewards of all rows with the penalties and "reward", `[count]`.

    Raises:
      UserError: in every process, if the rows of one cannot be judged, or their rewards have other names.
    """
    config = context.config

    def judge_own_rows() -> tuple[Scores, Scores]:
        named = score()
        if not len(rows.own):
            return {}, {}
        return named, compose(config.rewards, named, lengths, longest=config.data.max_completion_length)

    named, rewards = run_together(label, judge_own_rows)
    return named, gather_rows(label, rewards, rows.own, rows.count)


def verify_sampled(batch: Batch, sampled: Sequence[Sequence[SampledTurn] | None]) -> None:
    """Checks that a batch trains exactly the tokens that were sampled, each after the ids before it then.

    Raises:
      SourceError: a token, its log-prob or an id before it is another; names the row.
    """
    tokens, token_mask, mask = map(to_host_rows, (batch.tokens, batch.token_mask, batch.completion_mask))
    log_probs = None if batch.rollout_log_probs is None else to_host_rows(batch.rollout_log_probs)
    for row, turns in enumerate(sampled):
        if turns is None:
            continue
        is_real = token_mask[row]
        ids = tokens[row][is_real]
        trained = mask[row][is_real]
        recorded = None if log_probs is None else log_probs[row][is_real]
        expected = np.zeros_like(trained)
        problem = None
        for turn in turns:
            start = len(turn.prompt_ids)
            end = start + len(turn.ids)
            drawn = np.asarray(turn.rollout_log_probs, np.float32 if recorded is None else recorded.dtype)
            # A token without a log-prob is not trained.
            known = recorded is None or has_log_prob(drawn)
            expected[start:end] = known
            if ids[:end].tolist() != [*turn.prompt_ids, *turn.ids]:
                problem = "other ids than its turns"
            elif recorded is not None and not np.array_equal(recorded[start:end], np.where(known, drawn, 0)):
                problem = "other log-probs than its turns"
        if not np.array_equal(trained, expected):
            problem = "trained tokens that were not sampled, or sampled ones that are not trained"
        if problem is not None:
            raise SourceError(f"rollout: row {row} of the batch has {problem}")


def _check_rows(completions: Completions, context: RunContext) -> None:
    """Checks rows that come from the host, in every process before any of them starts the step.

    The sampler of this process needs no check; sources of the user have theirs (`UserSource`).
    """
    check_fields(completions.fields, completions.tokens.shape)
    rows = completions.tokens, completions.token_mask, completions.completion_mask, prompt_lengths(completions)
    if not any(isinstance(x, jax.Array) for x in (*rows, *completions.fields.values())):
        tokens, token_mask, mask, prompts = map(np.asarray, rows)
        check_values(tokens, token_mask, mask, prompts, completions.fields, context=context)
