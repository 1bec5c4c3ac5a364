"""From completions of any source to the one kind of batch: judged, grouped, on the devices."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from train.data.tasks.rewards import compose, judge
from train.models.sharding import shard_rows
from train.rl.batch import Batch
from train.rl.keys import purpose_key
from train.rollouts.context import RunContext
from train.rollouts.recorded import record_rows, write_rows
from train.rollouts.source import Completions, Request, Source


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A sampled and judged batch.

    Attributes:
      batch: on the devices; `rollout_log_probs` only if they are recorded.
      metrics: means over the completions: every named reward, length, and the share that ended by itself; and what
        the source measured.
      timings: what the source measured that differs from run to run.
      completions: what the source answered.
      scores: named rewards, each [B], as they were judged: before weights and penalties.
    """

    batch: Batch
    metrics: dict[str, float]
    timings: dict[str, float]
    completions: Completions
    scores: dict[str, np.ndarray]


def collect(context: RunContext, source: Source, step: int) -> Rollout:
    """The rollout batch of one step: `samples_per_prompt` completions of each prompt, judged, and recorded if asked.

    Raises:
      SourceError: the source is gone, or what it answered cannot be recorded.
    """
    config = context.config
    request = Request(
        examples=context.prompts.batch(step),
        samples=config.rollout.samples_per_prompt,
        step=step,
        key=purpose_key(config.seed, "sample", step),
    )
    rollout = to_rollout(context, source.sample(request))
    if config.rollout.record is not None and jax.process_index() == 0:
        rows = record_rows(rollout.completions, rollout.scores, config.rollout.samples_per_prompt)
        write_rows(Path(config.rollout.record), step, rows)
    return rollout


def to_rollout(context: RunContext, completions: Completions) -> Rollout:
    """Judges what was not judged yet, weighs the rewards, and lays the rows over the devices."""
    config, section = context.config, context.config.rollout
    named = (
        judge(context.task, completions.examples, completions.texts, completions.finished)
        if completions.rewards is None
        else completions.rewards
    )
    lengths = np.asarray(jax.device_get(completions.completion_mask)).sum(-1)
    scores = compose(config.rewards, named, lengths, longest=config.data.max_completion_length)
    prompts = len(completions.examples) // section.samples_per_prompt
    rows = {
        "tokens": completions.tokens,
        "token_mask": completions.token_mask,
        "completion_mask": completions.completion_mask,
        "rewards": scores["reward"],
        "group_ids": np.repeat(np.arange(prompts, dtype=np.int32), section.samples_per_prompt),
    }
    if section.record_log_probs and completions.log_probs is not None:
        rows["rollout_log_probs"] = completions.log_probs
    batch = Batch(**shard_rows(rows, context.mesh))
    metrics = {name: float(value.mean(dtype=np.float64)) for name, value in scores.items()}
    metrics["completion_length"] = float(lengths.mean(dtype=np.float64))
    metrics["finished"] = float(completions.finished.mean(dtype=np.float64))
    return Rollout(batch, metrics | dict(completions.metrics), dict(completions.timings), completions, dict(named))
