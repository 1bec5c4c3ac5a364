"""Batches of examples: length filter, padding, and shuffled epochs indexed by step.

The masks mark the real tokens. They come from the lengths, never from the pad id. All arrays are numpy, int32 and bool.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

import grain
import numpy as np

from train.config.errors import UserError
from train.data.tasks.task import Example
from train.data.tokenizers import Tokenizer, decode_continuation, encode_continuation
from train.data.tokenizers.protocol import EpisodeTokenizer
from train.sequences.batch import Batch, move_columns
from train.sequences.sample import Sample, pad_samples
from train.sequences.token_fields import shorten

_LOG = logging.getLogger(__name__)


def prompt_ids(example: Example, tokenizer: Tokenizer) -> Sequence[int] | np.ndarray:
    """Returns the ids of the prompt of an example."""
    return tokenizer.prompt_ids(example) if example.prompt_ids is None else example.prompt_ids


def _solution_ids(example: Example, tokenizer: Tokenizer) -> Sequence[int] | np.ndarray:
    return tokenizer.solution_ids(example) if example.solution_ids is None else example.solution_ids


def _demonstrated(example: Example, tokenizer: Tokenizer) -> Example:
    """Returns an example with the ids and the mask of its demonstration, if it has one, as an episode writes them."""
    if not example.demonstration or example.solution_ids is not None:
        return example
    roles = [role for role, _ in example.demonstration]
    turns = [role == "assistant" for role in roles]
    if turns != [number % 2 == 0 for number in range(len(roles))] or len(roles) % 2 == 0:
        raise UserError(
            f"demonstration: got the roles {', '.join(roles)} after {shorten(example.prompt)}, expected turns of "
            "assistant with one observation between two"
        )
    writer = cast(EpisodeTokenizer, tokenizer)
    prompt = list(prompt_ids(example, tokenizer))
    ids = list(prompt)
    mask: list[bool] = []
    messages = writer.messages(example)
    for role, text in example.demonstration:
        message = {"role": role, "content": text}
        if role == "assistant":
            reply = message
            added = [*encode_continuation(tokenizer, ids, text), tokenizer.eos_ids[0]]
        else:
            added = writer.observation_ids(messages, [message], before=ids, tools=writer.tools)
            messages += [reply, message]
        ids += added
        mask += [role == "assistant"] * len(added)
    solution = np.array(ids[len(prompt) :], np.int32)
    return replace(example, solution_ids=solution, solution_mask=np.array(mask))


def encode_prompts(examples: Sequence[Example], tokenizer: Tokenizer, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Encodes the prompt of each example, padded on the left, for the sampler.

    Returns:
      Tokens `[N, length]` int32 and mask `[N, length]` bool, True at real tokens.

    Raises:
      ValueError: a prompt is longer than `length`; filter the examples with `keep_prompts` first.
    """
    prompts = [Sample.of_prompt(prompt_ids(example, tokenizer)) for example in examples]
    rows = pad_samples(prompts, length=length, pad_id=tokenizer.pad_id)
    by = rows["prompt_lengths"] - length
    return move_columns(rows["tokens"], by, length, tokenizer.pad_id), move_columns(rows["token_mask"], by, length)


def encode_solutions(examples: Sequence[Example], tokenizer: Tokenizer, *, length: int) -> Batch:
    """Encodes prompt, solution and EOS of each example as a batch, which trains the solution and its EOS.

    Tokens that `Example.solution_mask` leaves out are observations. The arrays are of NumPy.
    """
    samples = [Sample.of_prompt(prompt_ids(example, tokenizer)) for example in examples]
    for example, sample in zip(examples, samples, strict=True):
        solution = np.asarray(_solution_ids(example, tokenizer))
        mask = np.ones(len(solution), bool) if example.solution_mask is None else np.asarray(example.solution_mask)
        sample.ids += solution.tolist()
        sample.trained += mask.tolist()
    return Batch(**pad_samples(samples, length=length, pad_id=tokenizer.pad_id))


def decode_completions(
    tokens: np.ndarray, token_mask: np.ndarray, completion_mask: np.ndarray, tokenizer: Tokenizer
) -> list[str]:
    """Decodes the completion of each row of `[B, T]` arrays as the continuation of its prompt."""
    rows = zip(tokens, token_mask & ~completion_mask, completion_mask, strict=True)
    return [
        decode_continuation(tokenizer, row[prompt].tolist(), row[completion].tolist())
        for row, prompt, completion in rows
    ]


def _keep(examples: Sequence[Example], lengths: Sequence[int], limit: int, label: str, field: str) -> list[Example]:
    fitting = [example for example, length in zip(examples, lengths, strict=True) if length <= limit]
    if not fitting:
        shortest = min(lengths, default=0)
        raise UserError(
            f"{field}: got {limit}, but none of the {len(examples)} {label} fit"
            + (f"; the shortest has {shortest} tokens; raise {field} to at least that" if examples else "")
        )
    dropped = len(examples) - len(fitting)
    if dropped:
        _LOG.warning(
            "%d of %d %s are longer than %s = %d tokens and are left out", dropped, len(examples), label, field, limit
        )
    return fitting


def keep_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, length: int, *, label: str = "prompts"
) -> list[Example]:
    """Drops the examples whose encoded prompt has more than `length` tokens, and logs a warning with their number.

    The returned examples carry their tokens (`Example.prompt_ids`), so no prompt is tokenized twice.

    Raises:
      UserError: no prompt fits (the message names the setting to raise), or a prompt has no tokens.
    """
    ids = [np.asarray(prompt_ids(example, tokenizer), np.int32) for example in examples]
    for example, row in zip(examples, ids, strict=True):
        if not len(row):
            raise UserError(
                f"prompt: got {example.prompt[:80]!r}, which has no tokens; write a prompt that is not empty"
            )
    tokenized = [replace(example, prompt_ids=row) for example, row in zip(examples, ids, strict=True)]
    return _keep(tokenized, [len(row) for row in ids], length, label, "data.max_prompt_length")


def keep_solutions(examples: Sequence[Example], tokenizer: Tokenizer, length: int) -> list[Example]:
    """Drops the examples whose solution and EOS have more than `length` tokens; otherwise as `keep_prompts`.

    Raises:
      UserError: no solution fits, an example has no solution, or its mask has another length than its ids.
    """
    _check_solved(examples)
    examples = [_demonstrated(example, tokenizer) for example in examples]
    ids = [np.asarray(_solution_ids(example, tokenizer), np.int32) for example in examples]
    for example, row in zip(examples, ids, strict=True):
        if example.solution_mask is not None and len(example.solution_mask) != len(row):
            raise UserError(
                f"solution_mask: got {len(example.solution_mask)} entries for the {len(row)} tokens of the solution of "
                f"{example.prompt[:80]!r}, expected one for each"
            )
    tokenized = [replace(example, solution_ids=row) for example, row in zip(examples, ids, strict=True)]
    return _keep(tokenized, [len(row) for row in ids], length, "solutions", "data.max_completion_length")


def check_solutions(examples: Sequence[Example], tokenizer: Tokenizer, length: int) -> None:
    """Raises the errors of `keep_solutions`, but stops tokenizing at the first solution that fits."""
    _check_solved(examples)
    if not any(len(_solution_ids(_demonstrated(example, tokenizer), tokenizer)) <= length for example in examples):
        keep_solutions(examples, tokenizer, length)


def _check_solved(examples: Sequence[Example]) -> None:
    for example in examples:
        if not example.solution:
            raise UserError(
                f"warm_start.steps: a warm start trains on solutions, but there is none for {example.prompt[:80]!r}; "
                "add a solution, or set warm_start.steps=0"
            )


def shuffled(count: int, seed: int) -> Callable[[int], int]:
    """Makes endless epochs of the numbers below `count`, each a permutation of its own.

    Returns:
      A function from an index to the number there, from 1 ms for a dozen numbers down to microseconds for thousands.
    """
    return grain.MapDataset.range(count).seed(seed).shuffle().repeat().__getitem__


def _epochs(
    examples: Sequence[Example], *, batch_size: int, seed: int
) -> Callable[[int, Iterable[int] | None], list[Example]]:
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
    number_at = shuffled(len(examples), seed)

    def batch(step: int, rows: Iterable[int] | None) -> list[Example]:
        chosen = range(batch_size) if rows is None else map(int, rows)
        return [examples[number_at(step * batch_size + row)] for row in chosen]

    return batch


class Prompts:
    """Endless shuffled epochs of the examples whose prompt fits, indexed by step.

    Batch `step` holds indices `step * batch_size + 0, 1, ...` of the epochs, each a different permutation. No state is
    carried between steps, so a resumed run gets the same batches. The order of the epochs does not depend on the number
    of processes, each of which takes some rows of a batch.

    Attributes:
      examples: the examples that fit; none if the completions of a recording bring their prompts.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        *,
        length: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self.examples = keep_prompts(examples, tokenizer, length) if examples else []
        self._batch = _epochs(self.examples, batch_size=batch_size, seed=seed) if examples else lambda *_: []

    def batch(self, step: int, rows: Iterable[int] | None = None) -> list[Example]:
        """Returns the examples of the batch of `step`: the examples `rows`, numbers below `batch_size`, or all."""
        return self._batch(step, rows)


class Supervised:
    """Shuffled epochs as `Prompts`, of examples whose prompt and solution both fit; batches are padded arrays."""

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        *,
        prompt_length: int,
        completion_length: int,
        length: int | None = None,
        batch_size: int,
        seed: int,
    ) -> None:
        """Takes the most tokens of a prompt, of a solution, and of both together; None: their sum."""
        self._length = length or prompt_length + completion_length
        solved = keep_solutions(keep_prompts(examples, tokenizer, prompt_length), tokenizer, completion_length)
        lengths = [len(prompt_ids(x, tokenizer)) + len(_solution_ids(x, tokenizer)) for x in solved]
        self.examples = _keep(solved, lengths, self._length, "prompts with solutions", "data.max_tokens")
        self._tokenizer = tokenizer
        self._batch = _epochs(self.examples, batch_size=batch_size, seed=seed)

    def batch(self, step: int, rows: Iterable[int] | None = None) -> Batch:
        """Returns the arrays of `step`: the rows `rows`, numbers below `batch_size`, or all."""
        return encode_solutions(self._batch(step, rows), self._tokenizer, length=self._length)
