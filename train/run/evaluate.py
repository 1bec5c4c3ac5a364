"""Accuracy on held-out prompts."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

import kljax
from train.context import RunContext
from train.data.tasks import Example
from train.data.tasks.rewards import judge
from train.data.tokenizers import Tokenizer
from train.distributed.exchange import exchange_json
from train.distributed.global_arrays import RowSplit
from train.models.sharding import batch_sharding
from train.rollouts.collect import judge_together
from train.rollouts.jax_source import Sampler, begin_samples, completions_of
from train.rollouts.source import Completions

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
    not a server's copy, with the same keys every time. The tokens of an example depend on the key and its index among
    the held-out examples, and not on `eval.batch_size`. The last batch is filled up with repeated examples, which are
    neither judged nor counted, so that every batch runs the same program.
    """
    examples = context.held_out
    size = context.config.eval.batch_size
    filled_rows = RowSplit.of(batch_sharding(context.mesh), size)
    scores: list[dict[str, np.ndarray]] = []
    shown: list[dict[str, Any]] = []

    def begin(start: int) -> Completions:
        chunk = examples[start : start + size]
        samples = begin_samples(context, sampler, policy, (chunk * size)[:size], key, first_row=start)
        return completions_of(context, samples, chunk, filled_rows.first(len(chunk)))

    begun = begin(0)
    for start in range(0, len(examples), size):
        completions = begun
        if start + size < len(examples):
            # A chunk is judged while the devices sample the next one; two at once would take twice the memory.
            jax.block_until_ready(completions.tokens)
            begun = begin(start + size)
        completions = completions.completed()
        chunk = examples[start : start + size]
        rows = filled_rows.first(len(chunk))
        lengths = rows.select_own(completions.completion_mask).sum(-1)
        answers = completions.examples, completions.texts, completions.finished
        score = functools.partial(judge, context.task, *answers)
        _, judged = judge_together(context, "evaluation", score, lengths=lengths, rows=rows)
        scores.append(judged)
        if len(shown) < SHOWN:
            shown += _shown(context.tokenizer, chunk[: SHOWN - len(shown)], completions, rows, judged)
    means = {name: float(np.concatenate([s[name] for s in scores]).mean(dtype=np.float64)) for name in scores[0]}
    return Evaluation({**means, "accuracy": 100 * means["correct"]}, shown)


def _shown(
    tokenizer: Tokenizer,
    examples: list[Example],
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
