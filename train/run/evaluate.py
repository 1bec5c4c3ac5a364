"""Accuracy on held-out prompts."""

from typing import Any, NamedTuple

import jax
import numpy as np

import kljax
from train.data.tasks.rewards import compose, judge
from train.rollouts import Sampler, sample_completions
from train.rollouts.context import RunContext

SHOWN = 16


class Evaluation(NamedTuple):
    """The result of an evaluation.

    Attributes:
      metrics: means over all held-out examples.
      samples: the first few examples, with the completion and its rewards.
    """

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


def evaluate(context: RunContext, sampler: Sampler, policy: kljax.Policy, key: jax.Array) -> Evaluation:
    """Computes the mean of every named reward over the held-out examples, and `accuracy` in percent.

    The sampler of this process draws the completions, wherever rollouts come from: it runs the policy that is trained,
    not a server's copy, with the same keys every time. The last batch is filled up with repeated examples, which are
    not counted, so that every batch runs the same program.
    """
    config, examples = context.config, context.held_out
    size = config.eval.batch_size
    scores: list[dict[str, np.ndarray]] = []
    shown: list[dict[str, Any]] = []
    for start in range(0, len(examples), size):
        chunk = list(examples[start : start + size])
        filled = (chunk * size)[:size] if len(chunk) < size else chunk
        samples, completions, finished = sample_completions(
            context, sampler, policy, filled, jax.random.fold_in(key, start)
        )
        named = judge(context.task, filled, completions, finished)
        lengths = np.asarray(jax.device_get(samples.completion_mask)).sum(-1)
        judged = compose(config.rewards, named, lengths, longest=config.data.max_completion_length)
        scores.append({name: values[: len(chunk)] for name, values in judged.items()})
        for row, example in enumerate(chunk[: SHOWN - len(shown)]):
            rewards = {name: float(values[row]) for name, values in judged.items()}
            text = {"prompt": example.prompt, "completion": completions[row], "answer": example.answer}
            shown.append({**text, "finished": bool(finished[row]), **rewards})
    means = {name: float(np.concatenate([s[name] for s in scores]).mean(dtype=np.float64)) for name in scores[0]}
    return Evaluation({**means, "accuracy": 100 * means["correct"]}, shown)
