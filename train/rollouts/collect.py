"""From completions of any source to the one kind of batch: judged, grouped, on the devices."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from train.batch import Batch
from train.keys import purpose_key
from train.rollouts.source import Completions, Request, Source
from train.setting import Setting
from train.sharding import shard_rows
from train.tasks import Example, Task


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A sampled and judged batch.

    Attributes:
      batch: on the devices; `rollout_log_probs` only if they are recorded.
      metrics: means over the completions: every named reward, length, and the share that ended by itself; and what
        the source measured.
      timings: what the source measured that differs from run to run.
      completions: what the source answered.
      scores: named rewards, each [B].
    """

    batch: Batch
    metrics: dict[str, float]
    timings: dict[str, float]
    completions: Completions
    scores: dict[str, np.ndarray]


def judge(
    task: Task, examples: Sequence[Example], completions: Sequence[str], finished: np.ndarray
) -> dict[str, np.ndarray]:
    """The named rewards of each completion, `[B]` float32."""
    rows = zip(examples, completions, finished, strict=True)
    scores = [task.score(example, text, bool(done)) for example, text, done in rows]
    return {name: np.asarray([score[name] for score in scores], np.float32) for name in scores[0]}


def collect(setting: Setting, source: Source, step: int) -> Rollout:
    """The rollout batch of one step: `samples_per_prompt` completions of each prompt, judged.

    Raises:
      SourceError: the source is gone.
    """
    config = setting.config
    request = Request(
        examples=setting.prompts.batch(step),
        samples=config.rollout.samples_per_prompt,
        step=step,
        key=purpose_key(config.seed, "sample", step),
    )
    return to_rollout(setting, source.sample(request))


def to_rollout(setting: Setting, completions: Completions) -> Rollout:
    """Judges what was not judged yet, and lays the rows over the devices."""
    section = setting.config.rollout
    scores = dict(
        judge(setting.task, completions.examples, completions.texts, completions.finished)
        if completions.rewards is None
        else completions.rewards
    )
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
    batch = Batch(**shard_rows(rows, setting.mesh))
    lengths = jax.device_get(batch.completion_mask).sum(-1)
    metrics = {name: float(value.mean(dtype=np.float64)) for name, value in scores.items()}
    metrics["completion_length"] = float(lengths.mean(dtype=np.float64))
    metrics["finished"] = float(completions.finished.mean(dtype=np.float64))
    return Rollout(batch, metrics | dict(completions.metrics), dict(completions.timings), completions, scores)
