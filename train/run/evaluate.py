"""Accuracy on held-out prompts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import kljax
from train.config.errors import UserError
from train.context import RunContext
from train.data.tasks import Example
from train.data.tasks.rewards import Scores, judge
from train.data.tokenizers import Tokenizer
from train.distributed.exchange import exchange_json
from train.distributed.global_arrays import RowSplit
from train.rollouts.collect import judge_together
from train.rollouts.episodes.rows import join_episode_metrics
from train.rollouts.source import Completions, Request
from train.rollouts.stream import Stream

SHOWN = 16


class Evaluation(NamedTuple):
    """The result of an evaluation.

    Attributes:
      metrics: means over all held-out examples, and the counts of episodes that failed.
      samples: the first few examples, with the completion and its rewards.
    """

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


def evaluate(
    context: RunContext, stream: Stream, policy: kljax.Policy, key: jax.Array, *, step: int, greedy: bool = False
) -> Evaluation:
    """Computes the mean of every named reward over the held-out examples, and `accuracy` in percent.

    Episodes have the metrics of their turns, calls and failures, too; one that failed counts as wrong.

    With the sampler of this process the tokens of an example depend on the key and its index among the held-out
    examples, and not on `eval.batch_size`.

    Args:
      context: of the run.
      stream: gets the weights, and completes the prompts; see `open_evaluation`.
      policy: the policy that is evaluated.
      key: of the samples, the same for every evaluation.
      step: number of RL steps of the policy.
      greedy: whether to take the most probable tokens.

    Raises:
      UserError: a reward has the name of a metric of episodes.
    """
    examples = context.held_out
    size = context.config.eval.batch_size
    requests = [
        Request.held_out(context, first, step=step, key=key, greedy=greedy) for first in range(0, len(examples), size)
    ]
    scores: list[dict[str, np.ndarray]] = []
    measured: list[tuple[Mapping[str, float], int]] = []
    shown: list[dict[str, Any]] = []

    def begin(request: Request) -> Completions:
        stream.start([request])
        return stream.take(request)

    stream.update(policy, step)
    begun = begin(requests[0])
    for number, request in enumerate(requests):
        completions = begun
        if number + 1 < len(requests):
            # A chunk is judged while the devices sample the next one; two at once would take twice the memory.
            jax.block_until_ready(completions.tokens)
            begun = begin(requests[number + 1])
        completions = completions.completed()
        rows = request.rows
        lengths = rows.select_own(completions.completion_mask).sum(-1)
        answers = completions.examples, completions.texts, completions.finished

        def score(
            answers: tuple[Any, Any, Any] = answers, rewards: Mapping[str, np.ndarray] | None = completions.rewards
        ) -> Scores:
            return judge(context.task, *answers) if rewards is None else dict(rewards)

        _, judged = judge_together(context, "evaluation", score, lengths=lengths, rows=rows)
        scores.append(judged)
        measured.append((completions.metrics, rows.count))
        if len(shown) < SHOWN:
            shown += _shown(context.tokenizer, request.examples[: SHOWN - len(shown)], completions, rows, judged)
    means = {name: float(np.concatenate([s[name] for s in scores]).mean(dtype=np.float64)) for name in scores[0]}
    of_episodes = join_episode_metrics(measured)
    if repeated := means.keys() & of_episodes.keys():
        raise UserError(f"rewards: got a reward named {min(repeated)!r}, a name of the trainer; rename it")
    return Evaluation({**of_episodes, **means, "accuracy": 100 * means["correct"]}, shown)


def _shown(
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    completions: Completions,
    rows: RowSplit,
    judged: dict[str, np.ndarray],
) -> list[dict[str, Any]]:
    """Lists the first examples with their completions and rewards, and the text of all tokens of the row."""
    tokens = rows.select_own(completions.tokens)
    masks = rows.select_own(completions.token_mask)
    every = zip(rows.own.tolist(), completions.texts, completions.finished.tolist(), tokens, masks, strict=True)
    local_entries = [
        (row, text, flag, tokenizer.decode_all(ids[mask].tolist()))
        for row, text, flag, ids, mask in every
        if row < len(examples)
    ]
    entries = sorted(entry for part in exchange_json("samples", local_entries) for entry in part)
    return [
        {
            **{"prompt": examples[row].prompt, "completion": text, "answer": examples[row].answer, "finished": flag},
            "conversation": conversation,
            **{name: float(values[row]) for name, values in judged.items()},
        }
        for row, text, flag, conversation in entries
    ]
