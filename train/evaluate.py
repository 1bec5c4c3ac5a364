"""Accuracy on held-out prompts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from train.config.schema import Config
from train.rollout import Sampler, complete, judge
from train.tasks import Example, Task
from train.tokenizer import ByteTokenizer

Tree = Any

SHOWN = 16


class Evaluation(NamedTuple):
    """What an evaluation found.

    Attributes:
      metrics: means over all held-out examples.
      samples: the first few of them, with what the policy answered and what that earned.
    """

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


def evaluate(
    config: Config,
    sampler: Sampler,
    trainable: dict[str, Tree],
    base: Tree,
    examples: Sequence[Example],
    *,
    task: Task,
    key: jax.Array,
    tokenizer: ByteTokenizer,
    mesh: Mesh,
) -> Evaluation:
    """Means over the held-out examples of every named reward, `accuracy` in percent, and the first completions.

    The last batch is filled up with repeated examples, which are not counted, so that one program serves all.
    """
    size = config.eval.batch_size
    scores: list[dict[str, np.ndarray]] = []
    shown: list[dict[str, Any]] = []
    for start in range(0, len(examples), size):
        chunk = list(examples[start : start + size])
        filled = (chunk * size)[:size] if len(chunk) < size else chunk
        _, completions, finished = complete(
            sampler,
            trainable,
            base,
            filled,
            key=jax.random.fold_in(key, start),
            prompt_length=config.data.max_prompt_length,
            tokenizer=tokenizer,
            mesh=mesh,
        )
        judged = judge(task, filled, completions, finished)
        scores.append({name: values[: len(chunk)] for name, values in judged.items()})
        for row, example in enumerate(chunk[: SHOWN - len(shown)]):
            rewards = {name: float(values[row]) for name, values in judged.items()}
            text = {"prompt": example.prompt, "completion": completions[row], "answer": example.answer}
            shown.append({**text, "finished": bool(finished[row]), **rewards})
    means = {name: float(np.concatenate([s[name] for s in scores]).mean(dtype=np.float64)) for name in scores[0]}
    return Evaluation({**means, "accuracy": 100 * means["correct"]}, shown)
