"""Collection of a rollout batch: completions from a source, scored, grouped and sharded."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from train.data.tasks.rewards import compose, judge
from train.distributed import is_leader
from train.models.sharding import shard_rows
from train.rl.batch import Batch
from train.rl.keys import purpose_key
from train.rollouts.context import RunContext
from train.rollouts.recorded import record_rows, write_rows
from train.rollouts.source import Completions, Request, Source


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A sampled and scored batch.

    Attributes:
      batch: the arrays on the devices; `rollout_log_probs` only if the config records them.
      metrics: means over the completions of every named reward, the length and `finished`; and metrics of the source.
      timings: measurements of the source that differ between identical runs.
      completions: output of the source.
      scores: named rewards, each [B], before weights and penalties.
    """

    batch: Batch
    metrics: dict[str, float]
    timings: dict[str, float]
    completions: Completions
    scores: dict[str, np.ndarray]


def collect(context: RunContext, source: Source, step: int) -> Rollout:
    """Samples, scores and optionally records `samples_per_prompt` completions of each prompt of a step.

    Raises:
      SourceError: the source stopped answering, or the recording cannot be written.
    """
    config = context.config
    request = Request(
        examples=context.prompts.batch(step),
        samples=config.rollout.samples_per_prompt,
        step=step,
        key=purpose_key(config.seed, "sample", step),
    )
    rollout = make_rollout(context, source.sample(request))
    if config.rollout.record is not None and is_leader():
        rows = record_rows(rollout.completions, rollout.scores, config.rollout.samples_per_prompt)
        write_rows(Path(config.rollout.record), step, rows)
    return rollout


def make_rollout(context: RunContext, completions: Completions) -> Rollout:
    """Scores the completions unless the source did, combines the rewards, and shards the rows."""
    config, section = context.config, context.config.rollout
    named_rewards = (
        judge(context.task, completions.examples, completions.texts, completions.finished)
        if completions.rewards is None
        else completions.rewards
    )
    lengths = np.asarray(jax.device_get(completions.completion_mask)).sum(-1)
    scores = compose(config.rewards, named_rewards, lengths, longest=config.data.max_completion_length)
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
    if completions.kept_ids is not None:
        rows["kept_ids"] = completions.kept_ids
    batch = Batch(**shard_rows(rows, context.mesh))
    metrics = {name: float(value.mean(dtype=np.float64)) for name, value in scores.items()}
    metrics["completion_length"] = float(lengths.mean(dtype=np.float64))
    metrics["finished"] = float(completions.finished.mean(dtype=np.float64))
    return Rollout(
        batch, metrics | dict(completions.metrics), dict(completions.timings), completions, dict(named_rewards)
    )
